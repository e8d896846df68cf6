"""Generated combinations, drawn from a seed: layouts of five axes times models times packings times heads.

    python -m tests.parity.generated     runs all of them and writes experiments/generated_layouts.json

Most draws are repeated until they are valid. The others are taken as they come: an invalid combination must be refused
on every rank, and `refusal` says here which those are, by the arithmetic alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.bars import distances
from tests.helpers.ranks import run_ranks
from tests.parity.cases import one_step
from tests.parity.test_oracle import LOSS, documents_near, oracle
from workbench.errors import WorkbenchError
from workbench.policy.decoder import tiny_qwen3, tiny_qwen3_moe
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

RECORD = Path(__file__).parents[2] / "experiments/generated_layouts.json"
BAR = 1e-12
HEADS = {"query": 4, "key": 2}
"""Of both tiny models."""
LAYERS = 3
"""Of both; the last stage may have the head alone."""
EXPERTS = 4
"""Of a mixture."""

AXES = ("dp", "cp", "tp", "pp", "ep")
COUNTS = {2: 40, 3: 16, 4: 344, 5: 8, 6: 48, 7: 8, 8: 40}
TOGETHER = 8
"""Combinations that one set of processes runs."""
INVALID = 0.2
"""Share of the draws that are taken as they come."""

CHOICES = {
    "order": ["contiguous", "zigzag", "striped", "document_zigzag", "balanced"],
    "attention": ["gathered", "ring", "ulysses", "hybrid"],
    "ulysses": [1, 2, 4],
    "block_tokens": [1, 4],
    "sequence_parallel": [False, True],
    "shard_parameters": [False, True],
    "checkpointing": [False, True],
    "schedule": ["1f1b", "gpipe", "interleaved_1f1b"],
    "mixture": [False, True],
    "packing": ["one row", "two rows", "three rows", "five rows", "filled", "longer"],
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
        dp, cp, tp, pp, ep: its ranks; those of ep are among dp x cp.
        chosen: of `CHOICES`, by name.
    """

    number: int
    dp: int
    cp: int
    tp: int
    pp: int
    ep: int
    chosen: dict

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pp > 1 and self.chosen["schedule"] == "interleaved_1f1b" else 1

    @property
    def layout(self) -> dict:
        names = ("order", "attention", "sequence_parallel", "shard_parameters", "checkpointing")
        more = {name: self.chosen[name] for name in names}
        if self.chosen["order"] == "balanced":
            more["block_tokens"] = self.chosen["block_tokens"]
        if self.chosen["attention"] == "hybrid":
            more["ulysses"] = self.chosen["ulysses"]
        if self.pp > 1:
            more |= {"pipeline_schedule": self.chosen["schedule"], "stages_per_rank": self.stages_per_rank}
        return self.axes | more

    @property
    def settings(self) -> dict:
        packing = self.chosen["packing"]
        data: dict = {"micro_batches": {"two rows": 2, "three rows": 3, "five rows": 5}.get(packing, 1)}
        if packing == "filled":
            data = {"micro_batch_tokens": 64}
        if packing == "longer":
            data["multiple_of"] = math.lcm(48 * 4, self.cp)  # more than any layout here needs, and a multiple of it
        head = {
            "auto": {},
            "chunked": {"logprobs": "chunked", "chunk_tokens": 16},
            "fused": {"logprobs": "chunked", "chunk_tokens": 16, "fused_loss": True},
        }[self.chosen["head"]]
        return {
            "model": {
                "source": "tiny-qwen3-moe" if self.chosen["mixture"] else "tiny-qwen3",
                "tied": self.chosen["tied"],
                "seed": 3,
            },
            "precision": "float64",
            "loss": LOSS | {"denominator": self.chosen["denominator"]},
            "layout": self.layout,
            "data": data,
            "policy": head | {"temperature": self.chosen["temperature"]},
        }

    @property
    def ask(self) -> tuple:
        """Return the settings that determine the ground truth."""
        return tuple(self.chosen[name] for name in ("mixture", "documents", "tied", "temperature", "denominator"))

    def __str__(self) -> str:
        names = ("mixture", "packing", "head", "tied")
        return json.dumps(self.settings["layout"] | {name: self.chosen[name] for name in names})


