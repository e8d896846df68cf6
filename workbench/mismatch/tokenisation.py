"""Other tokens of the same text: where the record's first value is off, the engine may have had another split there.

A trainer that encodes the text of a completion again gets ids that the engine did not sample. Values are recorded token
by token, so that from the first difference on they belong to other tokens. From the first token that is off, the text
of one to three tokens is split in every other way into at most three tokens of the vocabulary, until the document's
values come out, site by site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration

SITES = 12
"""Places of one document that are spelled otherwise."""
NEAR = 5.0
"""Multiple of the 30th percentile of all distances up to which a token is not off."""
TINY = 1e-5
SPELLINGS = 400
"""Spellings that are tried at one place."""


def respelled(
    computation: Computation, configuration: Configuration, column_T: Tensor, recorded_T: Tensor
) -> str | None:
    """Add a reading with other spellings to a computation, and return its name; None if no document comes nearer."""
    if computation.vocabulary is None:
        return None
    distance_T = torch.where(computation.counted_T, (column_T - recorded_T).abs(), torch.nan)
    compared = distance_T[distance_T.isfinite()]
    if not len(compared):
        return None
    limit = TINY + NEAR * float(compared.quantile(0.3))
    ids_of: dict[str, int] = {}
    for token, text in enumerate(computation.vocabulary):
        ids_of.setdefault(text, token)
    readings, changed = list(computation.readings[configuration.tokens]), False
    for number in range(len(computation.documents)):
        own_C = recorded_T[computation.document_T == number]
        off_C = distance_T[computation.document_T == number]
        first = _first(off_C, limit)
        if first is None or first >= len(own_C) - 1:
            continue
        ids = readings[number]
        for _ in range(SITES):
            if first is None:
                break
            spelled = list(_spellings(ids, first, computation.vocabulary, ids_of))[:SPELLINGS]
            if not spelled:
                break
            few = computation.part([number] * len(spelled))
            few.readings = {"spelled": spelled}
            tried = few.column(configuration.with_changes({"tokens": "spelled"}))
            counted_C = computation.counted_T[computation.document_T == number]
            off = torch.where(counted_C, (tried.reshape(len(spelled), -1) - own_C).abs(), torch.nan)
            firsts = [_first(one, limit) for one in off]
            reached = [len(own_C) if at is None else at for at in firsts]
            best = max(range(len(spelled)), key=reached.__getitem__)
            if reached[best] <= first + 1:
                break
            ids, first, changed = spelled[best], firsts[best], True
        readings[number] = ids
    if not changed:
        return None
    name = f"respelled:{len(computation.readings)}"
    computation.readings[name] = readings
    return name


def _first(distance_C: Tensor, limit: float) -> int | None:
    """First token that is off; None if none is."""
    off = torch.nonzero(distance_C > limit)
    return int(off[0]) if len(off) else None


def _spellings(
    ids: tuple[int, ...], at: int, vocabulary: Sequence[str], ids_of: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Yield the ids with one to three tokens from a place on spelled otherwise."""
    for count in (1, 2, 3):
        old = ids[at : at + count]
        if len(old) == count:
            text = "".join(vocabulary[token] for token in old)
            for new in _splits(text, ids_of, 3):
                if new != old and (not new or new[0] != old[0]) and (len(new) == 1 or new[-1] != old[-1] or count == 1):
                    yield (*ids[:at], *new, *ids[at + count :])


def _splits(text: str, ids_of: dict[str, int], most: int) -> Iterator[tuple[int, ...]]:
    if text in ids_of:
        yield (ids_of[text],)
    if most > 1:
        for cut in range(1, len(text)):
            if text[:cut] in ids_of:
                for rest in _splits(text[cut:], ids_of, most - 1):
                    yield (ids_of[text[:cut]], *rest)
