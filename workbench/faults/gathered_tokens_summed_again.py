"""The tokens are gathered for a head that every rank works on alike, and the way back adds up copies."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.collectives import gather_scatter
from workbench.sharding.mesh import Axis


def _broken(gather_slice: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def gather_and_sum(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
        return gather_scatter(local, axis, dim=dim)

    return gather_and_sum


FAULT = Fault(
    family="S",
    what="last hidden states are gathered with a reduce-scatter for an adjoint (tensor_parallel_output_grad), where "
    "each rank brings the same whole gradient",
    origin="awslabs/slapo#20; the same inside layers: THUDM/slime#1748",
    signature="the head right, everything below it exactly tp times too big; loss right; nothing without sequence "
    "parallelism",
    seam="workbench.sharding.sequence_parallel:gather_slice",
    broken=_broken,
    shows_in={"layout": {"tp": 2, "sequence_parallel": True}, "model": {"tied": False}},
    hidden_in={"layout": {"sequence_parallel": False}},
    detected_by="tests/faults/test_unseen.py::test_tokens_summed_again_are_tp_times_too_big_below_the_head",
    changes_metrics=False,
)
