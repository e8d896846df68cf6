"""First difference of two runs: the tensor, the tokens, and the tensor before it."""

from __future__ import annotations

from typing import Any

from workbench.compare.bisect import Bisection, Parting
from workbench.report.markup import Markup, table, tag
from workbench.report.rich.strips import framed


def as_html(found: Bisection) -> Markup:
    """Return the verdict, and below it the place in a table."""
    verdict, *changes = str(found).splitlines()
    head = tag("p", tag("span", verdict, class_=None if found.equal else "trouble"))
    place = [] if found.parting is None else table(["", "they part at"], _rows(found.parting), class_="table")
    return framed(head, place, [tag("p", change.strip(), class_="quiet") for change in changes])


def _rows(parting: Parting) -> list[list[Any]]:
    rows: list[list[Any]] = [["step", parting.step], ["way", parting.way], ["tensor", tag("code", parting.tensor)]]
    if parting.tokens is not None:
        rows += [
            ["row", parting.row],
            ["tokens", f"{parting.tokens[0]} to {parting.tokens[1] - 1}"],
            ["blocks that differ", f"{parting.blocks} of {parting.of}"],
        ]
    return rows + ([["the same until", tag("code", parting.before)]] if parting.before else [])
