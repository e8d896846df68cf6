"""HTML in which every string is escaped unless it is markup already.

Names come from users' files, so escaping is not left to the author of a page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

VOID = frozenset({"br", "wbr", "meta"})
"""Elements that have no end tag."""


class Markup(str):
    """A string that is HTML, as opposed to a string that is text."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Build one element.

    Args:
        name: name of the element.
        *children: `Markup` as it is, anything else as escaped text; None is skipped, lists are flattened.
        **attributes: ``class_`` for class, ``data_x`` for data-x; None leaves one out, True gives the name
            only.

    Example:
        >>> tag("p", "a < b ", tag("b", "c"), class_="x")
        '<p class="x">a &lt; b <b>c</b></p>'
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written += f" {key}" if value is True else f' {key}="{html.escape(str(value), quote=True)}"'
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def breakable(name: str) -> Markup:
    """Return a name that may be broken after its dots, underscores, slashes and dashes, and nowhere else."""
    return Markup(re.sub(r"([._/-])", r"\1<wbr>", html.escape(name, quote=True)))


def join(children: Iterable[Any]) -> Markup:
    """Concatenate children, text escaped."""
    out = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            out.append(str(child))
        elif isinstance(child, (list, tuple)):
            out.append(join(child))
        else:
            out.append(html.escape(str(child), quote=True))
    return Markup("".join(out))


def table(
    head: Iterable[Any], rows: Iterable[Iterable[Any]], *, numbers: Iterable[int] = (), class_: str | None = None
) -> Markup:
    """Build a table whose first column heads its rows, in a box that scrolls; ``numbers`` are set flush right."""
    flush = set(numbers)

    def cells(row: Iterable[Any]) -> list[Markup]:
        return [
            tag("th", cell, scope="row")
            if column == 0
            else tag("td", cell, class_="number" if column in flush else None)
            for column, cell in enumerate(row)
        ]

    heads = [
        tag("th", name, scope="col", class_="number" if column in flush else None) for column, name in enumerate(head)
    ]
    body = [join([tag("tr", cells(row)), Markup("\n")]) for row in rows]
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", heads)), tag("tbody", body), class_=class_),
        class_="scroll",
        tabindex="0",
    )
