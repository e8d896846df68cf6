"""Places of a step that a mistake of shifting, packing or splitting touches, and the agreement of tokens with one.

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
    if (shards := tokens.get("shards", _parts_of_documents(tokens))) is not None:
        changes = torch.zeros_like(trained)
        changes[1:] = (shards[1:] != shards[:-1]) & (documents[1:] == documents[:-1]) & (shards[:-1] >= 0)
        edges = changes.roll(-1)
        edges[-1:] = False
        masks |= {
            "shard edges": edges,
            "behind shard edges": _after(changes, documents),
            "returns": _returns(documents, shards),
        }
        if {"rows", "places", "shards"} <= set(tokens):
            masks["behind half a shard"] = _behind_half(tokens["rows"], tokens["places"], shards)
    if "places" in tokens and "positions" in tokens:  # the first document of a row begins at place 0
        masks["later documents"] = tokens["places"] > tokens["positions"] - 1
    elif "rows" in tokens:  # or the first that was noted of a micro-batch
        begins = _first_of(tokens["rows"], trained)
        masks["later documents"] = ~torch.isin(documents, documents[begins])
    if "features" in tokens:
        read = torch.zeros_like(trained)
        read[1:] = (tokens["features"][:-1] >= 0) & (documents[1:] == documents[:-1])
        masks["behind features"] = _after(read, documents)
    masks = {name: where_S & trained for name, where_S in masks.items()}
    starts = torch.ones_like(trained)
    starts[1:] = documents[1:] != documents[:-1]
    return masks | {"document starts": starts}


def _parts_of_documents(tokens: Mapping[str, Tensor]) -> Tensor | None:
    """[S] number of each token's part of its document, if documents were noted in several micro-batches; else None."""
    if "rows" not in tokens:
        return None
    rows, documents = tokens["rows"], tokens["documents"]
    parts, split = torch.zeros_like(rows), False
    for document in documents[documents >= 0].unique():
        here = documents == document
        _, parts[here] = torch.unique(rows[here], return_inverse=True)
        split = split or bool(parts[here].any())
    return parts if split else None


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
    first = torch.zeros_like(among)
    for label in labels[among].unique():
        first[int((among & (labels == label)).nonzero()[0])] = True
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
