"""Integers of weights, of which each context-parallel rank keeps a part.

Integers take 8 bytes per parameter: more than the activations of a quarter of a row. All ranks of cp compute the same
weights for the same row, and meet in every attention of its backward; so they also sum the integers of a few weights
there, as soon as backward has added to all of them, and each keeps its part of the sum until the end of the step.
Integers of whole weights exist for two buckets of them at most: one that backward fills, and one that travels.

Letters: N elements of a bucket, padded to a multiple of its ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from workbench.reproducible.exact_sums import Accumulator
from workbench.sharding.collectives import buckets, gather_equal, scatter_sum, start_scatter_sum
from workbench.sharding.mesh import Mesh

BUCKET = 2**23
"""Maximum elements of parameters that are reduced over ranks together."""


class Transfer:
    """At most one sum over ranks that travels while backward computes."""

    def __init__(self) -> None:
        self._arrive: Callable[[], None] | None = None

    def begin(self, start: Callable[[], Callable[[], None]]) -> None:
        """Wait for the sum that travels, then start another; ``start`` returns a function that waits for it."""
        self.end()
        self._arrive = start()

    def end(self) -> None:
        """Wait for the sum that travels, if any."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def forget(self) -> None:
        """Drop the sum of a step that was not finished."""
        self._arrive = None


class Bucket:
    """Exact sums of some weights of one dtype, next to each other in one buffer.

    Args:
        names: of the weights.
        members: their accumulators, which take their integers from this buffer.
        mesh: the axes; replicas of the weights are summed over dp and cp.
        transfer: shared by all buckets of a policy.
    """

    def __init__(self, names: Sequence[str], members: Sequence[Accumulator], mesh: Mesh, transfer: Transfer) -> None:
        self.names, self._members, self._transfer = tuple(names), tuple(members), transfer
        self._cp, self._dp, self._device = mesh["cp"], mesh["dp"], mesh.device
        self._sizes = [math.prod(one.shape) for one in members]
        ranks = self._cp.size * self._dp.size
        self._padded = -(-sum(self._sizes) // ranks) * ranks
        self._whole_N: Tensor | None = None
        self._own: Tensor | None = None
        self._added: set[Accumulator] = set()
        for one in members:
            one.bucket = self

    def start(self) -> None:
        """Reset for a step."""
        self._transfer.forget()
        self._whole_N, self._own = None, None
        self._added.clear()

    def integers(self, member: Accumulator) -> Tensor:
        """The integers of one weight: a view of the buffer, which is allocated at the first partial."""
        if self._whole_N is None:
            self._whole_N = torch.zeros(self._padded, dtype=torch.int64, device=self._device)
        pieces = self._whole_N[: sum(self._sizes)].split(self._sizes)
        return pieces[self._members.index(member)].view(member.shape)

    def added(self, member: Accumulator) -> None:
        """Note that a backward has added to a weight; once it has to all, keep this rank's part of their sum over cp.

        Collective over cp: its ranks run the same backward, because attention exchanges keys and values in it.
        """
        self._added.add(member)
        if self._cp.group is not None and len(self._added) == len(self._members):
            self._transfer.begin(self._start_sum)

    def gradients(
        self, finish: Callable[[Tensor, torch.dtype], Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Sum what backward has left over cp, and all over dp; convert this rank's part, gather, and free the integers.

        Collective over cp and dp. The parts travel as gradients, which take fewer bytes than integers.
        """
        if self._whole_N is not None or self._own is None:
            self._transfer.begin(self._start_sum)
        self._transfer.end()
        own, self._own = self._own, None
        assert own is not None, "all sums have arrived"
        part = scatter_sum(own.view(self._dp.size, -1), self._dp)
        del own
        finished = finish(part, dtype)
        del part
        whole_N = gather_equal(gather_equal(finished, self._dp).view(-1), self._cp).view(-1)
        pieces = whole_N[: sum(self._sizes)].split(self._sizes)
        for name, one, piece in zip(self.names, self._members, pieces, strict=True):
            yield name, (piece if len(pieces) == 1 else piece.clone()).view(one.shape)  # a view would keep all of them

    @property
    def live_bytes(self) -> int:
        """Bytes of the integers that exist, without those that travel."""
        return sum(one.nbytes for one in (self._whole_N, self._own) if one is not None)

    def _start_sum(self) -> Callable[[], None]:
        if self._whole_N is None:
            self.integers(self._members[0])  # a rank without rows adds zeros
        assert self._whole_N is not None
        arrive = start_scatter_sum(self._whole_N.view(self._cp.size, -1), self._cp)
        self._whole_N = None
        self._added.clear()
        for one in self._members:
            one.release()

        def keep() -> None:
            summed = arrive()
            self._own = summed if self._own is None else self._own.add_(summed)

        return keep


def share_integers(accumulators: Mapping[str, Accumulator], dtypes: Mapping[str, torch.dtype], mesh: Mesh) -> None:
    """Put the integers of weights, which all ranks of dp x cp hold whole, into buckets of neighbours."""
    transfer = Transfer()

    def measure(name: str) -> tuple[torch.dtype, int]:
        return dtypes[name], math.prod(accumulators[name].shape)

    for names in buckets(list(accumulators), BUCKET, measure):
        Bucket(names, [accumulators[name] for name in names], mesh, transfer)
