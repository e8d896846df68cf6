"""An auxiliary loss is added once a micro-batch, whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term

_AUXILIARY = ("logit", "logit_size")


def _broken(run_step: Callable) -> Callable:
    def add_whole(policy: object, loss: Callable, rows: list, totals: object, **how: object) -> Any:
        def whole_each_time(inputs: LossInputs) -> dict[str, Term]:
            return {
                name: replace(term, coefficient=term.coefficient * len(rows)) if name in _AUXILIARY else term
                for name, term in loss(inputs).items()
            }

        return run_step(policy, whole_each_time, rows, totals, **how)

    return add_whole


FAULT = Fault(
    family="K",
    what="an auxiliary loss (of a router; here of the log-normaliser) is not divided by the number of micro-batches "
    "over which it accumulates",
    origin="NVIDIA-NeMo/Automodel#3359",
    signature="the auxiliary part of loss and gradient exactly micro-batches times too big, the policy's right: no "
    "constant over parameters; nothing with one micro-batch",
    seam="run_step",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_an_auxiliary_loss_is_the_micro_batches_too_big",
)