@functools.cache
def shapes(world: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Sizes of dp, cp, tp, pp for a number of ranks, and how often each is drawn: the more axes, the more often."""
    sizes = [
        shape
        for shape in itertools.product(range(1, world + 1), repeat=4)
        if math.prod(shape) == world and shape[2] <= HEADS["query"] and shape[3] <= LAYERS + 2
    ]
    return sizes, [sum(size > 1 for size in shape) ** 2 for shape in sizes]


def drawn(world: int, number: int) -> Combination:
    """The draw of a number; the same on every machine."""
    rng = random.Random(f"five axes of {world} ranks, {number}")
    as_it_comes = rng.random() < INVALID
    sizes, often = shapes(world)
    while True:
        [(dp, cp, tp, pp)] = rng.choices(sizes, often)
        ep = rng.choice([size for size in range(1, dp * cp + 1) if dp * cp % size == 0])
        one = Combination(number, dp, cp, tp, pp, ep, {name: rng.choice(values) for name, values in CHOICES.items()})
        if as_it_comes or refusal(one) is None:
            return one


def refusal(combination: Combination) -> str | None:
    """Return the required text of the refusal of a combination; None if it is valid."""
    c, chosen = combination, combination.chosen
    if chosen["attention"] == "hybrid" and (c.cp % chosen["ulysses"] or chosen["ulysses"] == 1 < c.cp):
        return "ulysses"
    if c.ep > 1 and (not chosen["mixture"] or EXPERTS % c.ep):
        return "experts" if HEADS["key"] % c.tp == 0 else "heads"
    if HEADS["key"] % c.tp:
        return "heads"
    exchanged = {"ulysses": c.cp, "hybrid": chosen["ulysses"]}.get(chosen["attention"], 1) if c.cp > 1 else 1
    if HEADS["query"] // c.tp % exchanged:
        return "heads"
    if c.pp * c.stages_per_rank > LAYERS + 1:
        return "stages"
    return None


ALL = [drawn(world, number) for world, count in COUNTS.items() for number in range(count)]
GROUPS = [(world, first) for world, count in COUNTS.items() for first in range(0, count, TOGETHER)]


def group(world: int, first: int) -> list[Combination]:
    """The draws that one set of processes runs."""
    return [drawn(world, number) for number in range(first, first + TOGETHER)]


@functools.cache
def truth(mixture: bool, documents: int, tied: bool, temperature: float, denominator: str) -> tuple:
    """The documents of a case, and the oracle's loss, gradients and log-probabilities."""
    policy = {"model": tiny_qwen3_moe if mixture else tiny_qwen3, "tied": tied, "temperature": temperature}
    chosen = documents_near(40 + documents, **policy)
    return chosen, oracle(chosen, denominator=denominator, **policy)


def steps_or_refusals(cases: list[tuple[dict, list[dict]]], folder: str) -> list[dict]:
    """On a rank: each case is a step, or the message of its refusal; and the CPU seconds that it took."""
    answers: list[dict] = []
    for number, (settings, documents) in enumerate(cases):
        began = time.process_time()
        if number:  # the groups of a case poll their sockets, a hundred times a second each, until they are destroyed
            dist.barrier()  # a rank that is done may not close what another still reads
            rank, world = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world)
        try:
            parse_spec(RunSpec, settings, where="generated")
            answer = one_step(settings, documents)
        except WorkbenchError as refused:
            answer = {"refused": str(refused)}
        answers.append(answer | {"cpu_s": time.process_time() - began})
    return answers


