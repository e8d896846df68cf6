"""The general path of a bridge: every rank gets the rows that it holds on the other side, from whoever has them.

With X the rows by token number, and `Side` saying who holds what, one formulation covers every pair of layouts:

    forward    Y_d[j] = X[token j of d]                 each distinct token travels once to a rank, from one replica
    backward   dX[i]  = sum over destination shares c, over rows j of c that are token i, of G_c[j]

A share counts once however many replicas it has, and each replica of a source gets the whole sum. What must be summed
twice elsewhere (a gradient that is zero but on one cp rank, then batches of several dp ranks) is one exchange here.

Letters: t rows of a rank | R ranks | n rows that travel | D everything behind the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.errors import ShapeError, ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding import flight
from workbench.sharding.bridge.replicas import hold_replicas
from workbench.sharding.bridge.sides import Share, Side
from workbench.sharding.collectives import exchange_rows
from workbench.sharding.mesh import Axis


@dataclass(frozen=True, eq=False)
class Crossing:
    """From one side to the other, the same object on every rank.

    Attributes:
        source: who holds what before.
        destination: who holds what afterwards.
        share_of_token: [N] number of the source share that holds each token; -1 for none.
        row_of_token: [N] where in it.
        providers_aR: [a, R] the rank of each source share that each destination rank gets its rows from.
        answerers_cR: [c, R] the rank of each destination share that each source rank gets its gradient from.
    """

    source: Side
    destination: Side
    share_of_token: Tensor
    row_of_token: Tensor
    providers_aR: Tensor
    answerers_cR: Tensor
    _tables: dict[tuple[int, torch.device], _Table] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, source: Side, destination: Side) -> Crossing:
        """Find out who sends what to whom.

        Raises:
            ShardingError: sides of other sizes; a token that two shares of the source hold; one that the destination
                wants and nobody holds, or that the source holds and nobody answers for.
        """
        if source.size != destination.size:
            raise ShardingError(
                "bridge between two sides",
                found=f"{source.size} and {destination.size} ranks",
                rule="both modules lie over the same ranks",
                fix="give idle ranks empty shares",
            )
        share_of_token, row_of_token = _owners(source)
        _refuse_lost(share_of_token, destination)
        size = len(source.shares)
        wanted = [_counted(share_of_token[_wants(share)], size) > 0 for share in destination.shares]
        asked = [(_counted(share_of_token[_asks(share)], size) > 0).tolist() for share in destination.shares]
        return cls(
            source,
            destination,
            share_of_token,
            row_of_token,
            _serving(source.shares, destination, torch.stack(wanted, 1).tolist()),
            _serving(destination.shares, source, asked),
        )

    def __repr__(self) -> str:
        """Say how much travels."""
        there, back = self.forward_RR, self.backward_RR
        return (
            f"Crossing({self.source.size} ranks, {int((self.share_of_token >= 0).sum())} tokens; between ranks "
            f"{int(there.sum() - there.trace())} rows forward, {int(back.sum() - back.trace())} backward)"
        )

    @cached_property
    def forward_RR(self) -> Tensor:
        """[R, R] rows from rank to rank, forward; on the diagonal those that stay."""
        return torch.stack([_counted(ranks, self.source.size) for _, ranks in self._provided], 1)

    @cached_property
    def backward_RR(self) -> Tensor:
        """[R, R] rows from rank to rank, backward; on the diagonal those that stay."""
        return torch.stack([_counted(ranks, self.source.size) for _, ranks in self._answered], 1)

    def cross(self, values_tD: Tensor, axis: Axis, *, checked: bool = False) -> Tensor:
        """This rank's rows on the other side. Collective over all ranks, and so is its backward.

        Every rank uses what it gets in its loss, also where that has no rows; or the others wait in backward.

        Args:
            values_tD: [t, ...] what this rank holds at the source.
            axis: all ranks of both sides.
            checked: see that replicas hold the same, and bring the same gradient; costs a small collective each way.

        Shapes:   [t, ...] -> [t', ...]; zeros where the destination's row is padding.
        Layout:   of the source -> of the destination.
        Backward: the sum over distinct consumers (see above), in rank order, in float32 or better where there are
                  several; whole and equal on every replica of the source. Zero for padding.
        Raises:   ShardingError: an axis of another size; with ``checked``, replicas that differ, or a gradient where
                  none should be.
                  ShapeError: not the rows that this rank holds, or not floating point.
        """
        share = self.source.share_of[axis.rank] if axis.size == self.source.size else None
        if share is None:
            raise ShardingError(
                f"bridge between {self.source.size} ranks",
                found=f"an axis of {axis.size}",
                rule="the axis has every rank of both sides",
                fix="give the axis of all ranks",
            )
        if not values_tD.is_floating_point() or values_tD.dim() < 1 or len(values_tD) != len(share.tokens_t):
            raise ShapeError(
                "cross a bridge",
                found=f"{tuple(values_tD.shape)} {values_tD.dtype} on rank {axis.rank}",
                rule=f"[{len(share.tokens_t)}, ...] of floating point, a row for each token of its share",
                fix="bring what the source side says of this rank; [0, ...] where it says nothing",
            )
        if checked:
            hold_replicas(values_tD.detach(), self.source, axis, what="values at the source")
        # A rank without anything to differentiate takes part in backward all the same.
        anchor = values_tD.new_zeros((), requires_grad=torch.is_grad_enabled())
        return _Cross.apply(values_tD, anchor, self, axis, checked)

    @cached_property
    def _provided(self) -> list[tuple[Tensor, Tensor]]:
        """For each rank, the distinct tokens that it gets, and from whom."""
        wanted = [_wants(share) for share in self.destination.share_of]
        return [(tokens, self.providers_aR[self.share_of_token[tokens], rank]) for rank, tokens in enumerate(wanted)]

    @cached_property
    def _answered(self) -> list[tuple[Tensor, Tensor]]:
        """For each rank, the tokens whose gradient it gets, once for each consumer, and from whom; in rank order."""
        found = []
        asked = [_asks(share) for share in self.destination.shares]
        for rank, number in enumerate(self.source.number_of):
            tokens = [of_share[self.share_of_token[of_share] == number] for of_share in asked]
            ranks = torch.repeat_interleave(self.answerers_cR[:, rank], torch.tensor([len(one) for one in tokens]))
            order = ranks.argsort(stable=True)
            found.append((torch.cat(tokens)[order], ranks[order]))
        return found

    def _table(self, rank: int, device: torch.device) -> _Table:
        if (rank, device) not in self._tables:
            self._tables[rank, device] = _Table.make(self, rank, device)
        return self._tables[rank, device]


@dataclass(frozen=True, eq=False)
class _Sum:
    """Rows added up by place, in order, without atomics: each round has every place at most once."""

    size: int
    rounds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def make(cls, places_n: Tensor, size: int, device: torch.device) -> _Sum:
        order = places_n.argsort(stable=True)
        arranged = places_n[order]
        begins = torch.searchsorted(arranged, arranged)
        turn = torch.empty_like(places_n)
        turn[order] = torch.arange(len(places_n)) - begins
        found = [torch.nonzero(turn == number).squeeze(1) for number in range(int(turn.max()) + 1 if len(turn) else 0)]
        return cls(size, tuple((which.to(device), places_n[which].to(device)) for which in found))

    def of(self, rows: Tensor) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32) if len(self.rounds) > 1 else rows.dtype
        total = rows.new_zeros(self.size, *rows.shape[1:], dtype=wide)
        for number, (which, where) in enumerate(self.rounds):
            mine = rows.index_select(0, which).to(wide)
            total.index_copy_(0, where, total.index_select(0, where) + mine if number else mine)
        return total.to(rows.dtype)


@dataclass(frozen=True, eq=False)
class _Table:
    """What one rank does: rows that it sends, where what comes goes, and the same for gradients."""

    sent: Tensor
    came: Tensor
    filled: Tensor
    size: int
    forward_RR: Tensor
    distinct: _Sum
    returned: Tensor
    summed: _Sum
    answered: Tensor
    backward_RR: Tensor

    @classmethod
    def make(cls, crossing: Crossing, rank: int, device: torch.device) -> _Table:
        share, consumer = crossing.source.share_of[rank], crossing.destination.share_of[rank]
        sent = torch.cat([tokens[source == rank] for tokens, source in crossing._provided])
        tokens, source = crossing._provided[rank]
        arrival = torch.argsort(source.argsort(stable=True))  # where each distinct token lies in what came
        filled = torch.nonzero(consumer.tokens_t != PADDING).squeeze(1)
        came = arrival[torch.searchsorted(tokens, consumer.tokens_t[filled])]

        asked = _asks(consumer)
        answered = torch.nonzero(consumer.answered_t).squeeze(1)
        distinct = torch.searchsorted(asked, consumer.tokens_t[answered])
        returned = [torch.searchsorted(asked, wanted[source == rank]) for wanted, source in crossing._answered]
        return cls(
            sent=crossing.row_of_token[sent].to(device),
            came=came.to(device),
            filled=filled.to(device),
            size=len(consumer.tokens_t),
            forward_RR=crossing.forward_RR,
            distinct=_Sum.make(distinct, len(asked), device),
            answered=answered.to(device),
            returned=torch.cat(returned).to(device),
            summed=_Sum.make(crossing.row_of_token[crossing._answered[rank][0]], len(share.tokens_t), device),
            backward_RR=crossing.backward_RR,
        )


class _Cross(Function):
    @staticmethod
    def forward(ctx: Any, values_tD: Tensor, anchor: Tensor, crossing: Crossing, axis: Axis, checked: bool) -> Tensor:
        ctx.crossing, ctx.axis, ctx.checked, ctx.caller = crossing, axis, checked, flight.caller()
        table = crossing._table(axis.rank, values_tD.device)
        rows = exchange_rows(values_tD.index_select(0, table.sent), table.forward_RR, axis, caller=ctx.caller)
        out = values_tD.new_zeros(table.size, *values_tD.shape[1:])
        return out.index_copy_(0, table.filled, rows.index_select(0, table.came))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        crossing, axis = ctx.crossing, ctx.axis
        if ctx.checked:
            hold_replicas(gradient, crossing.destination, axis, what="gradients at the destination")
        table = crossing._table(axis.rank, gradient.device)
        own = table.distinct.of(gradient.index_select(0, table.answered))
        rows = exchange_rows(own.index_select(0, table.returned), table.backward_RR, axis, caller=ctx.caller)
        return table.summed.of(rows), None, None, None, None


def _wants(share: Share) -> Tensor:
    """Distinct tokens that a share gets, ascending."""
    return torch.unique(share.tokens_t[share.tokens_t != PADDING])


def _asks(share: Share) -> Tensor:
    """Distinct tokens that a share answers for, ascending."""
    return torch.unique(share.tokens_t[share.answered_t])


def _counted(numbers: Tensor, size: int) -> Tensor:
    return torch.bincount(numbers, minlength=size)


def _owners(source: Side) -> tuple[Tensor, Tensor]:
    """[N] each: the share that holds a token, and the row."""
    held = torch.cat([share.tokens_t[share.tokens_t != PADDING] for share in source.shares])
    size = int(held.max()) + 1 if len(held) else 0
    share_of_token, row_of_token = torch.full((size,), -1), torch.full((size,), -1)
    for number, share in enumerate(source.shares):
        rows = torch.nonzero(share.tokens_t != PADDING).squeeze(1)
        tokens = share.tokens_t[rows]
        twice = tokens[share_of_token[tokens] >= 0].tolist()
        ordered = tokens.sort().values
        twice += ordered[1:][ordered[1:] == ordered[:-1]].tolist()
        if twice:
            raise ShardingError(
                f"source of a bridge: token {twice[0]}",
                found="two rows that are it, on ranks that are not replicas or on one rank",
                rule="a token is in one row of one share of the source",
                fix="make the ranks that hold it replicas of one share",
            )
        share_of_token[tokens], row_of_token[tokens] = number, rows
    return share_of_token, row_of_token


def _refuse_lost(share_of_token: Tensor, destination: Side) -> None:
    """Refuse tokens that come from nowhere, or go nowhere."""
    size, answered = len(share_of_token), torch.zeros(len(share_of_token), dtype=torch.bool)
    for share in destination.shares:
        tokens = _wants(share)
        missing = tokens[(tokens >= size) | (tokens < 0)].tolist() or tokens[share_of_token[tokens] < 0].tolist()
        if missing:
            raise ShardingError(
                f"destination of a bridge: {_listed(missing)} on ranks {share.ranks}",
                found="nobody who holds it at the source",
                rule="what the destination gets, the source has",
                fix="mark rows without a token PADDING",
            )
        answered[_asks(share)] = True
    if lost := torch.nonzero((share_of_token >= 0) & ~answered).squeeze(1).tolist():
        raise ShardingError(
            f"source of a bridge: {_listed(lost)}",
            found="nobody who answers for it",
            rule="nothing is dropped on the way: every token of the source has a gradient",
            fix="mark rows of the source that nobody needs PADDING",
        )


def _listed(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:6])) + (" ..." if len(tokens) > 6 else "")
    return f"token {shown}" if len(tokens) == 1 else f"{len(tokens)} tokens ({shown})"


def _serving(givers: Sequence[Share], takers: Side, meets: Sequence[Sequence[bool]]) -> Tensor:
    """[givers, R] which replica of a giver serves each rank of its takers: the rank itself, or one after another."""
    serving = torch.zeros(len(givers), takers.size, dtype=torch.int64)
    for number, (giver, met) in enumerate(zip(givers, meets, strict=True)):
        others = 0
        for rank, taker in enumerate(takers.number_of):
            if rank in giver.ranks:
                serving[number, rank] = rank
            elif met[taker]:
                serving[number, rank] = giver.ranks[others % len(giver.ranks)]
                others += 1
    return serving
