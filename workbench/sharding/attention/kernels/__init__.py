"""Attention kernels: forward and backward of a block on one rank.

A kernel does not know about ranks. Its backward takes the *final* output and log-normaliser, over all keys that a query
sees on any rank, so that a ring can call it block by block: with them the probabilities of a block are those of the
whole softmax, and the gradients of the blocks add up.

Letters: q queries | k keys | d head dimension.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.attention.kernels.cudnn import CudnnKernel
from workbench.sharding.attention.kernels.fa4 import Fa4Kernel
from workbench.sharding.attention.kernels.flash import FlashKernel
from workbench.sharding.attention.kernels.flex import FlexKernel
from workbench.sharding.attention.kernels.plain import PlainKernel
from workbench.sharding.attention.shard import Block

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention of one block.

    Shapes: query [1, Hq, q, d]; key and value [1, Hk, k, d], where Hk divides Hq and query head h reads key head
            h * Hk // Hq.
    """

    name: str
    least_scores: int
    """Number of scores, over all heads, from which "auto" selects it: fewer finish before it is compiled."""

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """Reason why it cannot compute this block; None if it can. The same for every layer of a row."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """Return output and log-normaliser.

        Formula:  s = scale * q k^T where seen, else -inf; lse = log sum exp s; out = exp(s - lse) v.
        Shapes:   out [1, Hq, q, d], of the query's dtype or a wider one; lse [1, Hq, q] nats, float32 or float64; in
                  memory of their own.
                  A query that sees nothing has out 0 and lse -inf.
        """
        ...

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
    ) -> Gradients:
        """Return the block's contribution to the gradients of query, key and value.

        Formula:  p = exp(s - lse); delta = rowsum(d_out * out); ds = p * (d_out v^T - delta) * scale;
                  dq = ds k; dk = ds^T q; dv = p^T d_out, the last two summed over the query heads that share a head.

        ``out`` and ``lse`` are over *all* keys that the query sees, in this block and others.

        Shapes:   d_out [1, Hq, q, d] -> as query, key and value, in memory of their own; of their dtype or a wider one.
        Source:   the backward of FlashAttention-2, arXiv 2307.08691, algorithm 2.
        """
        ...


KERNELS: tuple[Kernel, ...] = (FlashKernel(), FlexKernel(), PlainKernel(), CudnnKernel(), Fa4Kernel())
"""All kernels: those that "auto" takes, the fastest first, and those that are taken by name."""


def choose(name: str, query: Tensor, key: Tensor, block: Block) -> Kernel:
    """Return the kernel of a name, or for "auto" the fastest that can compute this block.

    Raises:
        ShardingError: no such kernel, or one that cannot.
    """
    scores = query.shape[1] * query.shape[2] * key.shape[2]
    candidates = [k for k in KERNELS if name == k.name or (name == "auto" and scores >= k.least_scores)]
    refusals = []
    for kernel in candidates:
        why = kernel.refusal(query, key, block)
        if why is None:
            return kernel
        refusals.append(why)
    raise ShardingError(
        f"attention kernel {name!r}",
        found="; ".join(refusals) or "no kernel of this name",
        rule=f"one of auto, {', '.join(kernel.name for kernel in KERNELS)} that supports this block",
        fix="use layout.kernel auto, which selects the fastest that does",
    )
