"""The likelihood of rewarded answers is averaged over those of each micro-batch, and the averages are added up."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def count_here(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            named |= {name: pair for name, pair in alone.items() if name == "positive_token"}
        return weights, totals

    return count_here


FAULT = Fault(
    family="A",
    what="the policy term is divided by the tokens of the step, the likelihood of rewarded answers beside it by those "
    "of such answers in the micro-batch",
    origin="NVIDIA-NeMo/RL#3791 (32 times too big with 32 micro-batches)",
    signature="this term alone wrong, in loss and gradient: about micro-batches (of all ranks) times too big, those "
    "with few such tokens most; other terms right; nothing with one micro-batch",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "vapo"}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_likelihood_counted_in_micro_batches_is_the_only_wrong_term",
)
