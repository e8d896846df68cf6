"""Generated combinations, drawn from a seed: layouts times packings times heads.

    python -m tests.parity.generated     runs all of them and writes experiments/generated_layouts.json

Nothing is left out of a draw because it cannot work: an invalid combination must be refused on every rank,
and `refusal` says here which those are, by the arithmetic alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.helpers.bars import distances
from tests.helpers.ranks import run_ranks
from tests.parity.cases import one_step
from tests.parity.test_oracle import LOSS, documents_near, oracle
from workbench.errors import WorkbenchError
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

RECORD = Path(__file__).parents[2] / "experiments/generated_layouts.json"
BAR = 1e-12
HEADS = {"query": 4, "key": 2}
"""Of the tiny Qwen3."""

SHAPES = {
    2: [(1, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)],
    3: [(1, 3, 1), (1, 3, 1), (3, 1, 1)],
    4: [(1, 4, 1), (1, 4, 1), (2, 2, 1), (2, 2, 1), (1, 2, 2), (1, 2, 2), (4, 1, 1), (2, 1, 2), (1, 1, 4)],
    6: [(1, 6, 1), (3, 2, 1), (2, 3, 1), (1, 3, 2)],
    8: [(1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 4, 2), (2, 2, 2)],
}
"""dp x cp x tp by the number of ranks; what stands twice is drawn twice as often."""
COUNTS = {2: 88, 3: 24, 4: 152, 6: 24, 8: 72}
TOGETHER = 8
"""Combinations that one set of processes runs."""

CHOICES = {
    "order": ["contiguous", "zigzag", "striped", "document_zigzag", "balanced"],
    "attention": ["gathered", "ring", "ulysses", "hybrid"],
    "ulysses": [1, 2, 4],
    "block_tokens": [1, 4],
    "sequence_parallel": [False, True],
    "shard_parameters": [False, True],
    "checkpointing": [False, True],
    "packing": ["one row", "two rows", "three rows", "filled", "longer"],
    "head": ["auto", "chunked", "fused"],
    "tied": [True, False],
    "temperature": [1.0, 0.7],
    "denominator": ["token", "document"],
    "documents": [0, 1, 2],
}


@dataclass(frozen=True)
class Combination:
    """One draw.

    Attributes:
        number: of the draw, among those of as many ranks.
        dp, cp, tp: its ranks.
        chosen: of `CHOICES`, by name.
    """

    number: int
    dp: int
    cp: int
    tp: int
    chosen: dict

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def layout(self) -> dict:
        names = ("order", "attention", "sequence_parallel", "shard_parameters", "checkpointing")
        more = {name: self.chosen[name] for name in names}
        if self.chosen["order"] == "balanced":
            more["block_tokens"] = self.chosen["block_tokens"]
        if self.chosen["attention"] == "hybrid":
            more["ulysses"] = self.chosen["ulysses"]
        return {"dp": self.dp, "cp": self.cp, "tp": self.tp} | more

    @property
    def settings(self) -> dict:
        packing = self.chosen["packing"]
        data: dict = {"micro_batches": {"two rows": 2, "three rows": 3}.get(packing, 1)}
        if packing == "filled":
            data = {"micro_batch_tokens": 64}
        if packing == "longer":
            data["multiple_of"] = 48 * 4  # more than any layout here needs, and a multiple of it
        head = {
            "auto": {},
            "chunked": {"logprobs": "chunked", "chunk_tokens": 16},
            "fused": {"logprobs": "chunked", "chunk_tokens": 16, "fused_loss": True},
        }[self.chosen["head"]]
        return {
            "model": {"source": "tiny-qwen3", "tied": self.chosen["tied"], "seed": 3},
            "precision": "float64",
            "loss": LOSS | {"denominator": self.chosen["denominator"]},
            "layout": self.layout,
            "data": data,
            "policy": head | {"temperature": self.chosen["temperature"]},
        }

    @property
    def ask(self) -> tuple:
        """Return the settings that determine the ground truth."""
        return tuple(self.chosen[name] for name in ("documents", "tied", "temperature", "denominator"))

    def __str__(self) -> str:
        return json.dumps(self.settings["layout"] | {name: self.chosen[name] for name in ("packing", "head", "tied")})


def drawn(world: int, number: int) -> Combination:
    """The draw of a number; the same on every machine."""
    rng = random.Random(f"layouts of {world} ranks, {number}")
    dp, cp, tp = rng.choice(SHAPES[world])
    return Combination(number, dp, cp, tp, {name: rng.choice(values) for name, values in CHOICES.items()})


ALL = [drawn(world, number) for world, count in COUNTS.items() for number in range(count)]
GROUPS = [(world, first) for world, count in COUNTS.items() for first in range(0, count, TOGETHER)]


def group(world: int, first: int) -> list[Combination]:
    """The draws that one set of processes runs."""
    return [drawn(world, number) for number in range(first, first + TOGETHER)]


def refusal(combination: Combination) -> str | None:
    """Return the required text of the refusal of a combination; None if it is valid."""
    c, chosen = combination, combination.chosen
    if chosen["attention"] == "hybrid" and (c.cp % chosen["ulysses"] or chosen["ulysses"] == 1 < c.cp):
        return "ulysses"
    if HEADS["key"] % c.tp:
        return "heads"
    exchanged = {"ulysses": c.cp, "hybrid": chosen["ulysses"]}.get(chosen["attention"], 1) if c.cp > 1 else 1
    if HEADS["query"] // c.tp % exchanged:
        return "heads"
    return None


@functools.cache
def truth(documents: int, tied: bool, temperature: float, denominator: str) -> tuple:
    """The documents of a case, and the oracle's loss, gradients and log-probabilities."""
    chosen = documents_near(40 + documents, tied=tied, temperature=temperature)
    return chosen, oracle(chosen, tied=tied, temperature=temperature, denominator=denominator)


