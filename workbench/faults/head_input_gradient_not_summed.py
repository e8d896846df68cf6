"""What the vocabulary shards want from the hidden states is not added up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.mesh import Axis


def _broken(identity_sum: Callable[[Tensor, Axis], Tensor]) -> Callable[[Tensor, Axis], Tensor]:
    def identity(value: Tensor, axis: Axis) -> Tensor:
        return value

    return identity


FAULT = Fault(
    family="S",
    what="the adjoint of handing hidden states to a vocabulary-parallel head, a sum over tp, is missing",
    origin="no single report: Megatron-LM's f (arXiv 1909.08053, section 3) left out before a vocabulary-parallel head",
    signature="loss and the head's own gradient right; everything below it gets what one shard of the vocabulary "
    "wants, different on every tp rank",
    seam="workbench.policy.logprobs.vocabulary_parallel:identity_sum",
    broken=_broken,
    shows_in={"layout": {"tp": 2}, "model": {"tied": False}},
    hidden_in={"layout": {"tp": 1}},
    changes_metrics=False,
)
