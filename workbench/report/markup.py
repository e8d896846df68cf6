"""HTML in which every string is escaped unless it is `markupsafe.Markup` already.

Names come from users' files, so escaping is not left to the author of a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup as Markup
from markupsafe import escape

VOID = frozenset({"br", "wbr", "meta", "input"})
"""Elements that have no end tag."""


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
        written += f" {key}" if value is True else f' {key}="{escape(str(value))}"'
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def breakable(name: str) -> Markup:
    """Return a name that may be broken after its dots, underscores, slashes and dashes, and nowhere else."""
    return Markup(re.sub(r"([._/-])", r"\1<wbr>", str(escape(name))))


def style_sheet(file: str) -> Markup:
    """Return a style sheet of this package, such as "page.css" or "rich/rich.css"."""
    return Markup((Path(__file__).parent / file).read_text(encoding="utf8"))


def join(children: Iterable[Any]) -> Markup:
    """Concatenate children, text escaped."""
    shown = (join(child) if isinstance(child, (list, tuple)) else child for child in children if child is not None)
    return Markup().join(child if isinstance(child, Markup) else str(child) for child in shown)


def table(
    head: Iterable[Any], rows: Iterable[Iterable[Any]], *, numbers: Iterable[int] = (), class_: str | None = None
) -> Markup:
    """Build a table whose first column heads its rows, in a box that scrolls; ``numbers`` are set flush right."""
    flush = dict.fromkeys(numbers, "number")
    heads = [tag("th", name, scope="col", class_=flush.get(column)) for column, name in enumerate(head)]
    body = []
    for first, *rest in rows:
        cells = [tag("td", cell, class_=flush.get(column)) for column, cell in enumerate(rest, 1)]
        body += [tag("tr", tag("th", first, scope="row"), cells), "\n"]
    return scrolling_table(heads, body, class_=class_)


def scrolling_table(heads: Sequence[Markup], body: Sequence[Any], *, class_: str | None = None) -> Markup:
    """Build a table of these head cells and rows, in a box that scrolls."""
    whole = tag("table", tag("thead", tag("tr", heads)), tag("tbody", body), class_=class_)
    return tag("div", whole, class_="scroll", tabindex="0")
