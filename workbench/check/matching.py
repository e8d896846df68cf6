"""Documents and tokens of two dumps of one batch, matched.

Documents are matched by their token ids where both dumps have them, in any order and with any padding; else by number.

Letters: T tokens of a dump | N documents | M tokens that both dumps have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.dumps.step import StepDump
from workbench.errors import SpecError, listed


@dataclass(frozen=True)
class Matched:
    """Tokens and documents that two dumps share.

    Attributes:
        left_M, right_M: [M] indices of the shared tokens.
        pairs: (document of the left dump, of the right one).
        differences: sentences on documents and trained tokens that only one of them has.
        by: how documents were matched.
    """

    left_M: Tensor
    right_M: Tensor
    pairs: tuple[tuple[int, int], ...]
    differences: tuple[str, ...]
    by: str


def match_documents(left: StepDump, right: StepDump) -> Matched:
    """Match the documents of two dumps of one batch.

    Raises:
        SpecError: no token ids in one of them, and another number of documents; or no document in both.
    """
    by_ids = "token_ids" in left.tokens and "token_ids" in right.tokens
    both = "token_mask" in left.tokens and "token_mask" in right.tokens
    field = "token_mask" if both else "loss_mask"
    ends = [_ends(dump, field) for dump in (left, right)]
    pairs: list[tuple[int, int]] = []
    missing: tuple[list[int], list[int]] = ([], [])
    if by_ids:
        pairs, missing = _by_ids(_keys(left, ends[0]), _keys(right, ends[1]))
    elif left.num_documents == right.num_documents:
        pairs = [(number, number) for number in range(left.num_documents)]
    if not pairs:
        counts = f"{left.num_documents} documents in {left.origin}, {right.num_documents} in {right.origin}"
        raise SpecError(
            "compare two steps",
            found=f"{counts}; {'none has the same tokens' if by_ids else 'token_ids in at most one of them'}",
            rule="two dumps of one batch: the same documents by their token ids, or without ids as many, in one order",
            fix="dump token_ids in both, of the same batch",
        )
    differences = [
        f"{len(numbers)} documents only in {dump.origin}: {listed(numbers, 6)}"
        for dump, numbers in zip((left, right), missing, strict=True)
        if numbers
    ]
    at_N = torch.tensor(pairs)
    starts, widths = zip(*(_extent(dump) for dump in (left, right)), strict=True)
    end_N = torch.maximum(ends[0][at_N[:, 0]], ends[1][at_N[:, 1]])
    shared_N = torch.minimum(torch.minimum(widths[0][at_N[:, 0]], widths[1][at_N[:, 1]]), end_N)
    for side, dump in enumerate((left, right)):
        beyond_N = ends[side][at_N[:, side]] > shared_N
        if bool(beyond_N.any()):
            first = int(at_N[beyond_N][0, side])
            differences.append(
                f"{int(beyond_N.sum())} documents of {dump.origin} are longer than in the other dump, first {first}"
            )
    offsets_M = torch.arange(int(shared_N.sum())) - (shared_N.cumsum(0) - shared_N).repeat_interleave(shared_N)
    left_M, right_M = (start_N[at_N[:, i]].repeat_interleave(shared_N) + offsets_M for i, start_N in enumerate(starts))
    return Matched(left_M, right_M, tuple(pairs), tuple(differences), "token ids" if by_ids else "number")


def _extent(dump: StepDump) -> tuple[Tensor, Tensor]:
    """First token and number of tokens of each document, padding included."""
    widths_N = torch.bincount(dump.document_ids_T, minlength=dump.num_documents)
    return widths_N.cumsum(0) - widths_N, widths_N


def _ends(dump: StepDump, field: str) -> Tensor:
    """[N] position after the last token of each document for which a mask is set."""
    last_N = torch.zeros(dump.num_documents, dtype=torch.int64)
    mask_T = dump.tokens[field]
    return last_N.scatter_reduce(0, dump.document_ids_T[mask_T], dump.positions_T[mask_T] + 1, "amax")


def _keys(dump: StepDump, ends_N: Tensor) -> list[bytes]:
    """Token ids of each document up to its end, as bytes."""
    starts_N, _ = _extent(dump)
    content, ids = dump.tokens["token_ids"].long().numpy().tobytes(), 8
    spans = zip(starts_N.tolist(), ends_N.tolist(), strict=True)
    return [content[ids * start : ids * (start + end)] for start, end in spans]


def _by_ids(left: list[bytes], right: list[bytes]) -> tuple[list[tuple[int, int]], tuple[list[int], list[int]]]:
    """Pairs of documents with the same tokens, equal ones in order; then those of which one begins with the other."""
    places: dict[bytes, list[int]] = {}
    for number in reversed(range(len(right))):
        places.setdefault(right[number], []).append(number)
    pairs = [(number, places[key].pop()) for number, key in enumerate(left) if places.get(key)]
    rest_left = sorted({*range(len(left))} - {number for number, _ in pairs})
    rest_right = sorted({*range(len(right))} - {number for _, number in pairs})
    for number in list(rest_left):
        key = left[number]
        same = (other for other in rest_right if key and right[other] and _begins(key, right[other]))
        if (other := next(same, None)) is not None:
            pairs.append((number, other))
            rest_left.remove(number)
            rest_right.remove(other)
    return sorted(pairs), (rest_left, rest_right)


def _begins(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)
