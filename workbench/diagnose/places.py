"""Where tokens differ, held against the places that mistakes of shifting, packing and splitting touch.

Such a mistake touches tokens that lie somewhere: where a shard ends, where a document begins, in every document of a
row but the first. `agreement` holds the tokens that differ against each such set.

Letters: S tokens of the source batch; index s stands for the prediction of token s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def places(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[S] bool of each place that the record lets us tell, trained tokens only.

    Returns:
        By name: "shard edges" (the last prediction that a cp rank makes before another rank goes on), "behind shard
        edges" (of a document, all after its first rank change), "returns" (of a document, what a rank predicts after
        another rank has gone on), "behind half a shard" (of a row, all but the first half of what its first rank holds:
        the one part that keeps its place when halves of shards are put elsewhere), "document ends", "document
        beginnings" (first trained tokens), "document starts" (first tokens, which nothing predicts), "later documents"
        (not the first of their row), "behind features" (of a document, all after the first token in whose place a
        feature stands).
    """
    if not {"trained", "documents"} <= set(tokens):
        return {}
    trained, documents = tokens["trained"].bool(), tokens["documents"]
    found = {
        "document beginnings": _first_of(documents, trained),
        "document ends": _first_of(documents.flip(0), trained.flip(0)).flip(0),
    }
    if "shards" in tokens:
        shards = tokens["shards"]
        changes = torch.zeros_like(trained)
        changes[1:] = (shards[1:] != shards[:-1]) & (documents[1:] == documents[:-1]) & (shards[:-1] >= 0)
        edges = changes.roll(-1)
        edges[-1:] = False
        found |= {
            "shard edges": edges,
            "behind shard edges": _after(changes, documents),
            "returns": _returns(documents, shards),
        }
        if {"rows", "places"} <= set(tokens):
            found["behind half a shard"] = _behind_half(tokens["rows"], tokens["places"], shards)
    if "places" in tokens and "positions" in tokens:  # the first document of a row begins at place 0
        found["later documents"] = tokens["places"] > tokens["positions"] - 1
    if "features" in tokens:
        read = torch.zeros_like(trained)
        read[1:] = (tokens["features"][:-1] >= 0) & (documents[1:] == documents[:-1])
        found["behind features"] = _after(read, documents)
    found = {name: where_S & trained for name, where_S in found.items()}
    starts = torch.ones_like(trained)
    starts[1:] = documents[1:] != documents[:-1]
    return found | {"document starts": starts}


def agreement(where: Tensor, place: Tensor) -> float:
    """How well tokens that differ agree with a place: the F-measure that counts precision twice as much as recall.

    Formula: 1.25 p r / (0.25 p + r), p the share of what differs that lies there, r that of the place that differs.
    """
    both = int((where & place).sum())
    if not both:
        return 0.0
    precision, recall = both / int(where.sum()), both / int(place.sum())
    return 1.25 * precision * recall / (0.25 * precision + recall)


def _first_of(labels: Tensor, among: Tensor) -> Tensor:
    seen: set[int] = set()
    first = torch.zeros_like(among)
    for place, (label, counts) in enumerate(zip(labels.tolist(), among.tolist(), strict=True)):
        if counts and label not in seen:
            seen.add(label)
            first[place] = True
    return first


def _after(changes: Tensor, documents: Tensor) -> Tensor:
    """All tokens of a document from its first change on."""
    total = changes.long().cumsum(0)
    before = torch.zeros(int(documents.max()) + 1, dtype=torch.long)
    begins = torch.ones_like(changes)
    begins[1:] = documents[1:] != documents[:-1]
    before[documents[begins]] = (total - changes.long())[begins]
    return total > before[documents]


def _returns(documents: Tensor, shards: Tensor) -> Tensor:
    """All tokens of a document on a rank that held some of it before another rank did."""
    found = torch.zeros_like(documents, dtype=torch.bool)
    left: set[tuple[int, int]] = set()
    before = None
    for place, here in enumerate(zip(documents.tolist(), shards.tolist(), strict=True)):
        if before is not None and before != here:
            left.add(before)
        if here[1] >= 0:  # the first token of a document is predicted nowhere
            found[place], before = here in left, here
    return found


def _behind_half(rows: Tensor, places: Tensor, shards: Tensor) -> Tensor:
    """All tokens of a row from the middle of its first rank's first stretch on; none of a row that one rank holds."""
    found = torch.zeros_like(rows, dtype=torch.bool)
    for row in rows[rows >= 0].unique():
        here = rows == row
        later = here & (shards != shards[here][places[here].argmin()])
        if bool(later.any()):
            stretch = here & (places < places[later].min())
            found |= here & (2 * places > places[stretch].max())
    return found
