"""Layout of hidden states over the tp axis between tensor-parallel blocks: replicated, or sharded over tokens.

A tensor-parallel block (attention, a feed-forward) reads all tokens of its cp rank and returns a partial sum for each
of them. Plain tensor parallelism replicates the tokens between blocks; sequence parallelism shards them, in contiguous
runs of the rank's local order after the cp split. Layers between blocks (norms, residual sums, biases after the sum,
routers) then act on a rank's own tokens, so the gradient of each of their weights is partial, and one sum over tp per
optimizer step completes it.

Letters: t tokens of a cp rank | D model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.collectives import gather_scatter, gather_slice, identity_sum, scatter_gather, sum_identity
from workbench.sharding.mesh import Axis

TOKENS = -2
"""The token dimension: second to last in hidden states, routing weights and expert indices."""


@dataclass(frozen=True)
class Stream:
    """Hidden states between tensor-parallel blocks, with the collectives into and out of a block.

    Attributes:
        axis: the tensor-parallel axis.
        sharded: each rank holds 1 / tp of the tokens (sequence parallelism); otherwise all of them.
    """

    axis: Axis
    sharded: bool = False

    def into(self, hidden: Tensor) -> Tensor:
        """Prepare the input of a block, of which every rank computes a different part.

        Shapes:   [..., t or t / tp, D] -> [..., t, D].
        Backward: sum over tp of the parts' gradients; each rank keeps its own tokens.
        Source:   Megatron-LM, arXiv 1909.08053, section 3 (f); arXiv 2205.05198, section 4.2.2 (g).
        """
        return gather_scatter(hidden, self.axis, dim=TOKENS) if self.sharded else identity_sum(hidden, self.axis)

    def out_of(self, partial: Tensor) -> Tensor:
        """Complete the output of a block from every rank's partial sum.

        Shapes:   [..., t, D] -> [..., t or t / tp, D].
        Backward: the gradient of all tokens, to every rank.
        Raises:   ShardingError: tokens are sharded, and tp does not divide them.
        """
        if not self.sharded:
            return sum_identity(partial, self.axis)
        self._check(partial)
        return scatter_gather(partial, self.axis, dim=TOKENS)

    def local_tokens(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens of a tensor that every rank computed for all tokens.

        Shapes:   [..., t, D] -> [..., t or t / tp, D].
        Backward: zero elsewhere, so that weight gradients are partial.
        Raises:   ShardingError: tokens are sharded, and tp does not divide them.
        """
        if not self.sharded:
            return whole
        self._check(whole)
        return whole.chunk(self.axis.size, dim=TOKENS)[self.axis.rank]

    def all_tokens(self, hidden: Tensor) -> Tensor:
        """Gather all tokens for a computation that is the same on every rank, such as the loss.

        Shapes:   [..., t or t / tp, D] -> [..., t, D].
        Backward: each rank's own tokens of a gradient that is the same on all ranks; it is not summed again.
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
