"""The loss that is reported is summed over data-parallel ranks, not over context-parallel ones."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.partial import Scalar
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Mesh


def _broken(_: Callable) -> Callable:
    def complete_over_dp(self: Scalar, mesh: Mesh) -> Scalar:
        return Scalar(all_sum(self.value.detach(), mesh["dp"]), frozenset())

    return complete_over_dp


FAULT = Fault(
    family="D",
    what="the reporting sum leaves out context-parallel ranks, so the log shows the share of those with cp rank 0",
    origin="modelscope/ms-swift#9380",
    signature="gradient and metrics right; the reported loss is that of one cp rank's tokens, whose share depends on "
    "order and masks",
    seam="workbench.reduction.partial:Scalar.complete",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_loss_over_dp_only_lacks_the_other_cp_ranks",
    changes_gradient=False,
)
