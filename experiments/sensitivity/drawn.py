"""Predicted and measured survivors in ablations that are drawn from a seed.

``python -m experiments.sensitivity.drawn`` draws ablations: layout, micro-batches, loss, advantages, head, optimizer,
precision and rollout dataset. In each it predicts from data, settings and the clean run which known bugs the comparison
rejects, measures all of them, and writes ``drawn.json``.

A blind draw is announced first: ``--announce`` writes its predictions to ``announced.json``, which has to be committed
before ``python -m experiments.sensitivity.drawn NUMBER`` measures it and adds it to the record.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.sensitivity.predictions import predict
from workbench.atomic import from_json, to_json, write_whole
from workbench.compare.comparison import AGREES
from workbench.errors import RecordError, WorkbenchError
from workbench.experiment import Experiment
from workbench.faults import fault_names, load_fault
from workbench.mutation_score import sensitivity
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.files import load
from workbench.sensitivity.changes import DATA
from workbench.specs.reading import merge

RECORD = Path(__file__).parent / "drawn.json"
ANNOUNCED = Path(__file__).parent / "announced.json"
ABLATIONS = 20
ROLLOUTS = "data/arithmetic/rollouts"
DOCUMENTS = (5, 9)

Choice = Mapping[str, Any]
LAYOUTS: tuple[Choice, ...] = (
    {},
    {"cp": 2},
    {"cp": 2, "order": "zigzag"},
    {"cp": 2, "order": "striped", "attention": "ulysses"},
    {"cp": 4, "order": "zigzag", "attention": "ring"},
    {"cp": 3, "order": "document_zigzag", "attention": "ring"},
    {"tp": 2},
    {"cp": 2, "tp": 2, "order": "zigzag", "sequence_parallel": True},
    {"dp": 2},
    {"dp": 2, "cp": 2, "order": "zigzag"},
    {"dp": 2, "tp": 2},
)
LOSSES: tuple[Choice, ...] = (
    {"name": "grpo"},
    {"name": "grpo", "kl": {"coefficient": 0.3}},
    {"name": "grpo", "denominator": "document"},
    {"name": "grpo", "denominator": "document_sum"},
    {"name": "dapo", "correction": {"kind": "tis"}},
    {"name": "grpo", "kl": {"coefficient": 0.3, "estimator": "k1", "gradient": "score"}},
    {"name": "dr_grpo", "denominator_constant": 16.0},
    {"name": "gspo"},
    {"name": "luspo"},
    {"name": "gmpo"},
    {"name": "vapo"},
    {"name": "cispo"},
    {"name": "grpo", "squared_logit_coefficient": 0.01},
    {"name": "grpo", "entropy_coefficient": 0.1},
    {"name": "reinforce"},
    {"name": "grpo", "correction": {"kind": "sequence_tis_mean"}},
)
MICRO_BATCHES: tuple[Choice, ...] = ({}, {"data": {"micro_batches": 2}}, {"data": {"micro_batches": 3}})
ADVANTAGES: tuple[Choice, ...] = (
    {},
    *({"data": {"advantages": {"name": name}}} for name in ("grpo", "rloo", "reinforce_plus_plus")),
)
HEADS: tuple[Choice, ...] = (
    {},
    {"policy": {"temperature": 0.7}},
    {"policy": {"logprobs": "chunked", "chunk_tokens": 16}},
    {"policy": {"fused_loss": True, "chunk_tokens": 32}},
)
OPTIMIZERS: tuple[Choice, ...] = (
    {"optimizer": {"name": "sgd", "learning_rate": 0.1}},
    {"optimizer": {"name": "adamw", "learning_rate": 1e-3}},
    {"optimizer": {"name": "adamw", "learning_rate": 1e-3, "max_grad_norm": 0.01}},
)
PRECISIONS = ("float64", "float64", "float64", "float32")


def drawn(number: int, folder: Path, project: Path) -> dict[str, Any]:
    """Draw an ablation, and write its rollout dataset; the same number gives the same ablation."""
    rng = random.Random(f"drawn ablation {number}")
    batch = load(project / ROLLOUTS)
    chosen = sorted(rng.sample(range(batch.num_documents), rng.randint(*DOCUMENTS)))
    batch = batch.select(chosen).as_source()
    edits = [name for name in DATA if rng.random() < 0.25]
    for name in edits:
        batch = DATA[name](batch)
    batch.save(folder, overwrite=True)
    settings: Any = {
        "steps": rng.randint(1, 2),
        "precision": rng.choice(PRECISIONS),
        "loss": rng.choice(LOSSES),
        "data": {"path": str(folder.resolve())},
    }
    for choices in (ADVANTAGES, HEADS, OPTIMIZERS):
        settings = merge(settings, rng.choice(choices))
    changed = merge({"layout": rng.choice(LAYOUTS)}, rng.choice(MICRO_BATCHES))
    truth = {"precision": "float64", "layout": {}}
    return {
        "documents": len(chosen),
        "tokens": batch.num_tokens,
        "edits": edits,
        "ablation": {
            "question": f"Drawn ablation {number}",
            "base": settings,
            "reference": "one_rank",
            "truth": "exact",
            "configurations": {"one_rank": {}, "exact": truth, "changed": changed},
        },
    }


def measured(number: int, project: Path) -> dict[str, Any]:
    """Predict and measure every fault in one drawn ablation; an ablation that is refused says why."""
    with tempfile.TemporaryDirectory() as folder:
        draw = drawn(number, Path(folder) / "rollouts", project)
        began = time.monotonic()
        entry = {"number": number, "documents": draw["documents"], "tokens": draw["tokens"], "edits": draw["edits"]}
        settings = draw["ablation"]
        entry["base"] = {key: value for key, value in settings["base"].items() if key != "data"}
        entry["base"]["data"] = {key: value for key, value in settings["base"]["data"].items() if key != "path"}
        entry["changed"] = settings["configurations"]["changed"]
        try:
            score = sensitivity(settings, configurations=["changed"], remedies=False)
        except WorkbenchError as error:
            return entry | {"refused": str(error).replace(folder, "FOLDER")}
    return entry | {
        "seconds": time.monotonic() - began,
        "killed": score.killed,
        "admissible": len(score.results),
        "results": {
            result.fault: {"missing": list(result.missing), "killed": result.killed, "verdict": result.verdict}
            for result in score.results
        },
        "disagreements": [result.fault for result in score.disagreements],
    }


def predicted(number: int, names: Iterable[str], project: Path) -> dict[str, list[str]]:
    """Predict faults of a drawn ablation again, from its clean runs alone: the needs that each of them lacks."""
    with tempfile.TemporaryDirectory() as folder:
        draw = drawn(number, Path(folder) / "rollouts", project)
        return predict(Experiment(draw["ablation"], project=project), ["changed"], names)


def predict_again(entry: Mapping[str, Any], project: Path) -> dict[str, Any]:
    """Return a measured entry with the predictions of the needs as they are now.

    ``first_disagreements`` keeps the faults whose prediction, made before the measurement, was wrong.
    """
    if "refused" in entry:
        return dict(entry)
    missing = predicted(entry["number"], entry["results"], project)
    results = {name: {**result, "missing": missing[name]} for name, result in entry["results"].items()}
    return {
        **entry,
        "results": results,
        "first_disagreements": entry.get("first_disagreements", entry["disagreements"]),
        "disagreements": [name for name, result in results.items() if result["killed"] == bool(result["missing"])],
    }


SHOWN, HIDDEN, INADMISSIBLE = "+-."
"""A fault of an announced draw is predicted to be rejected, or accepted; or no run calls its seam."""


def announce(numbers: Iterable[int], project: Path) -> dict[str, Any]:
    """Predict every fault of draws that are not measured: a sign for each; draws that are refused have none."""
    names = [name for name in fault_names() if (own := load_fault(name)).changes_numbers or own.changes_update]
    draws = {}
    for number in numbers:
        try:
            missing = predicted(number, names, project)
        except WorkbenchError as error:
            draws[str(number)] = f"refused: {error.parts['requested']}"
            continue
        signs = [INADMISSIBLE if name not in missing else HIDDEN if missing[name] else SHOWN for name in names]
        draws[str(number)] = "".join(signs)
    return {"faults": names, "draws": draws}


def commit_of_announcement(entry: Mapping[str, Any]) -> str:
    """Return the commit that has the predictions of a measured draw; "" if it was not announced.

    Raises:
        RecordError: they are not committed, or the measurement predicts otherwise.
    """
    announced = json.loads(ANNOUNCED.read_text()) if ANNOUNCED.exists() else {"faults": [], "draws": {}}
    signs = announced["draws"].get(str(entry["number"]), "")
    if not signs or "refused" in entry:
        return ""
    requested = f"measure draw {entry['number']}, whose predictions are announced"
    expected = {pair for pair in zip(announced["faults"], signs, strict=True) if pair[1] != INADMISSIBLE}
    own = {(name, HIDDEN if result["missing"] else SHOWN) for name, result in entry["results"].items()}
    if changed := {name for name, _ in expected ^ own}:
        raise RecordError(
            requested,
            found=f"other predictions now: {', '.join(sorted(changed))}",
            rule="the code that predicts is that of the announcement",
            fix="announce a draw that is not measured yet",
        )
    if _git("status", "--porcelain", "--", ANNOUNCED.name):
        raise RecordError(requested, rule="predictions are committed before they are measured", fix="commit them first")
    return _git("log", "-1", "--format=%h", "--", ANNOUNCED.name)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ANNOUNCED.parent, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RecordError(" ".join(command), found=done.stderr.strip(), rule="announced draws are measured in a clone")
    return done.stdout.strip()


def measure(
    numbers: range | list[int],
    *,
    wanted: int = ABLATIONS,
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure drawn ablations until as many as requested ran; refused draws are in the record too."""
    project = project_root()
    entries: list[dict[str, Any]] = []
    for number in numbers:
        entries.append(measured(number, project))
        if commit := commit_of_announcement(entries[-1]):
            entries[-1]["announced"] = commit
        report_progress(summary(entries[-1]))
        if sum("refused" not in entry for entry in entries) == wanted:
            break
    return {
        "benchmark": "drawn ablations",
        "command": command_of(entries),
        "device": "cpu, simulated ranks",
        "ablations": entries,
        "provenance": provenance(project),
    }


