"""Known bugs that the comparison of `layout_parity` rejects, and those that gates of other projects would reject.

``workbench bench sensitivity`` plants every admissible fault in a float64 and in a float32 run of the ablation, with
the changes that kill the survivors and a generated dataset, and writes ``sensitivity.json`` and ``report.html``.
``python -m experiments.sensitivity.measure`` keeps the measurements of the record, and predicts them again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.sensitivity.gates import GATES
from experiments.sensitivity.page import write_sensitivity_report
from experiments.sensitivity.predictions import predict
from workbench.atomic import from_json, to_json, write_whole
from workbench.experiment import Experiment
from workbench.mutation_score import sensitivity
from workbench.records.provenance import project_root, provenance
from workbench.sensitivity.gates import Gate, Tolerance
from workbench.sensitivity.record import Sensitivity

ABLATION = "experiments/layout_parity/ablation.yaml"
LIMIT_S = 300.0
"""Bar of both measurements: the time that a change of an ablation may wait for the first. Seconds of CPU time, which
other programs on the machine hardly change."""
MAX_TOKENS = 200
"""Bar of the generated dataset."""


def measure(
    *,
    pairs: int = 0,
    faults: Sequence[str] = (),
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure both precisions, and return a record.

    Args:
        pairs: not used; every benchmark takes it.
        faults: names of faults; all if none is named.
        report_progress: called with progress messages.
    """
    project, began = project_root(), time.process_time()
    planned = Experiment(project / ABLATION).planned
    lower = [plan.name for plan in planned if plan.spec.precision == "float32" and not plan.spec.faults]
    with tempfile.TemporaryDirectory() as folder:
        exact = sensitivity(
            project / ABLATION, faults=faults, dataset=Path(folder) / "rollouts", report_progress=report_progress
        )
    rounded = sensitivity(
        project / ABLATION, configurations=lower, faults=faults, remedies=False, report_progress=report_progress
    )
    cpu_seconds = time.process_time() - began
    tested = [result for result in exact.results if result.generated is not None]
    bars = {
        "predictions agree": {"holds": not exact.disagreements and not rounded.disagreements},
        "cpu_seconds": {"bar": LIMIT_S, "measured": cpu_seconds, "holds": cpu_seconds <= LIMIT_S},
        "generated dataset": {
            "bar": MAX_TOKENS,
            "holds": exact.dataset["tokens"] < MAX_TOKENS and all(result.generated for result in tested),
        },
    }
    return {
        "benchmark": "sensitivity",
        "device": "cpu, simulated ranks",
        "float64": small(exact.as_json(), whole=True),
        "float32": small(rounded.as_json(), whole=False),
        "gates": [_gate(gate, exact, rounded) for gate in GATES],
        "bars": bars,
        "provenance": provenance(project),
    }


def predict_again(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its measurements, and the predictions of the needs as they are now.

    ``first_disagreements`` of each precision keeps the faults whose prediction, made before the measurement, was wrong.
    """
    experiment = Experiment(project_root() / ABLATION)
    again = {}
    for precision in ("float64", "float32"):
        own = record[precision]
        runs = [p.name for p in experiment.planned if p.spec.precision == precision and not p.spec.faults]
        killed = own["results"] if precision == "float32" else {r["fault"]: r["killed"] for r in own["results"]}
        missing = predict(experiment, runs, killed)
        again[precision] = {
            **own,
            "disagreements": [name for name in killed if killed[name] == bool(missing[name])],
            "first_disagreements": own.get("first_disagreements", own["disagreements"]),
        }
        if precision == "float64":
            again[precision]["results"] = [{**r, "missing": missing[r["fault"]]} for r in own["results"]]
    agree = not any(own["disagreements"] for own in again.values())
    return {**record, **again, "bars": {**record["bars"], "predictions agree": {"holds": agree}}}


KEPT = ("killed", "admissible", "gradient_killed", "gradient_admissible", "disagreements", "seconds", "steps")
"""Numbers of the float32 measurement that the record keeps; it is made of the same faults."""


def small(own: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return a record without the distances, whose judgements by gates are kept; if not whole, its numbers alone."""
    if not whole:
        killed = {result["fault"]: result["killed"] for result in own["results"]}
        return {key: own[key] for key in KEPT} | {"results": killed}
    cut = {"distances": None, "what": ""}
    remedies = [[{**remedy, "settings": {}} for remedy in result["remedies"]] for result in own["results"]]
    results = [
        {**result, **cut, "why": result["why"][:80], "remedies": of_one}
        for result, of_one in zip(own["results"], remedies, strict=True)
    ]
    return {**own, "results": results}


def _gate(gate: Gate, *records: Sensitivity) -> dict[str, Any]:
    """Kill rates of a gate in each record, of all faults and of those of gradients; survivors of the first."""
    rates = []
    for record in records:
        score = gate.score(record.results)
        of_gradients = gate.score([result for result in record.results if result.changes_gradient])
        rates.append(
            {
                "killed": score.killed,
                "admissible": score.admissible,
                "gradient_killed": of_gradients.killed,
                "gradient_admissible": of_gradients.admissible,
                "survivors": list(score.survivors) if record is records[0] else [],
            }
        )
    bounds = {
        name: _text(value)
        for name in ("first_loss", "loss", "gradient_norm", "logprobs", "weights_after")
        if (value := getattr(gate, name)) is not None
    }
    return {
        "name": gate.name,
        "source": gate.source,
        "bounds": bounds,
        "steps": gate.steps,
        "float64": rates[0],
        "float32": rates[1],
    }


def _text(tolerance: Tolerance) -> str:
    if not tolerance.relative and not tolerance.absolute:
        return "equal"
    joined = " or " if tolerance.joined == "maximum" else " + "
    return f"{tolerance.relative:g} relative{joined}{tolerance.absolute:g}"


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = []
    for precision in ("float64", "float32"):
        own = record[precision]
        lines.append(
            f"{precision}: the comparison rejects {own['killed']} of {own['admissible']} faults, "
            f"{own['gradient_killed']} of {own['gradient_admissible']} of those that change a gradient, in "
            f"{own['seconds']:.0f} s of wall time; predictions differ for {', '.join(own['disagreements']) or 'none'}"
        )
        lines += [
            f"  {gate['name']}: {gate[precision]['killed']}, {gate[precision]['gradient_killed']} of gradients"
            for gate in record["gates"]
        ]
    return "\n".join(lines)


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as a page."""
    return write_sensitivity_report(record, folder)


def main() -> int:
    """Predict the faults of the record again, and write it and its page."""
    folder = Path(__file__).parent
    record = predict_again(from_json((folder / "sensitivity.json").read_text()))
    write_whole(folder / "sensitivity.json", to_json(record))
    write_page(record, folder)
    return int(not record["bars"]["predictions agree"]["holds"])


if __name__ == "__main__":
    sys.exit(main())
