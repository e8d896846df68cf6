"""Packing: which document goes into which row, and how long the rows are.

One optimizer step trains on ``dp * micro_batches`` rows. Rows may differ in length and may be empty: a rank
with nothing to train still enters every collective.
"""

from __future__ import annotations

import heapq

from workbench.errors import SpecError
from workbench.rollouts.batch import RolloutBatch


def pack(batch: RolloutBatch, *, rows: int = 1, multiple_of: int = 1) -> list[RolloutBatch]:
    """Deal the documents of a batch into rows of nearly equal length, and pad each row.

    The longest document goes first, to the row that is shortest so far; inside a row documents keep the
    order of the batch. The result depends on nothing but the lengths.

    Args:
        batch: the documents of the whole optimizer step.
        rows: dp * micro_batches.
        multiple_of: rows are padded up to a multiple of this many tokens (and are never empty).

    Raises:
        SpecError: fewer than one row, or a multiple below one.

    Example:
        >>> rows = pack(batch, rows=2, multiple_of=8)   # doctest: +SKIP
    """
    if rows < 1 or multiple_of < 1:
        raise SpecError(f"pack(rows={rows}, multiple_of={multiple_of})", rule="both are at least 1",
                        fix="rows is dp * micro_batches; multiple_of is what the shard plan needs")
    lengths = batch.lengths_N.tolist()
    members: list[list[int]] = [[] for _ in range(rows)]
    shortest = [(0, row) for row in range(rows)]
    for document in sorted(range(len(lengths)), key=lambda d: (-lengths[d], d)):
        filled, row = heapq.heappop(shortest)
        members[row].append(document)
        heapq.heappush(shortest, (filled + lengths[document], row))
    packed = [batch.select(sorted(chosen)) for chosen in members]
    return [row.pad_to(max(1, -(-row.num_tokens // multiple_of)) * multiple_of) for row in packed]
