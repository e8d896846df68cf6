"""The loss is a mean over the ranks that share a sequence, each of which holds a part of the sum."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.scaling import Cut


def _broken(step_weights: Callable) -> Callable:
    def average_over_cp(rows: list, spec: object, cut: Cut | None = None, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, cut=cut, **how)
        cp = 1 if cut is None else cut.cp
        return [{name: pair.map(lambda w_T: w_T / cp) for name, pair in named.items()} for named in weights], totals

    return average_over_cp


FAULT = Fault(
    family="B",
    what="a loss that is divided by the tokens of the whole sequence already is averaged over the ranks that share it",
    origin="ByteDance-Seed/VeOmni#338 (8 ranks, loss and gradient 8 times too small)",
    signature="loss and every gradient exactly 1 / cp of the right ones, cosine 1; metrics of tokens right",
    seam="step_weights",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_mean_over_sequence_ranks_is_one_factor_in_loss_and_gradient",
)
