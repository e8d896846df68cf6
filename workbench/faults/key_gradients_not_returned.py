"""What other ranks' queries want from a rank's keys never reaches it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.mesh import Axis


def _broken(scatter_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def keep_own_piece(pieces_R: Tensor, axis: Axis, **how: object) -> Tensor:
        return pieces_R[axis.rank]

    return keep_own_piece


FAULT = Fault(
    family="S",
    what="keys and values are gathered for attention, and their gradients are cut instead of summed and returned",
    origin="no single report: all_gather without a gradient of its own, the slice that autograd then takes",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them wrong, q_proj, o_proj "
    "and MLP right; below it everything wrong; nothing where no document straddles",
    seam="workbench.sharding.attention.gathered:scatter_sum",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_keys_without_their_gradient_spare_queries_in_the_last_layer",
    changes_metrics=False,
)
