"""Generated combinations, drawn from a seed: a training, and two layouts of it that must agree."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from typing import Any

from tests.helpers.same_bits import train
from tests.parity.sequence_cases import CORRECTIONS, DENOMINATORS, LOSSES, Oracle

BLOCK = 8
ROWS = 4
CASES = LOSSES | DENOMINATORS | CORRECTIONS
MORE = {
    "clip_cov": {"name": "clip_cov", "surrogate": {"cov_fraction": 0.2}},
    "kl_cov": {"name": "kl_cov", "surrogate": {"cov_fraction": 0.2}},
    "local_token": {"name": "bnpo"},
    "entropy_and_logits": {
        "name": "ppo",
        "entropy_coefficient": 0.02,
        "squared_logit_coefficient": 1e-3,
        "mean_squared_logit_coefficient": 1e-3,
    },
    "weight_of_rows": {"name": "ppo", "correction": {"kind": "batch_normalized", "population": "micro_batch"}},
}
"""Losses that take a statistic of a row, and those that look at more than log-probabilities."""

SHAPES = [(1, 2, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 4, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2)]
"""dp x cp x tp; what stands twice is drawn twice as often."""
TRAINED = {
    "loss": [*CASES, *MORE],
    "tied": [True, False],
    "precision": ["float32", "float32", "bfloat16"],
    "temperature": [1.0, 0.7],
    "optimizer": ["adamw", "sgd"],
    "bits": [32, 50],
    "packing": ["dealt", "packed", "pairs together", "filled"],
}
LAID_OUT = {
    "order": ["contiguous", "zigzag", "zigzag", "balanced"],
    "balanced_blocks": [BLOCK, 2 * BLOCK],
    "checkpointing": [False, True],
    "longer": [False, True],
}
FILLED = 128
"""Tokens of a micro-batch that is filled: a multiple of what every layout here needs."""


@dataclass(frozen=True)
class Draw:
    """A training and its layout.

    Attributes:
        number: of the draw.
        shape: dp, cp and tp.
        chosen: of `TRAINED` and `LAID_OUT`, by name.
        rows: the documents of each row, where they are dealt.
        order: the rows of the other layout, in its order.
    """

    number: int
    shape: tuple[int, int, int]
    chosen: dict[str, Any]
    rows: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def trained(self) -> dict[str, Any]:
        """Settings without a layout."""
        chosen = self.chosen
        precision = "float32" if chosen["optimizer"] == "sgd" else chosen["precision"]
        loss = MORE[chosen["loss"]] if chosen["loss"] in MORE else CASES[chosen["loss"]][0]
        if chosen["loss"] in CASES:
            loss = loss | {name: value for name, value in CASES[chosen["loss"]][2].items() if name != "kept"}
        return {
            "model": {"source": "tiny-qwen3", "tied": chosen["tied"], "seed": 3},
            "precision": precision,
            "loss": loss,
            "policy": {"temperature": chosen["temperature"]},
            "record": {"metrics": "full"},
            "steps": 2,
            "optimizer": {
                "name": chosen["optimizer"],
                "learning_rate": 1e-3,
                "weight_decay": 0.1,
                "max_grad_norm": 0.05,
            },
            "reproducible": {"block_tokens": BLOCK, "weight_chunks": 2, "bits": chosen["bits"]},
        }

    def settings(self, *, laid_out: bool) -> dict[str, Any]:
        """Of one rank, or of the layout."""
        dp, cp, tp = self.shape if laid_out else (1, 1, 1)
        chosen, layout = self.chosen, {"dp": dp, "cp": cp, "tp": tp}
        data: dict[str, Any] = {"micro_batches": ROWS // dp}
        if chosen["packing"] == "filled":
            data = {"micro_batch_tokens": FILLED}
        if chosen["packing"] == "pairs together":
            data["keep_groups"] = True
        if laid_out:
            layout |= {"order": chosen["order"], "checkpointing": chosen["checkpointing"]}
            layout |= {"block_tokens": chosen["balanced_blocks"]} if chosen["order"] == "balanced" else {}
            data |= {"multiple_of": FILLED} if chosen["longer"] else {}
        return self.trained | {"layout": layout, "data": data}

    def dealt(self, *, laid_out: bool) -> list[list[int]] | None:
        """The documents of each row, in the order of the rows; None: packed."""
        if self.chosen["packing"] != "dealt":
            return None
        return [list(self.rows[at]) for at in (self.order if laid_out else range(ROWS))]

    def __str__(self) -> str:
        return json.dumps(
            {"number": self.number, "shape": self.shape, "rows": self.rows, "order": self.order} | self.chosen
        )


def drawn(number: int) -> Draw:
    """The draw of a number; the same on every machine."""
    rng = random.Random(f"the same bits, {number}")
    shape = rng.choice(SHAPES)
    chosen = {name: rng.choice(values) for name, values in (TRAINED | LAID_OUT).items()}
    if chosen["loss"] == "dpo" and chosen["packing"] == "dealt":
        chosen["packing"] = "packed"  # a pair lies in one row
    documents = list(range(len(oracle().documents)))
    rng.shuffle(documents)
    cuts = sorted(rng.randrange(len(documents) + 1) for _ in range(ROWS - 1))
    rows = tuple(
        tuple(sorted(documents[start:stop])) for start, stop in zip([0, *cuts], [*cuts, len(documents)], strict=True)
    )
    order = list(range(ROWS))
    rng.shuffle(order)
    return Draw(number, shape, chosen, rows, tuple(order))


@functools.cache
def oracle() -> Oracle:
    """Return the source of the documents."""
    return Oracle(11)


@functools.cache
def on_one_rank(number: int) -> dict:
    """Return the results of one rank."""
    draw = drawn(number)
    return train(draw.settings(laid_out=False), oracle().documents, dealt=draw.dealt(laid_out=False))
