"""The constant denominator of Dr. GRPO meets an engine that averages over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.scaling import Cut
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def leave_out_dp(rows: list, spec: LossSpec, cut: Cut | None = None, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, cut=cut, **how)
        if spec.denominator == "constant" and cut is not None:
            for named in weights:
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda w_T: w_T / cut.dp)
        return weights, totals

    return leave_out_dp


FAULT = Fault(
    family="A",
    what="every way to aggregate multiplies by dp, which the mean over ranks takes away, but the one with a constant "
    "length",
    origin="verl-project/verl#3741, #5366 and #5417",
    signature="loss and every gradient exactly 1 / dp of the right ones, cosine 1; nothing under another denominator",
    seam="step_weights",
    broken=_broken,
    shows_in={"layout": {"dp": 2}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_factor_of_the_layout_is_one_factor",
)
