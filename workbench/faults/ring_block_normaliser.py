"""The backward of a ring takes the softmax of each block for a part of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.attention.block import Block
from workbench.sharding.attention.kernels import Gradients, Kernel


@dataclass(frozen=True)
class _BlockByBlock:
    """A kernel whose backward knows the log-normaliser of its own block only."""

    right: Kernel

    def forward(self, *args: object) -> tuple[Tensor, Tensor]:
        return self.right.forward(*args)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        delta: Tensor | None = None,
    ) -> Gradients:
        _, own_lse = self.right.forward(query, key, value, block, scale)
        return self.right.backward(d_out, query, key, value, out, own_lse, block, scale, delta)


def _broken(choose: Callable[..., Kernel]) -> Callable[..., _BlockByBlock]:
    def choose_and_forget(*args: object) -> _BlockByBlock:
        return _BlockByBlock(choose(*args))

    return choose_and_forget


FAULT = Fault(
    family="S",
    what="backward of ring attention makes the probabilities of a block with the log-normaliser of that block, not of "
    "all keys",
    origin="no single report: the backward of Ring Attention (arXiv 2310.01889) written block by block",
    signature="forward and loss exact; gradients of queries, keys and values too big where a query sees keys of "
    "several ranks; in the last layer o_proj and MLP right, below it everything wrong; nothing under other "
    "attention",
    seam="workbench.sharding.attention.ring:choose",
    broken=_broken,
    shows_in={"layout": {"cp": 2, "attention": "ring"}},
    hidden_in={"layout": {"attention": "gathered"}},
    changes_metrics=False,
)
