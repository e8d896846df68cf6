"""Positions of tokens that differ, compared with the places that mistakes of shifting, packing and splitting affect.

Such a mistake affects tokens in particular places: at the end of a shard, at the start of a document, in every document
of a row but the first. `agreement` compares the tokens that differ with each such set.

Letters: S tokens of the source batch; index s stands for the prediction of token s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def places(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[S] bool of each place that the record can identify, trained tokens only.

    Returns:
        By name: "shard edges" (the last prediction of a cp rank before another rank continues), "behind shard
        edges" (of a document, all after its first rank change), "returns" (of a document, all predictions of a rank
        after another rank has continued), "behind half a shard" (of a row, all but the first half of its first rank's
        shard: the only part that keeps its place when halves of shards are placed elsewhere), "document ends",
        "document beginnings" (first trained tokens), "document starts" (first tokens, without a prediction), "later
        documents" (not the first of their row), "behind features" (of a document, all after the first token that is
        replaced by a feature).
    """
    if not {"trained", "documents"} <= set(tokens):
        return {}
    trained, documents = tokens["trained"].bool(), tokens["documents"]
    masks = {
        "document beginnings": _first_of(documents, trained),
        "document ends": _first_of(documents.flip(0), trained.flip(0)).flip(0),
    }
    if "shards" in tokens:
        shards = tokens["shards"]
        changes = torch.zeros_like(trained)
        changes[1:] = (shards[1:] != shards[:-1]) & (documents[1:] == documents[:-1]) & (shards[:-1] >= 0)
        edges = changes.roll(-1)
        edges[-1:] = False
        masks |= {
            "shard edges": edges,
            "behind shard edges": _after(changes, documents),
            "returns": _returns(documents, shards),
        }
        if {"rows", "places"} <= set(tokens):
            masks["behind half a shard"] = _behind_half(tokens["rows"], tokens["places"], shards)
    if "places" in tokens and "positions" in tokens:  # the first document of a row begins at place 0
        masks["later documents"] = tokens["places"] > tokens["positions"] - 1
    if "features" in tokens:
        read = torch.zeros_like(trained)
        read[1:] = (tokens["features"][:-1] >= 0) & (documents[1:] == documents[:-1])
        masks["behind features"] = _after(read, documents)
    masks = {name: where_S & trained for name, where_S in masks.items()}
    starts = torch.ones_like(trained)
    starts[1:] = documents[1:] != documents[:-1]
    return masks | {"document starts": starts}


def agreement(where: Tensor, place: Tensor) -> float:
    """Agreement of the tokens that differ with a place: the F-measure that weighs precision twice as much as recall.

    Formula: 1.25 p r / (0.25 p + r), p the share of differing tokens that lie there, r the share of it that differs.
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
    """All tokens of a document on a rank that had some of it before another rank did."""
    again = torch.zeros_like(documents, dtype=torch.bool)
    left: set[tuple[int, int]] = set()
    before = None
    for place, here in enumerate(zip(documents.tolist(), shards.tolist(), strict=True)):
        if before is not None and before != here:
            left.add(before)
        if here[1] >= 0:  # the first token of a document has no prediction
            again[place], before = here in left, here
    return again


def _behind_half(rows: Tensor, places: Tensor, shards: Tensor) -> Tensor:
    """All tokens of a row from the middle of its first rank's first stretch on; none of a row on one rank."""
    behind = torch.zeros_like(rows, dtype=torch.bool)
    for row in rows[rows >= 0].unique():
        here = rows == row
        later = here & (shards != shards[here][places[here].argmin()])
        if bool(later.any()):
            stretch = here & (places < places[later].min())
            behind |= here & (2 * places > places[stretch].max())
    return behind
