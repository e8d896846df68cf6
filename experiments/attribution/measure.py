"""Causes planted between trainer and sampler, the floor by two methods, false alarms, and a run over steps.

``workbench bench attribution`` writes ``attribution.json`` and ``report.html``. The planted cases are the author's own
and on view: blind sets are in ``blind/``.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from experiments.attribution.cases import Bench, Case, Engine, clean, in_dtype, pairs, prompts, singles
from experiments.attribution.page import write_attribution_report
from workbench.atomic import from_json
from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.documents import read_documents
from workbench.mismatch.floor import noise_of, truth
from workbench.mismatch.settings import sides
from workbench.mismatch.verdict import Attribution
from workbench.records.provenance import project_root, provenance

BENCHES = (("qwen3", "small"), ("moe", "small"), ("llama", "medium"), ("qwen3", "large"))
"""Kind and size of the decoders: three families, three sizes."""
CLEAN = 200
"""Clean cases: three accusations of 300 are 1 %, and so are two of 200."""
NEAR = 0.2
"""Distance between the floor and its independent measurement that is accepted, relative."""
FIRST, BOTH, ACCUSED = 0.9, 0.8, 0.01
"""Bars of the issue: share of singles named first, of pairs with both named, of clean cases accused."""
DRAWS = 2
"""Of each floor: thresholds come from its documents, drawn with replacement."""
DOCUMENTS, TOKENS = 24, 24
"""Completions on which a floor is measured, three times as many of small decoders, and their tokens."""
RARE = 10
"""Times as many of a mixture in float16. A route that flips moves a token by some hundred roundings, and 1 or 2 of 72
completions have one: their count alone moves the mean by a third. Of 720 some 20 have, and it is known to a tenth."""
FAR = 12
"""Medians beyond which a token is far from the truth: six standard deviations and more, were there rounding alone."""
STEPS, STUCK = 10, 5
"""Steps of the run, and the step after which the sampler's weights are no longer renewed."""


