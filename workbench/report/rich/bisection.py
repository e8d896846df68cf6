"""First difference of two runs: the tensor, the tokens, and the tensor before it."""

from __future__ import annotations

from typing import Any

from workbench.compare.bisect import Bisection, Divergence
from workbench.report.markup import Markup, table, tag
from workbench.report.rich.strips import framed


def as_html(bisection: Bisection) -> Markup:
    """Return the verdict, and below it the place in a table."""
    verdict, *changes = str(bisection).splitlines()
    head = tag("p", tag("span", verdict, class_=None if bisection.equal else "trouble"))
    place = (
        [] if bisection.divergence is None else table(["", "they part at"], _rows(bisection.divergence), class_="table")
    )
    return framed(head, place, [tag("p", change.strip(), class_="quiet") for change in changes])


def _rows(parting: Divergence) -> list[list[Any]]:
    rows: list[list[Any]] = [["step", parting.step], ["way", parting.way], ["tensor", tag("code", parting.tensor)]]
    if parting.tokens is not None:
        rows += [
            ["row", parting.row],
            ["tokens", f"{parting.tokens[0]} to {parting.tokens[1] - 1}"],
            ["blocks that differ", f"{parting.blocks} of {parting.of}"],
        ]
    return rows + ([["the same until", tag("code", parting.before)]] if parting.before else [])
