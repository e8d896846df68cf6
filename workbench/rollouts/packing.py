"""Packing: assignment of documents to rows, and the lengths of the rows.

One optimizer step trains on some micro-batches of each data-parallel rank, one row each. Rows may differ in length and
may be empty: a rank with nothing to train still enters every collective. `pack` deals a step into a given number of
rows, `deal` follows a given assignment, and `fill` takes as many micro-batches of a given size as the step needs.

All three take the documents of the whole optimizer step. Each document is padded up to a multiple of
``document_multiple_of`` tokens, by padding right after it that belongs to no document, and then each row, which is
never empty, to ``multiple_of``. Documents with one label in ``group_labels_N`` [N] go into one row, as a loss on pairs
requires.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.batch import RolloutBatch

Balance = Literal["tokens", "work"]
"""What rows have nearly equally much of: tokens, or tokens and attention."""
EVEN, LEAST_CHANGE = 1e-3, 1e-6
"""Excess of a row over the mean one, and fall of the sum of squares of all rows, both in the mean row's cost, below
which nothing is changed: a thousandth is less than two GPUs of one kind differ by."""
PARTNERS, TRIED = 8, 64
"""Rows, those that have least, with which the one that has most may change places, and items of each that are tried:
the time of a change goes with both, and a row of more items is even to `EVEN` before."""
MOST_FAILURES = 64
"""Rows that are tried without a change, in all: next to one document of half a step there is always another change of
two other rows, which make no step shorter."""


def pack(
    batch: RolloutBatch,
    *,
    rows: int = 1,
    multiple_of: int = 1,
    document_multiple_of: int = 1,
    group_labels_N: Tensor | None = None,
    balance: Balance = "tokens",
) -> list[RolloutBatch]:
    """Deal the documents of a batch into dp * micro_batches rows of nearly equal length, and pad them.

    The longest document goes first, to the row that is shortest so far; within a row documents keep the order of the
    batch. The result depends on the lengths alone.

    With ``balance="work"`` rows have nearly equal attention, too: documents then move and change places between rows
    as long as that evens out lengths and sums of squared lengths together (`balance_rows`).

    Raises:
        SpecError: fewer than one row, or a multiple below one.
    """
    if min(rows, multiple_of, document_multiple_of) < 1:
        raise SpecError(
            f"pack(rows={rows}, multiple_of={multiple_of}, document_multiple_of={document_multiple_of})",
            rule="all are at least 1",
            fix="rows is dp * micro_batches; the multiples come from the shard plan (sharding.orders.padding_rule)",
        )
    bundles = _bundles(batch, group_labels_N)
    lengths = _lengths(batch, bundles, document_multiple_of)
    row_of = [0] * len(bundles)
    shortest = [(0, row) for row in range(rows)]
    for number in sorted(range(len(bundles)), key=lambda b: (-lengths[b], b)):
        filled, row_of[number] = heapq.heappop(shortest)
        heapq.heappush(shortest, (filled + lengths[number], row_of[number]))
    if balance == "work":
        squares = [sum(length**2 for length in batch.lengths_N[bundle].tolist()) for bundle in bundles]
        row_of = balance_rows(np.array([lengths, squares], dtype=float), row_of, rows)
    members: list[list[int]] = [[] for _ in range(rows)]
    for bundle, row in zip(bundles, row_of, strict=True):
        members[row] += bundle
    return [_padded(batch, sorted(documents), multiple_of, document_multiple_of) for documents in members]


def balance_rows(costs: np.ndarray, start: Sequence[int], rows: int) -> list[int]:
    """Even out several costs over rows: items move to another row, or change places, while that lowers unevenness.

    Unevenness is the sum of squares of all rows' costs, in the mean row's. A step's time is some mixture of its costs
    (GEMMs go with tokens, attention with squared lengths), which is even in every mixture if it is in each. From the
    row that has most, the change that lowers it most is made, until none does, and then from the next ones: the others
    wait for the fullest. One item that alone is more than the mean row cannot be evened out.

    Args:
        costs: of each item, [costs, items].
        start: the row of each item before.
        rows: how many there are.

    Returns:
        The row of each item.
    """
    costs = costs / np.maximum(costs.sum(1, keepdims=True) / rows, np.finfo(float).tiny)  # no cost at all stays 0
    row_of = np.array(start, dtype=int)
    totals = np.stack([np.bincount(row_of, cost, rows) for cost in costs])
    by_cost = np.argsort(costs.sum(0), kind="stable")
    tried = np.zeros(rows, dtype=bool)  # rows that no change lowers, as long as none is made
    failures = 0
    while failures < MOST_FAILURES:
        row = int(np.argmax(np.where(tried, 0.0, totals.max(0))))
        if tried[row] or totals[:, row].max() < 1 + EVEN:
            break
        lightest = np.argsort(totals.sum(0), kind="stable")[:PARTNERS]
        items = _some(by_cost[row_of[by_cost] == row])
        others = [(to, _some(by_cost[row_of[by_cost] == to])) for to in lightest if to != row]
        # Moving is changing places with nothing, of which every row has one.
        pairs = [(to, place) for to, of_row in others for place in (*of_row, None)]
        returned = np.stack([np.zeros(len(costs)) if place is None else costs[:, place] for _, place in pairs], 1)
        given = costs[:, items, None] - returned[:, None]
        apart = totals[:, [to for to, _ in pairs]] - totals[:, row, None]
        changes = (2 * given * (given + apart[:, None])).sum(0)
        item, pair = np.unravel_index(np.argmin(changes), changes.shape)
        if changes[item, pair] > -LEAST_CHANGE:
            tried[row] = True
            failures += 1
            continue
        to, place = pairs[pair]
        totals[:, row] -= given[:, item, pair]
        totals[:, to] += given[:, item, pair]
        row_of[items[item]] = to
        if place is not None:
            row_of[place] = row
        tried[:] = False
    return row_of.tolist()


def _some(items: np.ndarray) -> np.ndarray:
    """At most `TRIED` of some items, at equal distances."""
    return items[:: -(-len(items) // TRIED)] if len(items) else items


def deal(
    batch: RolloutBatch, rows: Sequence[Sequence[int]], *, multiple_of: int = 1, document_multiple_of: int = 1
) -> list[RolloutBatch]:
    """Build rows of given documents (indices, row by row; a row may be empty), in the given order, padded.

    Raises:
        SpecError: a document is in no row, or in two.
    """
    dealt = sorted(document for row in rows for document in row)
    if dealt != list(range(batch.num_documents)):
        raise SpecError(
            f"deal {batch.num_documents} documents",
            found=f"rows {[list(row) for row in rows]}",
            rule="each document is in one row",
            fix="name every document once",
        )
    return [_padded(batch, row, multiple_of, document_multiple_of) for row in rows]


def fill(
    batch: RolloutBatch,
    *,
    tokens: int,
    ranks: int = 1,
    multiple_of: int = 1,
    document_multiple_of: int = 1,
    group_labels_N: Tensor | None = None,
) -> list[RolloutBatch]:
    """Fill micro-batches of at most ``tokens`` tokens, padding included, on all dp ranks, until no document is left.

    Documents are taken in the order of the batch: into the row of the first rank until the next does not fit, then of
    the second, and after the last rank into the next micro-batch. Every rank takes equally many, so the last ones may
    be empty. Their number is determined here, on the whole step; no count may depend on it.

    Returns:
        The rows of the first rank in training order, then those of the second, ...

    Raises:
        SpecError: a document (or the documents of a label) that does not fit into a row.
    """
    capacity = tokens // multiple_of * multiple_of
    padded = f" with their padding to multiples of {document_multiple_of}" if document_multiple_of > 1 else ""
    rows: list[list[int]] = [[]]
    left = capacity
    bundles = _bundles(batch, group_labels_N)
    for bundle, length in zip(bundles, _lengths(batch, bundles, document_multiple_of), strict=True):
        if length > capacity:
            raise SpecError(
                f"micro-batches of {tokens} tokens, in multiples of {multiple_of}",
                found=f"document(s) {bundle} of {length} tokens{padded}",
                rule="a row has whole documents, and those that a loss needs together",
                fix=f"allow at least {-(-length // multiple_of) * multiple_of} tokens, or drop them",
            )
        if length > left:
            rows.append([])
            left = capacity
        rows[-1] += bundle
        left -= length
    rows += [[] for _ in range(-len(rows) % ranks)]
    return [
        _padded(batch, rows[number], multiple_of, document_multiple_of)
        for rank in range(ranks)
        for number in range(rank, len(rows), ranks)
    ]


def _bundles(batch: RolloutBatch, together_N: Tensor | None) -> list[list[int]]:
    """Group the documents that share a label, in the order of each bundle's first."""
    if together_N is None:
        return [[document] for document in range(batch.num_documents)]
    bundles: dict[int, list[int]] = {}
    for document, label in enumerate(together_N.tolist()):
        bundles.setdefault(label, []).append(document)
    return list(bundles.values())


def _lengths(batch: RolloutBatch, bundles: Sequence[Sequence[int]], document_multiple_of: int) -> list[int]:
    lengths = [-(-length // document_multiple_of) * document_multiple_of for length in batch.lengths_N.tolist()]
    return [sum(lengths[document] for document in bundle) for bundle in bundles]


def _padded(batch: RolloutBatch, documents: Sequence[int], multiple_of: int, document_multiple_of: int) -> RolloutBatch:
    row = batch.select(documents).pad_documents(document_multiple_of)
    return row.pad_to(max(1, -(-row.num_tokens // multiple_of)) * multiple_of)