def steps_or_refusals(cases: list[tuple[dict, list[dict]]]) -> list[dict]:
    """On a rank: each case is a step, or the message of its refusal."""
    answers = []
    for settings, documents in cases:
        try:
            parse_spec(RunSpec, settings, where="generated")
            answers.append(one_step(settings, documents))
        except WorkbenchError as refused:
            answers.append({"refused": str(refused)})
    return answers


def judged(combinations: list[Combination], folder: Path) -> list[dict]:
    """Run combinations of equally many ranks, and return the distance of each from the ground truth, or its refusal.

    Raises:
        RanksError: a rank hung, or raised what is no refusal.
    """
    cases = [(c.settings, truth(*c.ask)[0]) for c in combinations]
    per_rank = run_ranks(steps_or_refusals, combinations[0].world, folder, cases, timeout_s=240)
    return [verdict(c, [answers[number] for answers in per_rank]) for number, c in enumerate(combinations)]


def verdict(combination: Combination, answers: list[dict]) -> dict:
    """Judge the results of all ranks: correct, refused as required, or wrong; and the distance of the worst of them."""
    expected = refusal(combination)
    texts = {answer.get("refused", "") for answer in answers}
    if expected is not None or texts != {""}:
        right = expected is not None and all(expected in words for words in texts)
        return {
            "combination": str(combination),
            "verdict": "refused" if right else "wrong",
            "expected": expected,
            "said": sorted(texts),
        }
    loss, gradients, logprobs = truth(*combination.ask)[1]
    flat = torch.tensor([value for document in logprobs for value in document], dtype=torch.float64)
    worst = {"loss": 0.0, "gradient": 0.0, "log-probability": 0.0}
    for answer in answers:
        where = answer["tokens"]["trained"]
        results = {
            "loss": abs(answer["loss"] - loss) / max(1, abs(loss)),
            "gradient": max(distances(answer["gradients"], gradients).values()),
            "log-probability": float((answer["tokens"]["policy_logprobs"][where] - flat[where]).abs().max()),
        }
        assert answer["gradients"].keys() == gradients.keys(), f"{combination}: other parameters"
        # NaN is the worst of all, and max forgets it
        worst = {
            name: max(value, results[name]) if results[name] == results[name] else float("inf")
            for name, value in worst.items()
        }
    met = all(value <= BAR for value in worst.values())
    return {"combination": str(combination), "verdict": "met" if met else "wrong", "worst": worst}


def fingerprint() -> str:
    """Of all draws: a record of others is not of these."""
    return hashlib.sha256("\n".join(json.dumps(c.settings, sort_keys=True) for c in ALL).encode()).hexdigest()[:16]


def pairs(combinations: list[Combination]) -> set[tuple]:
    """Every two choices that were met together."""
    results = set()
    for c in combinations:
        held = {"cp": c.cp, "tp": c.tp, "dp": c.dp, **c.chosen}
        results |= set(itertools.combinations(sorted((name, str(value)) for name, value in held.items()), 2))
    return results


def main() -> None:
    """Run all and write the record."""
    started, verdicts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for world, first in GROUPS:
            verdicts += judged(group(world, first), Path(folder) / f"{world}-{first}")
            wrong = [v for v in verdicts if v["verdict"] == "wrong"]
            sys.stderr.write(f"{len(verdicts)} of {len(ALL)}: {len(wrong)} wrong\n")
    met = [v for v in verdicts if v["verdict"] == "met"]
    record = {
        "what": "combinations of layout, packing and head, drawn from a seed, against the oracle in float64",
        "command": "python -m tests.parity.generated",
        "drawn": fingerprint(),
        "combinations": len(verdicts),
        "met": len(met),
        "refused": sum(v["verdict"] == "refused" for v in verdicts),
        "bar": BAR,
        "worst": {name: max(v["worst"][name] for v in met) for name in met[0]["worst"]},
        "ranks": {str(world): count for world, count in COUNTS.items()},
        "pairs_of_choices_met": len(pairs([c for c in ALL if refusal(c) is None])),
        "torch": torch.__version__,
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    for v in verdicts:
        if v["verdict"] == "wrong":
            sys.stderr.write(f"{json.dumps(v, indent=1)}\n")
    if len(met) + record["refused"] < len(verdicts):
        sys.exit("not all are right: no record written")
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(f"{RECORD.name}: {record['met']} met, {record['refused']} refused, worst {record['worst']}\n")


if __name__ == "__main__":
    main()