def judged(combinations: list[Combination], folder: Path) -> list[dict]:
    """Run combinations of equally many ranks, and return the distance of each from the ground truth, or its refusal.

    Raises:
        RanksError: a rank hung, or raised what is no refusal.
    """
    cases = [(c.settings, truth(*c.ask)[0]) for c in combinations]
    per_rank = run_ranks(steps_or_refusals, combinations[0].world, folder, cases, str(folder), timeout_s=900)
    return [
        verdict(c, [answers[number] for answers in per_rank])
        | {"cpu_s": sum(answers[number]["cpu_s"] for answers in per_rank)}
        for number, c in enumerate(combinations)
    ]


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
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "log-probability": 0.0}
    norms = {name: gradient.norm() for name, gradient in gradients.items()}
    for answer in answers:
        where = answer["tokens"]["trained"]
        results = {
            "loss": abs(answer["loss"] - loss) / max(1, abs(loss)),
            "gradient": max(distances(answer["gradients"], gradients).values()),
            "norm": max(distances(_as_tensors(answer["norms"]), norms).values()),
            "log-probability": float((answer["tokens"]["policy_logprobs"][where] - flat[where]).abs().max()),
        }
        assert answer["gradients"].keys() == gradients.keys(), f"{combination}: other parameters"
        # NaN is the worst of all, and max forgets it
        worst = {
            name: max(value, results[name]) if results[name] == results[name] else float("inf")
            for name, value in worst.items()
        }
    met = all(value <= BAR for value in worst.values())
    idle = sum(answer["trained_here"] == 0 for answer in answers)
    return {"combination": str(combination), "verdict": "met" if met else "wrong", "worst": worst, "idle": idle}


def _as_tensors(numbers: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}


def fingerprint() -> str:
    """Of all draws: a record of others is not of these."""
    return hashlib.sha256("\n".join(json.dumps(c.settings, sort_keys=True) for c in ALL).encode()).hexdigest()[:16]


def pairs(combinations: list[Combination]) -> set[tuple]:
    """Every two choices that were met together."""
    results = set()
    for c in combinations:
        held = {**c.axes, **c.chosen}
        results |= set(itertools.combinations(sorted((name, str(value)) for name, value in held.items()), 2))
    return results


def axes_together(combinations: list[Combination]) -> dict[str, int]:
    """Number of combinations that have several ranks on both of two axes, for every two."""
    return {
        f"{one} x {other}": sum(c.axes[one] > 1 and c.axes[other] > 1 for c in combinations)
        for one, other in itertools.combinations(AXES, 2)
    }


def main() -> None:
    """Run all and write the record."""
    torch.set_num_threads(1)  # the oracle's tensors are tiny: threads would wait for each other
    verdicts: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for world, first in GROUPS:
            new = judged(group(world, first), Path(folder) / f"{world}-{first}")
            verdicts += new
            wrong = [v for v in new if v["verdict"] == "wrong"]
            sys.stderr.write(
                f"{len(verdicts)} of {len(ALL)}\n" + "".join(f"{json.dumps(v, indent=1)}\n" for v in wrong)
            )
    met = [v for v in verdicts if v["verdict"] == "met"]
    valid = [c for c in ALL if refusal(c) is None]
    record = {
        "what": "combinations of five axes, model, packing and head, drawn from a seed, against the oracle in float64",
        "command": "python -m tests.parity.generated",
        "drawn": fingerprint(),
        "combinations": len(verdicts),
        "met": len(met),
        "refused": sum(v["verdict"] == "refused" for v in verdicts),
        "bar": BAR,
        "worst": {name: max(v["worst"][name] for v in met) for name in met[0]["worst"]},
        "ranks": {str(world): count for world, count in COUNTS.items()},
        "axes_met_together": axes_together(valid),
        "mixtures_met": sum(c.chosen["mixture"] for c in valid),
        "met_with_an_idle_rank": sum(v["idle"] > 0 for v in met),
        "pairs_of_choices_met": len(pairs(valid)),
        "torch": torch.__version__,
        "cpu_minutes": round(sum(v["cpu_s"] for v in verdicts) / 60, 1),
    }
    if len(met) + record["refused"] < len(verdicts):
        sys.exit("not all are right: no record written")
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(f"{RECORD.name}: {record['met']} met, {record['refused']} refused, worst {record['worst']}\n")


if __name__ == "__main__":
    main()
