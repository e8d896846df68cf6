"""A shard plan as a row of tokens for each rank: what it holds, at its place in the whole row."""

from __future__ import annotations

from workbench.report.markup import Markup, tag
from workbench.report.rich.strips import Piece, framed, strip
from workbench.sharding.plan import ShardPlan, spans

AT_ALL = 64
"""Ranks that are drawn; the rest is counted."""
_PIECES = 200


def as_html(plan: ShardPlan) -> Markup:
    """One strip a rank, and its share of the work of causal attention over the row."""
    total = plan.num_tokens
    whole = total * (total + 1) / 2
    rows = []
    for rank in range(min(plan.cp, AT_ALL)):
        held = spans(sorted(plan.positions(rank).tolist()))
        work = sum((begin + end + 1) * (end - begin) / 2 for begin, end in held) / whole
        said = ", ".join(f"{begin}–{end - 1}" for begin, end in held[:4])
        said += f" and {len(held) - 4} more" if len(held) > 4 else ""
        rows.append([tag("span", f"rank {rank}"), strip(_pieces(held), total, label=f"rank {rank} holds tokens {said}"),
                     tag("span", f"{said} · {work:.0%} of causal attention", class_="quiet")])
    more = tag("p", f"{plan.cp - AT_ALL} more ranks are not drawn.", class_="quiet") if plan.cp > AT_ALL else None
    head = tag("p", tag("strong", "ShardPlan"), f" {plan.order}: {total} tokens over cp={plan.cp}, "
               f"{total // plan.cp} a rank")
    return framed(head, tag("div", rows, class_="strips"), more)


def _pieces(held: list[tuple[int, int]]) -> list[Piece]:
    pieces, at = [], 0
    for begin, end in held[:_PIECES]:
        if begin > at:
            pieces.append(Piece(begin - at, ""))
        pieces.append(Piece(end - begin, "held", f"tokens {begin} to {end - 1}", text=f"{begin}–{end - 1}"))
        at = end
    return pieces
