"""How hidden states lie over the tp axis between cut layers: whole on every rank, or a stretch of tokens each.

A block that tp cuts (attention, a feed-forward) needs all tokens of its cp rank and gives a partial sum for each of
them. Plain tensor parallelism holds the tokens between blocks whole: the input goes to every rank's part, the output
is all-reduced. Sequence parallelism holds 1 / tp of them, in contiguous stretches of the rank's own order, after cp
has taken its share: the input is gathered, the output reduce-scattered, which moves the same bytes. What then acts
between blocks (norms, residual sums, biases after the sum, routers) acts on a rank's own tokens, so that the gradient
of each of its weights is a part, which one sum over tp per optimizer step completes.

Letters: t tokens of a cp rank | D model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.collectives import gather_scatter, gather_slice, identity_sum, scatter_gather, sum_identity
from workbench.sharding.mesh import Axis

TOKENS = -2
"""The dimension of tokens: the last but one of hidden states, of routing weights and of the experts they name."""


@dataclass(frozen=True)
class Stream:
    """The hidden states between cut blocks, and the ways into a block and out of it.

    Attributes:
        axis: the tensor-parallel axis.
        sharded: each rank holds 1 / tp of the tokens (sequence parallelism); otherwise all of them.
    """

    axis: Axis
    sharded: bool = False

    def into(self, hidden: Tensor) -> Tensor:
        """What a block reads, of which every rank computes another part.

        Shapes:   [..., t or t / tp, D] -> [..., t, D].
        Backward: sum over tp of what the parts want; each rank keeps what it holds.
        Source:   Megatron-LM, arXiv 1909.08053, section 3 (f); arXiv 2205.05198, section 4.2.2 (g).
        """
        return gather_scatter(hidden, self.axis, dim=TOKENS) if self.sharded else identity_sum(hidden, self.axis)

    def out_of(self, partial: Tensor) -> Tensor:
        """What a block gives, from every rank's part of the sum.

        Shapes:   [..., t, D] -> [..., t or t / tp, D].
        Backward: the gradient of all tokens, to every rank.
        Raises:   ShardingError: tokens are sharded, and tp does not divide them.
        """
        if not self.sharded:
            return sum_identity(partial, self.axis)
        self._check(partial)
        return scatter_gather(partial, self.axis, dim=TOKENS)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's tokens of something that every rank computed for all of them.

        Shapes:   [..., t, D] -> [..., t or t / tp, D].
        Backward: zero elsewhere, so that the gradients of its weights are parts.
        Raises:   ShardingError: tokens are sharded, and tp does not divide them.
        """
        if not self.sharded:
            return whole
        self._check(whole)
        return whole.chunk(self.axis.size, dim=TOKENS)[self.axis.rank]

    def all_of(self, hidden: Tensor) -> Tensor:
        """All tokens, for something that every rank computes alike, such as the loss.

        Shapes:   [..., t or t / tp, D] -> [..., t, D].
        Backward: each rank's own tokens of a gradient that is the same on all; it is not summed again.
        """
        return gather_slice(hidden, self.axis, dim=TOKENS) if self.sharded else hidden

    def _check(self, whole: Tensor) -> None:
        tokens = whole.shape[TOKENS]
        if tokens % self.axis.size:
            raise ShardingError(
                f"sequence parallelism of {tokens} tokens over tp={self.axis.size}",
                rule="tp divides the tokens of a cp rank",
                fix="pad rows to a multiple of cp * tp tokens (data.multiple_of unset does it)",
            )
