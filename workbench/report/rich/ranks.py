"""Tokens of ranks: a shard plan, and the traffic between two grids.

A plan is a row of tokens: the owner of each, then rank by rank, each at its place in the packed row. Traffic is the
samples of each rank on either side, and a table of rows for each exchange.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from workbench.report.markup import Markup, scrolling_table, tag
from workbench.report.rich.strips import Piece, at_places, framed, labelled, not_drawn, quiet, runs
from workbench.rollouts.batch import PADDING
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.sides import Side
from workbench.sharding.bridge.traffic import Step, Traffic, coordinates_label
from workbench.sharding.plan import ShardPlan, spans

PLAN_RANKS, TRAFFIC_RANKS = 64, 32
"""Ranks that are drawn; the rest is counted."""
_PIECES = 200
_HUES = 8
_WIDE = 0.08
"""Share of the row from which a piece is wide enough for text."""


def plan_html(plan: ShardPlan) -> Markup:
    """Return the documents, the owners of all tokens, a strip per rank with its share of the work, and the balance."""
    total, balance = plan.num_tokens, plan.balance()
    work = sum(balance.pairs_by_rank)
    rows = [*_documents(plan), _owners(plan)]
    for rank in range(min(plan.cp, PLAN_RANKS)):
        local = spans(sorted(plan.positions(rank).tolist()))
        named = local if len(local) <= 3 else local[:2]
        text = ", ".join(f"{begin}–{end - 1}" for begin, end in named)
        text += f" and {len(local) - len(named)} more" if named is not local else ""
        pieces = _pieces(local, total) if len(local) <= _PIECES else _shares(plan.owners_T == rank)
        share = f"{text} · {balance.pairs_by_rank[rank] / work:.0%} of causal attention"
        rows.append(labelled(f"rank {rank}", pieces, total, f"rank {rank} holds tokens {text}", share))
    text = f" {plan.order}: {total} tokens over cp={plan.cp}, {total // plan.cp} a rank"
    head = tag("p", tag("strong", "ShardPlan"), text)
    inside = "inside documents " if plan.document_lengths else ""
    level = quiet(
        f"Causal attention {inside}on the slowest rank: {balance.max_over_mean:.2f} times the mean; where "
        f"a ring waits at every step: {balance.in_lock_step:.2f} times."
    )
    return framed(head, tag("div", rows, class_="strips"), not_drawn(plan.cp - PLAN_RANKS, "ranks"), level)


def _documents(plan: ShardPlan) -> list[list[Markup]]:
    lengths = plan.document_lengths
    if not 1 < len(lengths) <= _PIECES:
        return []
    pieces, begin = [], 0
    for number, length in enumerate(lengths):
        title = f"document {number}: tokens {begin} to {begin + length - 1}"
        pieces.append(Piece(length, "context" if number % 2 else "prompt", title, str(number)))
        begin += length
    text = f"{len(lengths)} documents, padding included"
    return [labelled("documents", pieces, plan.num_tokens, text, text)]


def _owners(plan: ShardPlan) -> list[Markup]:
    """Return the owner of each token, as far as single pieces can be distinguished."""
    owners = runs(plan.owners_T.tolist())
    label = f"the ranks that hold tokens 0 to {plan.num_tokens - 1}"
    if len(owners) <= _PIECES:
        pieces = [
            Piece(end - begin, f"owner r{rank % _HUES}", f"tokens {begin} to {end - 1}: rank {rank}", f"{rank}")
            for rank, begin, end in owners
        ]
        text = f"{len(owners)} pieces"
    else:
        pieces = [Piece(plan.num_tokens, "context", f"{len(owners)} pieces", text="…")]
        text = f"{len(owners)} pieces of {plan.num_tokens / len(owners):.3g} tokens: too short to draw"
    return labelled("all ranks", pieces, plan.num_tokens, label, text)


def _pieces(local: list[tuple[int, int]], total: int) -> list[Piece]:
    """Return spans at their places; those that are wide enough name their tokens."""
    pieces = []
    for begin, end in local:
        text = f"{begin}–{end - 1}" if end - begin >= _WIDE * total else ""
        pieces.append((begin, Piece(end - begin, "held", f"tokens {begin} to {end - 1}", text)))
    return at_places(pieces)


def _shares(local_T: Tensor) -> list[Piece]:
    """Return equal spans of the row, each shaded by the share of it that is local, in quarters."""
    edges = [cell * len(local_T) // _PIECES for cell in range(_PIECES + 1)]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        count = int(local_T[begin:end].sum())
        kind = f"held share{-(-4 * count // (end - begin))}" if count else ""
        pieces.append(Piece(end - begin, kind, f"{count} of tokens {begin} to {end - 1}"))
    return pieces


def traffic_html(traffic: Traffic) -> Markup:
    """Return the route, both sides rank by rank, and the rows sent from each rank to each."""
    pair, route = traffic.pair, traffic.route
    why = f" ({route.why})" if route.why else ""
    samples = f"{sum(route.samples)} samples of {traffic.tokens} tokens"
    text = f" {pair.source.label} → {pair.destination.label}: {route.path}{why}; {samples}"
    before, after = traffic.sides
    moving = [step for step in traffic.steps if step.between.any()]
    still = [step for step in traffic.steps if not step.between.any()]
    return framed(
        tag("p", tag("strong", "Traffic"), text),
        quiet(f"At the source, {pair.source.label}. A hue is a dp rank."),
        _side(traffic, before, pair.source),
        quiet(f"At the destination, {pair.destination.label}."),
        _side(traffic, after, pair.destination),
        not_drawn(pair.source.size - TRAFFIC_RANKS, "ranks"),
        [quiet(f"{step.direction}, {step.name}: nothing leaves its rank.") for step in still],
        [_table(step, pair.source.offset) for step in moving],
    )


def _side(traffic: Traffic, side: Side, grid: Grid) -> Markup:
    total = sum(traffic.route.samples) * traffic.tokens
    rows = []
    for number in range(min(side.size, TRAFFIC_RANKS)):
        rank = number + grid.offset
        place = grid.place(rank)
        tokens_t = side.share_of[number].tokens_t
        tokens_t = tokens_t[tokens_t != PADDING].sort().values
        text = traffic.tokens_label(side, number)
        pieces = _samples(tokens_t.tolist(), traffic.tokens, place[0])
        label = f"rank {rank} holds samples {text}"
        rows.append(labelled(f"rank {rank}", pieces, total, label, f"{coordinates_label(place)} · {text}"))
    return tag("div", rows, class_="strips")


def _samples(tokens: list[int], each: int, dp: int) -> list[Piece]:
    """Return spans of one sample at their places among all tokens."""
    stretches = runs([(token - number, token // each) for number, token in enumerate(tokens)])
    if len(stretches) > _PIECES:
        return [Piece(tokens[0], ""), Piece(tokens[-1] + 1 - tokens[0], "context", f"{len(stretches)} stretches")]
    pieces = []
    for (_, sample), begin, end in stretches:
        first, last = tokens[begin], tokens[end - 1]
        title = f"sample {sample}, tokens {first % each} to {last % each}"
        pieces.append((first, Piece(end - begin, f"owner r{dp % _HUES}", title, str(sample))))
    return at_places(pieces)


def _table(step: Step, offset: int) -> Markup:
    """Tabulate rows from each rank, a line, to each rank, a column; darker for more rows."""
    ranks = range(min(len(step.rows_RR), TRAFFIC_RANKS))
    between, most = step.between.tolist(), int(step.between.max())
    numbers = [tag("th", str(rank + offset), scope="col", class_="number") for rank in ranks]
    heads = [tag("th", "", scope="col"), *numbers]
    lines = []
    for rank in ranks:
        cells = [
            tag(
                "td",
                str(count or ""),
                class_=f"number held share{-(-4 * count // most)}" if count else "number",
                title=f"{count} rows from rank {rank + offset} to rank {other + offset}" if count else None,
            )
            for other, count in enumerate(between[rank][:TRAFFIC_RANKS])
        ]
        lines.append(tag("tr", tag("th", f"from {rank + offset}", scope="row"), cells))
    head = tag("p", f"{step.direction}, {step.name}: rows from rank to rank")
    return tag("div", head, scrolling_table(heads, lines, class_="traffic"))
