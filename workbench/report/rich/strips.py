"""Strips: a row of tokens as a bar of pieces, and the frame that drawings of nouns share.

A piece is identified by its pattern and its tooltip; its hue only repeats them.
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
    """Neighbouring tokens of one kind.

    Attributes:
        length: number of tokens.
        kind: a class of rich.css, such as "prompt"; "" for a gap.
        title: description for the tooltip.
        text: text in the piece.
    """

    length: int
    kind: str
    title: str = ""
    text: str = ""


def strip(pieces: Iterable[Piece], total: int, *, label: str) -> Markup:
    """Draw pieces side by side, on a scale of so many tokens; the label is for screen readers."""
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


def labelled(name: str, pieces: Iterable[Piece], total: int, label: str, text: str) -> list[Markup]:
    """Return a row: a name, a strip (see `strip`) and a description."""
    return [tag("span", name), strip(pieces, total, label=label), tag("span", text, class_="quiet")]


def runs(values: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Return (value, begin, end) of every run of equal neighbours.

    Example:
        >>> runs("aab")
        [('a', 0, 2), ('b', 2, 3)]
    """
    stretches: list[tuple[Any, int, int]] = []
    for index, value in enumerate(values):
        if stretches and stretches[-1][0] == value:
            stretches[-1] = (value, stretches[-1][1], index + 1)
        else:
            stretches.append((value, index, index + 1))
    return stretches


def framed(*children: Any) -> Markup:
    """Frame a drawing of this package, with its style."""
    return tag("div", tag("style", Markup(STYLE_SHEET.read_text(encoding="utf8"))), *children, class_="workbench-rich")


def legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """Return the legend of patterns, given as (class, label)."""
    return tag("p", [tag("span", tag("i", class_=kind), label) for kind, label in kinds], class_="legend")