def command_of(entries: Iterable[Mapping[str, Any]]) -> str:
    """Command that measures the draws of a record."""
    return " ".join(["python -m experiments.sensitivity.drawn", *(str(entry["number"]) for entry in entries)])


def packed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record in a tenth of its size.

    The results of an ablation are a word for each of the record's ``faults``: "-" if it is not admissible, else the
    number of its verdict and, after a colon, those of the reasons that it lacks.
    """
    results = [entry.get("results", {}) for entry in record["ablations"]]
    faults = sorted({name for each in results for name in each})
    verdicts = sorted({result["verdict"] for each in results for result in each.values()})
    reasons = sorted({reason for each in results for result in each.values() for reason in result["missing"]})

    def word(result: Mapping[str, Any] | None) -> str:
        if result is None:
            return "-"
        missing = ",".join(str(reasons.index(reason)) for reason in result["missing"])
        return str(verdicts.index(result["verdict"])) + (f":{missing}" if missing else "")

    entries = [
        {**entry, "results": " ".join(word(entry["results"].get(name)) for name in faults)}
        if "results" in entry
        else entry
        for entry in record["ablations"]
    ]
    return {**record, "faults": faults, "verdicts": verdicts, "reasons": reasons, "ablations": entries}


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a packed record with the results as `measured` has them."""

    def result(word: str) -> dict[str, Any]:
        number, _, missing = word.partition(":")
        verdict = record["verdicts"][int(number)]
        reasons = [record["reasons"][int(each)] for each in missing.split(",") if each]
        return {"missing": reasons, "killed": verdict not in AGREES, "verdict": verdict}

    def results(words: str) -> dict[str, Any]:
        pairs = zip(record["faults"], words.split(), strict=True)
        return {name: result(word) for name, word in pairs if word != "-"}

    entries = [
        {**entry, "results": results(entry["results"])} if "results" in entry else entry
        for entry in record["ablations"]
    ]
    tables = ("faults", "verdicts", "reasons")
    return {key: value for key, value in record.items() if key not in tables} | {"ablations": entries}