def measure(
    *, pairs: int = 0, only: tuple[str, ...] = (), report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure everything, and return a record.

    Args:
        pairs: clean cases; 0 takes `CLEAN`.
        only: kinds of decoders; all if none is named. With "floors" before them, their floors alone are measured again,
            and the rest is kept as it was saved.
        report_progress: called with progress messages.
    """
    start, kinds = time.monotonic(), only or tuple(kind for kind, _ in BENCHES)
    if only[:1] == ("floors",):
        saved = from_json((Path(__file__).parent / "attribution.json").read_text())
        return floors_again(saved, only[1:], report_progress)
    with tempfile.TemporaryDirectory() as temporary:
        benches = benches_in(Path(temporary), kinds)
        floors = [row for bench in benches for row in both_floors(bench, report_progress)]
        planted = [row for bench in benches for row in planted_rows(bench, report_progress)]
        right = clean_rows(benches, range(pairs or CLEAN), report_progress)
        history = run_over_steps(benches[0])
    return record_of(floors, planted, right, history, time.monotonic() - start)


def floors_again(
    saved: Mapping[str, Any], kinds: Sequence[str], report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Return a saved record with the floors of some kinds of decoders, or of all, measured again."""
    with tempfile.TemporaryDirectory() as temporary:
        fresh = [row for bench in benches_in(Path(temporary), kinds) for row in both_floors(bench, report_progress)]
    by_name = {(row["kind"], row["size"], row["precision"]): row for row in [*saved["floors"], *fresh]}
    return record_of(list(by_name.values()), saved["planted"], saved["clean"], saved["steps"], saved["seconds"])


def benches_in(folder: Path, kinds: Sequence[str] = ()) -> list[Bench]:
    """The decoders of the experiment, of some kinds or of all; adapters are written into a folder."""
    return [Bench(kind, size, folder) for kind, size in BENCHES if not kinds or kind in kinds]


def record_of(
    floors: Sequence[Mapping[str, Any]],
    planted: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    history: Mapping[int, Any],
    seconds: float,
) -> dict[str, Any]:
    """Return the record of measured rows, with its summary and bars."""
    one, two = ([row for row in planted if len(row["planted"]) == n] for n in (1, 2))
    summary = {
        "singles": len(one),
        "first": sum(row["causes"][:1] == row["planted"] for row in one),
        "pairs": len(two),
        "both": sum(set(row["planted"]) <= set(row["causes"]) for row in two),
        "rest_at_floor": sum(not row["alarms"] for row in planted),
        "planted": len(planted),
        "clean": len(right),
        "accused": sum(bool(row["causes"] or row["alarms"]) for row in right),
        "furthest_floor": max((abs(row["ratio"] - 1) for row in floors), default=0.0),
    }
    bars = {
        "named first": {"bar": FIRST, "holds": summary["first"] >= FIRST * len(one)},
        "both named": {"bar": BOTH, "holds": summary["both"] >= BOTH * len(two)},
        "accused": {"bar": ACCUSED, "holds": summary["accused"] <= ACCUSED * len(right)},
        "floor": {"bar": NEAR, "holds": summary["furthest_floor"] <= NEAR},
    }
    return {
        "benchmark": "attribution",
        "command": "python -m workbench bench attribution",
        "device": "cpu",
        "summary": summary,
        "floors": list(floors),
        "planted": list(planted),
        "clean": list(right),
        "steps": {str(step): one if isinstance(one, dict) else one.as_json() for step, one in history.items()},
        "seconds": seconds,
        "bars": bars,
        "provenance": provenance(project_root()),
    }


def clean_rows(
    benches: Sequence[Bench], numbers: Iterable[int], report_progress: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Attribute clean cases by number, in turn on the small decoders."""
    own, rows = [bench for bench in benches if bench.size == "small"], []
    for number in numbers:
        rows.append(attributed(clean(own[number % len(own)], number)))
        report_progress(f"{rows[-1]['case']}: {rows[-1]['causes'] or ''} {rows[-1]['alarms'] or ''}")
    return rows


def both_floors(bench: Bench, report_progress: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """The floor of each precision by random rounding, and by the distance of the computation itself from its truth."""
    rows = []
    for precision in ("float32", "bfloat16", "float16"):
        rows.append(floor_row(bench, precision, documents_of(bench, precision)))
        report_progress(f"floor {bench.kind} {bench.size} {precision}: {rows[-1]['ratio']:.3f}")
    return rows


def documents_of(bench: Bench, precision: str) -> int:
    """Completions on which a floor is measured."""
    return (
        DOCUMENTS * (3 if bench.size == "small" else 1) * (RARE if (bench.kind, precision) == ("moe", "float16") else 1)
    )


def floor_row(bench: Bench, precision: str, documents: int) -> dict[str, Any]:
    """Row of the record: the floor of one precision by both methods."""
    bench = copy.copy(bench)
    bench.count, bench.tokens = documents, TOKENS
    bench.rows = prompts(bench.count, 11)
    trainer, sampler = sides({"model": bench.model}, bench.records(Engine(bench.model)))
    computation = Computation(trainer, read_documents(sampler.rollouts))
    real = []
    for kernel in ("sdpa", "eager"):  # two computations of one precision: each has a rounding of its own
        own = Configuration(precision=precision, attention=kernel)
        real.append(computation.column(own) - truth(computation, own))
    drawn_KT, real_KT = (
        noise_of(computation, Configuration(precision=precision), draws=DRAWS, seed=0),
        torch.stack(real),
    )
    figures = [float(values.abs().mean()) for values in (drawn_KT, real_KT)]
    far = FAR * float(real_KT.abs().median())
    return {
        "kind": bench.kind,
        "size": bench.size,
        "precision": precision,
        "drawn": figures[0],
        "real": figures[1],
        "ratio": figures[0] / figures[1],
        "tokens": drawn_KT.shape[1],
        "documents": documents,
        "far_documents": [_documents_with(values, far) for values in (drawn_KT, real_KT)],
    }


def _documents_with(values_KT: torch.Tensor, far: float) -> float:
    """Documents with a token that is further than this from the truth, in the mean of the draws."""
    return float((values_KT.abs() > far).unflatten(1, (-1, TOKENS)).any(2).sum(1).double().mean())


def planted_rows(bench: Bench, report_progress: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Attribute the planted cases of a decoder; of one that is not small every second one, because it takes longer."""
    rows = []
    for build in planted_cases(bench).values():
        rows.append(attributed(build()))
        report_progress(f"{rows[-1]['case']}: planted {rows[-1]['planted']}, named {rows[-1]['causes']}")
    return rows


def planted_cases(bench: Bench) -> dict[str, Callable[[], Case]]:
    """Planted cases of a decoder by name."""
    cases = list((singles(bench) | pairs(bench)).items())
    return dict(cases if bench.size == "small" else cases[::2])


def attributed(case: Case) -> dict[str, Any]:
    """Attribute a case, and return its row of the record."""
    start = time.monotonic()
    result = wb.attribute(case.trainer, case.sampler, draws=DRAWS)
    return {
        "case": case.name,
        "planted": list(case.factors),
        "causes": [part.factor for part in result.causes],
        "descriptions": [part.description for part in result.causes],
        "verdict": result.verdict,
        "alarms": dict(result.alarms),
        "gap": result.gap["mean_distance"],
        "rest": result.rest["mean_distance"],
        "floor": result.floor["mean"],
        "seconds": round(time.monotonic() - start, 2),
    }


def run_over_steps(bench: Bench) -> Mapping[int, Attribution]:
    """Attribute each step of a run whose bfloat16 sampler gets new weights until `STUCK`, and then no longer."""
    policy = copy.deepcopy(bench.model).requires_grad_(True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    checkpoints, history = [copy.deepcopy(policy)], {}
    for step in range(STEPS):
        engine = Engine(in_dtype(checkpoints[min(step, STUCK)], torch.bfloat16), temperature=bench.temperature)
        records = bench.records(engine, seed=100 + step)
        older = {f"step_{at}": checkpoints[at] for at in range(step - 1, max(-1, step - 5), -1)}
        trainer = {"model": checkpoints[step], "older": older, "temperature": bench.temperature}
        history[step] = wb.attribute(trainer, {"rollouts": records, "precision": "bfloat16"}, draws=DRAWS)
        loss = torch.zeros(())
        for one in records:  # REINFORCE: completions with an even first token are better
            ids = torch.tensor([[*one["prompt_ids"], *one["completion_ids"]]])
            logprobs = torch.log_softmax(policy(ids).logits[0, :-1] / bench.temperature, -1)
            own = logprobs.gather(1, ids[0, 1:, None])[len(one["prompt_ids"]) - 1 :]
            loss = loss - (1.0 if one["completion_ids"][0] % 2 == 0 else -1.0) * own.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoints.append(copy.deepcopy(policy))
    return history


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    own = record["summary"]
    return "\n".join(
        [
            f"{own['first']} of {own['singles']} singles named first, both of {own['both']} of {own['pairs']} pairs",
            f"{own['rest_at_floor']} of {own['planted']} rests at the floor",
            f"{own['accused']} of {own['clean']} clean cases accused",
            f"the floor is reproduced within {own['furthest_floor']:.1%}; {record['seconds']:.0f} s",
        ]
    )


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as a page."""
    return write_attribution_report(record, folder)
