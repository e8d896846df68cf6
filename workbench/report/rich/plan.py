"""Shard plan as a row of tokens: the owner of each, then rank by rank, each at its place in the packed row."""

from __future__ import annotations

import itertools

from torch import Tensor

from workbench.report.markup import Markup, tag
from workbench.report.rich.strips import Piece, framed, runs, strip
from workbench.sharding.plan import ShardPlan, spans

AT_ALL = 64
"""Ranks that are drawn; the rest is counted."""
_PIECES = 200
_HUES = 8
_WIDE = 0.08
"""Share of the row from which a piece is wide enough for text."""


def as_html(plan: ShardPlan) -> Markup:
    """Return the documents, the owners of all tokens, a strip per rank with its share of the work, and the balance."""
    total, balance = plan.num_tokens, plan.balance()
    work = sum(balance.pairs_by_rank)
    rows = [*_documents(plan), _owners(plan)]
    for rank in range(min(plan.cp, AT_ALL)):
        local = spans(sorted(plan.positions(rank).tolist()))
        named = local if len(local) <= 3 else local[:2]
        text = ", ".join(f"{begin}–{end - 1}" for begin, end in named)
        text += f" and {len(local) - len(named)} more" if named is not local else ""
        pieces = _pieces(local, total) if len(local) <= _PIECES else _shares(plan.owners_T == rank)
        rows.append(
            [
                tag("span", f"rank {rank}"),
                strip(pieces, total, label=f"rank {rank} holds tokens {text}"),
                tag("span", f"{text} · {balance.pairs_by_rank[rank] / work:.0%} of causal attention", class_="quiet"),
            ]
        )
    more = tag("p", f"{plan.cp - AT_ALL} more ranks are not drawn.", class_="quiet") if plan.cp > AT_ALL else None
    head = tag(
        "p", tag("strong", "ShardPlan"), f" {plan.order}: {total} tokens over cp={plan.cp}, {total // plan.cp} a rank"
    )
    inside = "inside documents " if plan.document_lengths else ""
    level = tag(
        "p",
        f"Causal attention {inside}on the slowest rank: {balance.max_over_mean:.2f} times the mean; where "
        f"a ring waits at every step: {balance.in_lock_step:.2f} times.",
        class_="quiet",
    )
    return framed(head, tag("div", rows, class_="strips"), more, level)


def _documents(plan: ShardPlan) -> list[list[Markup]]:
    lengths = plan.document_lengths
    if not 1 < len(lengths) <= _PIECES:
        return []
    pieces, begin = [], 0
    for number, length in enumerate(lengths):
        pieces.append(
            Piece(
                length,
                "context" if number % 2 else "prompt",
                f"document {number}: tokens {begin} to {begin + length - 1}",
                text=str(number),
            )
        )
        begin += length
    text = f"{len(lengths)} documents, padding included"
    return [[tag("span", "documents"), strip(pieces, plan.num_tokens, label=text), tag("span", text, class_="quiet")]]


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
    return [tag("span", "all ranks"), strip(pieces, plan.num_tokens, label=label), tag("span", text, class_="quiet")]


def _pieces(local: list[tuple[int, int]], total: int) -> list[Piece]:
    """Return spans at their places; those that are wide enough name their tokens."""
    pieces, at = [], 0
    for begin, end in local:
        if begin > at:
            pieces.append(Piece(begin - at, ""))
        text = f"{begin}–{end - 1}" if end - begin >= _WIDE * total else ""
        pieces.append(Piece(end - begin, "held", f"tokens {begin} to {end - 1}", text))
        at = end
    return pieces


def _shares(local_T: Tensor) -> list[Piece]:
    """Return equal spans of the row, each shaded by the share of it that is local, in quarters."""
    edges = [cell * len(local_T) // _PIECES for cell in range(_PIECES + 1)]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        count = int(local_T[begin:end].sum())
        kind = f"held share{-(-4 * count // (end - begin))}" if count else ""
        pieces.append(Piece(end - begin, kind, f"{count} of tokens {begin} to {end - 1}"))
    return pieces
