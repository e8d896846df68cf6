"""Traffic between two grids: the samples of each rank on either side, and a table of rows for each exchange."""

from __future__ import annotations

from workbench.report.markup import Markup, tag
from workbench.report.rich.strips import Piece, framed, runs, strip
from workbench.rollouts.batch import PADDING
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.sides import Side
from workbench.sharding.bridge.traffic import Step, Traffic, coordinates_label

AT_ALL = 32
"""Ranks that are drawn; the rest is counted."""
_PIECES = 200
_HUES = 8


def as_html(traffic: Traffic) -> Markup:
    """Return the route, both sides rank by rank, and the rows sent from each rank to each."""
    pair, route = traffic.pair, traffic.route
    why = f" ({route.why})" if route.why else ""
    head = tag(
        "p",
        tag("strong", "Traffic"),
        f" {pair.source.label} → {pair.destination.label}: {route.path}{why}; "
        f"{sum(route.samples)} samples of {traffic.tokens} tokens",
    )
    before, after = traffic.sides
    sides = [
        tag("p", f"At the source, {pair.source.label}. A hue is a dp rank.", class_="quiet"),
        _side(traffic, before, pair.source),
        tag("p", f"At the destination, {pair.destination.label}.", class_="quiet"),
        _side(traffic, after, pair.destination),
    ]
    quiet = [
        tag("p", f"{step.direction}, {step.name}: nothing leaves its rank.", class_="quiet")
        for step in traffic.steps
        if not step.between.any()
    ]
    tables = [_table(step, pair.source.offset) for step in traffic.steps if step.between.any()]
    more = (
        tag("p", f"{pair.source.size - AT_ALL} more ranks are not drawn.", class_="quiet")
        if pair.source.size > AT_ALL
        else None
    )
    return framed(head, sides, more, quiet, tables)


def _side(traffic: Traffic, side: Side, grid: Grid) -> Markup:
    total = sum(traffic.route.samples) * traffic.tokens
    rows = []
    for number in range(min(side.size, AT_ALL)):
        rank = number + grid.offset
        place = grid.place(rank)
        tokens_t = side.share_of[number].tokens_t
        tokens_t = tokens_t[tokens_t != PADDING].sort().values
        text = traffic.tokens_label(side, number)
        rows.append(
            [
                tag("span", f"rank {rank}"),
                strip(
                    _pieces(tokens_t.tolist(), traffic.tokens, place[0]),
                    total,
                    label=f"rank {rank} holds samples {text}",
                ),
                tag("span", f"{coordinates_label(place)} · {text}", class_="quiet"),
            ]
        )
    return tag("div", rows, class_="strips")


def _pieces(tokens: list[int], each: int, dp: int) -> list[Piece]:
    """Return spans of one sample at their places among all tokens."""
    stretches = runs([(token - number, token // each) for number, token in enumerate(tokens)])
    if len(stretches) > _PIECES:
        return [Piece(tokens[0], ""), Piece(tokens[-1] + 1 - tokens[0], "context", f"{len(stretches)} stretches")]
    pieces, at = [], 0
    for (_, sample), begin, end in stretches:
        first, last = tokens[begin], tokens[end - 1]
        if first > at:
            pieces.append(Piece(first - at, ""))
        pieces.append(
            Piece(
                end - begin,
                f"owner r{dp % _HUES}",
                f"sample {sample}, tokens {first % each} to {last % each}",
                str(sample),
            )
        )
        at = last + 1
    return pieces


def _table(step: Step, offset: int) -> Markup:
    """Tabulate rows from each rank, a line, to each rank, a column; darker for more rows."""
    ranks = range(min(len(step.rows_RR), AT_ALL))
    between, most = step.between.tolist(), int(step.between.max())
    heads = [tag("th", str(rank + offset), scope="col", class_="number") for rank in ranks]
    lines = []
    for rank in ranks:
        cells = [
            tag(
                "td",
                str(count or ""),
                class_=f"number held share{-(-4 * count // most)}" if count else "number",
                title=f"{count} rows from rank {rank + offset} to rank {other + offset}" if count else None,
            )
            for other, count in enumerate(between[rank][:AT_ALL])
        ]
        lines.append(tag("tr", tag("th", f"from {rank + offset}", scope="row"), cells))
    head = tag("p", f"{step.direction}, {step.name}: rows from rank to rank")
    return tag(
        "div",
        head,
        tag(
            "div",
            tag(
                "table",
                tag("thead", tag("tr", tag("th", "", scope="col"), heads)),
                tag("tbody", lines),
                class_="traffic",
            ),
            class_="scroll",
            tabindex="0",
        ),
    )
