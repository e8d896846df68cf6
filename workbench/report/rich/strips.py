"""Strips: a row of tokens as a bar of pieces, and the frame that drawings of nouns share.

A piece is told by its pattern and its tooltip; its hue only repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.report.markup import Markup, tag

STYLE_SHEET = Path(__file__).with_name("rich.css")


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that are alike.

    Attributes:
        length: how many.
        kind: a class of rich.css, such as "prompt"; "" for a gap.
        title: what they are, for the tooltip.
        text: written into the piece.
    """

    length: int
    kind: str
    title: str = ""
    text: str = ""


def strip(pieces: Iterable[Piece], total: int, *, label: str) -> Markup:
    """The pieces side by side, on a scale of so many tokens.

    Args:
        pieces: from left to right.
        total: tokens that the whole width stands for; what the pieces leave stays empty.
        label: what is drawn, for screen readers.
    """
    drawn, used = [], 0
    for piece in pieces:
        used += piece.length
        drawn.append(
            tag(
                "i",
                piece.text,
                class_=piece.kind or "gap",
                title=piece.title or None,
                style=f"flex-grow:{piece.length}",
            )
        )
    if total > used:
        drawn.append(tag("i", class_="gap", style=f"flex-grow:{total - used}"))
    return tag("span", drawn, class_="strip", role="img", aria_label=label)


def runs(values: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """(value, begin, end) of every stretch of equal neighbours.

    Example:
        >>> runs("aab")
        [('a', 0, 2), ('b', 2, 3)]
    """
    found: list[tuple[Any, int, int]] = []
    for index, value in enumerate(values):
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1], index + 1)
        else:
            found.append((value, index, index + 1))
    return found


def framed(*children: Any) -> Markup:
    """The frame of every drawing of this package, with its style."""
    return tag("div", tag("style", Markup(STYLE_SHEET.read_text(encoding="utf8"))), *children, class_="workbench-rich")


def legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """What the patterns mean: (class, words)."""
    return tag("p", [tag("span", tag("i", class_=kind), words) for kind, words in kinds], class_="legend")
