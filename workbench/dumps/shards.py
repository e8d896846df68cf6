"""Shards of a step, one a rank, put together; tokens that two of them hold or that none holds are refused.

A token is known by its document and its place in it, so that documents (data parallel) and tokens (context parallel)
may be dealt to ranks in any order.

Letters: T tokens of a shard | N documents of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import RecordError

RULE = "each token of the step is in one shard, and the tokens of a document are numbered from 0 without a gap"


@dataclass(frozen=True)
class Shard:
    """The part of a step that one rank holds.

    Attributes:
        name: of the file, for messages.
        document_ids_T: [T] documents, numbered over the whole step; below 0 on padding.
        positions_T: [T] index of the token in its document.
        tokens: values of tokens, [T] each.
        numbers_N: [N] numbers of the documents that ``documents`` is about.
        documents: values of documents, [N] each.
        ids: token ids of documents, N tensors each.
    """

    name: str
    document_ids_T: Tensor
    positions_T: Tensor
    tokens: Mapping[str, Tensor]
    numbers_N: Tensor
    documents: Mapping[str, Tensor]
    ids: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def join(shards: Sequence[Shard], origin: str) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return document ids, values of tokens and values of documents of the whole step, in the order of documents.

    Raises:
        RecordError: shards with other names, a token that two hold, a gap, or documents with two different values.
    """
    for shard in shards[1:]:
        for level in ("tokens", "documents"):
            if other := set(getattr(shard, level)) ^ set(getattr(shards[0], level)):
                found = f"{', '.join(sorted(other))} in {shards[0].name} or {shard.name}, but not in both"
                raise _refused(origin, found, "every shard has the same values")
    real = [shard.document_ids_T >= 0 for shard in shards]
    pairs = zip(shards, real, strict=True)
    ids_T = torch.cat([shard.document_ids_T[keep_T] for shard, keep_T in pairs])
    places_T = torch.cat([shard.positions_T[keep_T] for shard, keep_T in zip(shards, real, strict=True)])
    owner_T = torch.repeat_interleave(torch.arange(len(shards)), torch.tensor([int(keep_T.sum()) for keep_T in real]))
    order_T = torch.argsort(ids_T * (int(places_T.max()) + 1 if len(places_T) else 1) + places_T, stable=True)
    ids_T, places_T, owner_T = ids_T[order_T], places_T[order_T], owner_T[order_T]
    _check_cover(shards, ids_T, places_T, owner_T, origin)
    tokens = {
        name: torch.cat([shard.tokens[name][keep_T] for shard, keep_T in zip(shards, real, strict=True)])[order_T]
        for name in shards[0].tokens
    }
    return ids_T, tokens, _documents(shards, int(ids_T.max()) + 1, origin)


def _check_cover(shards: Sequence[Shard], ids_T: Tensor, places_T: Tensor, owner_T: Tensor, origin: str) -> None:
    if not len(ids_T):
        raise _refused(origin, "no token")
    same_T = (ids_T[1:] == ids_T[:-1]) & (places_T[1:] == places_T[:-1])
    if len(twice := torch.nonzero(same_T).squeeze(1)):
        at = int(twice[0])
        names = {shards[int(owner_T[at])].name, shards[int(owner_T[at + 1])].name}
        where = f"document {int(ids_T[at])}, token {int(places_T[at])}"
        raise _refused(origin, f"{len(twice)} tokens twice, first {where}, in {' and '.join(sorted(names))}")
    lengths_N = torch.bincount(ids_T)
    if missing := torch.nonzero(lengths_N == 0).squeeze(1).tolist():
        raise _refused(origin, f"no token of document {missing[0]}, of 0 to {int(ids_T.max())}")
    expected_T = torch.arange(len(ids_T)) - (lengths_N.cumsum(0) - lengths_N)[ids_T]
    if len(gaps := torch.nonzero(places_T != expected_T).squeeze(1)):
        at = int(gaps[0])
        raise _refused(origin, f"no token {int(expected_T[at])} of document {int(ids_T[at])}")


def _documents(shards: Sequence[Shard], number: int, origin: str) -> dict[str, Tensor]:
    columns: dict[str, Tensor] = {}
    for name in shards[0].documents:
        value_N = shards[0].documents[name].new_zeros(number)
        seen_N = torch.zeros(number, dtype=torch.bool)
        for shard in shards:
            of_shard_N, numbers_N = shard.documents[name], shard.numbers_N
            if of_shard_N.shape != numbers_N.shape or (len(numbers_N) and int(numbers_N.max()) >= number):
                found = f"{name} of {len(of_shard_N)} documents in {shard.name}, where {len(numbers_N)} are named"
                raise _refused(origin, found, "one value a document of the shard")
            other_N = seen_N[numbers_N] & (value_N[numbers_N] != of_shard_N)
            if bool(other_N.any()):
                found = f"two values of {name} of document {int(numbers_N[other_N][0])}, one in {shard.name}"
                raise _refused(origin, found, "ranks that share a document agree on its values")
            value_N[numbers_N], seen_N[numbers_N] = of_shard_N, True
        if not bool(seen_N.all()):
            raise _refused(origin, f"no {name} of document {int(torch.nonzero(~seen_N)[0])}", "one value a document")
        columns[name] = value_N
    return columns


def join_ids(shards: Sequence[Shard], number: int, origin: str) -> dict[str, list[Tensor]]:
    """Return the token ids of each document, by name, of shards of which several may have the same document.

    Raises:
        RecordError: shards with other names, a document without ids, or with two different ones.
    """
    joined: dict[str, list[Tensor]] = {}
    for name in sorted({name for shard in shards for name in shard.ids}):
        by_number: dict[int, tuple[Tensor, str]] = {}
        for shard in shards:
            if name not in shard.ids:
                raise _refused(origin, f"no {name} in {shard.name}", "every shard has the same values")
            for document, ids in zip(shard.numbers_N.tolist(), shard.ids[name], strict=True):
                other, where = by_number.setdefault(document, (ids, shard.name))
                if not torch.equal(other, ids):
                    found = f"two values of {name} of document {document}, in {where} and {shard.name}"
                    raise _refused(origin, found, "ranks that share a document agree on its values")
        if missing := set(range(number)) - set(by_number):
            raise _refused(origin, f"no {name} of document {min(missing)}", "one value a document")
        joined[name] = [by_number[document][0] for document in range(number)]
    return joined


def _refused(origin: str, found: str, rule: str = RULE) -> RecordError:
    return RecordError(
        f"put the shards of {origin} together", found=found, rule=rule, fix="dump all ranks of one step, each once"
    )
