"""Strips: a row of tokens as a bar of pieces, and the frame that drawings of nouns share.

A piece is identified by its pattern and its tooltip; its hue only repeats them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.report.markup import Markup, style_sheet, tag


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind: a class of rich.css, such as "prompt", or "" for a gap; with a tooltip."""

    length: int
    kind: str
    title: str = ""
    text: str = ""


def strip(pieces: Iterable[Piece], total: int, *, label: str) -> Markup:
    """Draw pieces side by side, on a scale of so many tokens; the label is for screen readers."""
    drawn, left = [], total
    for piece in pieces:
        left -= piece.length
        how = {"class_": piece.kind or "gap", "title": piece.title or None, "style": f"flex-grow:{piece.length}"}
        drawn.append(tag("i", piece.text, **how))
    if left > 0:
        drawn.append(tag("i", class_="gap", style=f"flex-grow:{left}"))
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
    stretches, begin = [], 0
    for value, alike in itertools.groupby(values):
        end = begin + len(list(alike))
        stretches.append((value, begin, end))
        begin = end
    return stretches


def at_places(pieces: Iterable[tuple[int, Piece]]) -> list[Piece]:
    """Return pieces with gaps between them, such that each begins at its place."""
    placed, at = [], 0
    for begin, piece in pieces:
        placed += [Piece(begin - at, "")] if begin > at else []
        placed.append(piece)
        at = begin + piece.length
    return placed


def framed(*children: Any) -> Markup:
    """Frame a drawing of this package, with its style."""
    return tag("div", tag("style", style_sheet("rich/rich.css")), *children, class_="workbench-rich")


def quiet(text: str) -> Markup:
    """Return a paragraph in the background."""
    return tag("p", text, class_="quiet")


def not_drawn(count: int, what: str) -> Markup | None:
    """Return a note on ranks or documents beyond those that are drawn, if there are any."""
    return quiet(f"{count} more {what} are not drawn.") if count > 0 else None


def legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """Return the legend of patterns, given as (class, label)."""
    return tag("p", [tag("span", tag("i", class_=kind), label) for kind, label in kinds], class_="legend")