def load_record(path: Path = RECORD) -> dict[str, Any]:
    """Return a saved record, with the results as `measured` has them."""
    return unpacked(from_json(path.read_text()))


def summary(entry: Mapping[str, Any]) -> str:
    """Summarize one ablation in a line."""
    if "refused" in entry:
        return f"{entry['number']}: refused: {entry['refused'].splitlines()[0]}"
    wrong = [f"{name} ({entry['results'][name]['verdict']})" for name in entry["disagreements"]]
    return (
        f"{entry['number']}: {entry['killed']} of {entry['admissible']} killed in {entry['seconds']:.0f} s, "
        f"{json.dumps(entry['base']['loss'])} {json.dumps(entry['changed'])}; differ: {', '.join(wrong) or 'none'}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure the draws, or those that are named, and write the record of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "numbers", nargs="*", type=int, help="draws to add to the record; without any, the first 20 that run"
    )
    parser.add_argument("--announce", action="store_true", help="predict the named draws, and measure nothing")
    parser.add_argument("--predict", action="store_true", help="keep the record's measurements, and predict them again")
    chosen = parser.parse_args(arguments)
    named = chosen.numbers
    if chosen.announce:
        write_whole(ANNOUNCED, to_json(announce(named, project_root())))
        return 0
    if chosen.predict:
        saved = load_record()
        entries = [predict_again(entry, project_root()) for entry in saved["ablations"]]
        write_whole(RECORD, to_json(packed({**saved, "ablations": entries})))
        return int(any(entry.get("disagreements") for entry in entries))
    record = measure(
        named or range(10 * ABLATIONS),
        report_progress=lambda line: print(line, flush=True),
    )
    if named:
        kept = {entry["number"]: entry for entry in (*load_record()["ablations"], *record["ablations"])}
        entries = [kept[number] for number in sorted(kept)]
        record |= {"ablations": entries, "command": command_of(entries)}
    write_whole(RECORD, to_json(packed(record)))
    return int(any(entry.get("disagreements") for entry in record["ablations"]))


if __name__ == "__main__":
    sys.exit(main())
