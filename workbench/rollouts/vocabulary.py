"""Text of vocabulary ids, and where two encodings of a completion differ.

An engine draws ids; a trainer that encodes their text again may get others (retokenisation): the same text, split
otherwise, or, where decoding lost something, other text.

Letters: a, b tokens of the two encodings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

from workbench.errors import RecordError, SpecError
from workbench.untrusted import parse_json


@dataclass(frozen=True)
class Differing:
    """A run of tokens that two encodings of one completion spell otherwise.

    Attributes:
        at: place of the first one in the trainer's encoding; its length if the run is at the end and only the engine's.
        trainer, engine: ids of the run.
        text: of the run, if both have the same; None: they differ, or no vocabulary is known.
    """

    at: int
    trainer: tuple[int, ...]
    engine: tuple[int, ...]
    text: str | None = None


def read_vocabulary(path: Path) -> list[str]:
    """Read the text of each id.

    Raises:
        RecordError: no such file, or no list of texts.
    """
    try:
        texts = parse_json(path.read_text(encoding="utf8"))
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return texts
        found = type(texts).__name__
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
    raise RecordError(
        f"read the vocabulary {path}",
        found=found,
        rule="a JSON list with the text of each id",
        fix="json.dumps([tokenizer.decode([i]) for i in range(len(tokenizer))])",
    )


def decoded(ids: Sequence[int], vocabulary: Sequence[str]) -> list[str]:
    """Return the text of each id.

    Raises:
        SpecError: an id that the vocabulary does not have.
    """
    if beyond := [number for number in ids if not 0 <= number < len(vocabulary)]:
        raise SpecError(
            "decode tokens",
            found=f"id {beyond[0]}",
            rule=f"a vocabulary with the text of each id; this one has 0 to {len(vocabulary) - 1}",
            fix="give the vocabulary of the tokenizer that wrote the ids",
        )
    return [vocabulary[number] for number in ids]


def differing_runs(
    trainer: Sequence[int], engine: Sequence[int], vocabulary: Sequence[str] | None = None
) -> list[Differing]:
    """Return the runs of tokens in which two encodings of a completion differ, in order; [] if they are the same.

    With a vocabulary, and where both are the same text, runs are those between characters at which both have a token's
    end. Otherwise they are compared place by place, or, if one is longer, all from the first to the last difference is
    one run.
    """
    a, b = tuple(trainer), tuple(engine)
    if a == b:
        return []
    if vocabulary is not None:
        texts = decoded(a, vocabulary), decoded(b, vocabulary)
        if "".join(texts[0]) == "".join(texts[1]):
            return list(_between_ends(a, b, *texts))
    if len(a) == len(b):
        return [Differing(run[0], a[run[0] : run[-1] + 1], b[run[0] : run[-1] + 1]) for run in _unequal(a, b)]
    shorter = min(len(a), len(b))
    front = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    back = next((n for n in range(shorter - front) if a[-1 - n] != b[-1 - n]), shorter - front)
    return [Differing(front, a[front : len(a) - back], b[front : len(b) - back])]


def _unequal(a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield the places of each run of unequal ids, of encodings of one length."""
    pairs = ((x != y, place) for place, (x, y) in enumerate(zip(a, b, strict=True)))
    for differs, run in groupby(pairs, key=itemgetter(0)):
        if differs:
            yield [place for _, place in run]


def _between_ends(
    a: tuple[int, ...], b: tuple[int, ...], texts_a: Sequence[str], texts_b: Sequence[str]
) -> Iterator[Differing]:
    ends_a, ends_b = list(accumulate(map(len, texts_a))), list(accumulate(map(len, texts_b)))
    # the last token with an end at a character: tokens without text belong to the run before
    place_a, place_b = ({end: n + 1 for n, end in enumerate(ends)} for ends in (ends_a, ends_b))
    i = j = 0
    for end in sorted(place_a.keys() & place_b.keys()):
        i2, j2 = place_a[end], place_b[end]
        if a[i:i2] != b[j:j2]:
            yield Differing(i, a[i:i2], b[j:j2], "".join(texts_a[i:i2]))
        i, j = i2, j2
    if a[i:] != b[j:]:
        yield Differing(i, a[i:], b[j:], "".join(texts_a[i:]))
