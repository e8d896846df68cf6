"""General path of a bridge: every rank receives its destination rows from the ranks that hold them at the source.

With X the rows by token number and `Side` the tokens of each rank, one formulation covers every pair of layouts:

    forward    Y_d[j] = X[token j of d]                 each distinct token travels once to a rank, from one replica
    backward   dX[i]  = sum over destination shares c, over rows j of c that are token i, of G_c[j]

A share counts once however many replicas it has, and each replica of a source gets the whole sum. All code assumes that
replicas are equal; a gradient that is still partial over tp, or dropout that differs by rank, would only show as a
wrong encoder. `check_replicas` compares a projection of each replica's values.

Letters: t rows of a rank | R ranks | n rows sent | D all dimensions after the rows.
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
from workbench.sharding.bridge.sides import Share, Side
from workbench.sharding.collectives import exchange_rows, gather_equal
from workbench.sharding.mesh import Axis


@dataclass(frozen=True, eq=False)
class Crossing:
    """Routing from one side to the other, the same object on every rank.

    Attributes:
        share_of_token: [N] index of the source share that holds each token; -1 for none.
        row_of_token: [N] its row in that share.
        providers_aR: [a, R] the rank of each source share that sends rows to each destination rank.
        gradient_providers_cR: [c, R] the rank of each destination share that sends gradients to each source rank.
    """

    source: Side
    destination: Side
    share_of_token: Tensor
    row_of_token: Tensor
    providers_aR: Tensor
    gradient_providers_cR: Tensor
    _tables: dict[tuple[int, torch.device], _Table] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, source: Side, destination: Side) -> Crossing:
        """Compute the routing.

        Raises:
            ShardingError: sides of different sizes; a token in two source shares; a destination token that no source
                share holds, or a source token without a gradient at the destination.
        """
        if source.size != destination.size:
            raise ShardingError(
                "bridge between two sides",
                found=f"{source.size} and {destination.size} ranks",
                rule="both modules span the same ranks",
                fix="give idle ranks empty shares",
            )
        share_of_token, row_of_token = _owners(source)
        _refuse_lost(share_of_token, destination)
        numbers = torch.arange(len(source.shares))
        forth = [torch.isin(numbers, share_of_token[_received_tokens(share)]) for share in destination.shares]
        back = [torch.isin(numbers, share_of_token[_answered_tokens(share)]) for share in destination.shares]
        return cls(
            source,
            destination,
            share_of_token,
            row_of_token,
            _senders(source.shares, destination, torch.stack(forth, 1).tolist()),
            _senders(destination.shares, source, torch.stack(back).tolist()),
        )

    def __repr__(self) -> str:
        forth, back = self.forward_RR, self.backward_RR
        return (
            f"Crossing({self.source.size} ranks, {int((self.share_of_token >= 0).sum())} tokens; between ranks "
            f"{int(forth.sum() - forth.trace())} rows forward, {int(back.sum() - back.trace())} backward)"
        )

    @cached_property
    def forward_RR(self) -> Tensor:
        """[R, R] rows from rank to rank, forward; local rows are on the diagonal."""
        return torch.stack([torch.bincount(ranks, minlength=self.source.size) for _, ranks in self._provided], 1)

    @cached_property
    def backward_RR(self) -> Tensor:
        """[R, R] rows from rank to rank, backward; local rows are on the diagonal."""
        return torch.stack([torch.bincount(ranks, minlength=self.source.size) for _, ranks in self._answered], 1)

    def cross(self, values_tD: Tensor, axis: Axis, *, checked: bool = False) -> Tensor:
        """Return this rank's rows at the destination. Collective over all ranks, and so is its backward.

        Every rank must use the result in its loss, also if it has no rows; otherwise the other ranks hang in backward.
        ``checked``: check that replicas hold equal values and gradients, in a small collective each way.

        Shapes:   [t, ...] -> [t', ...]; zeros for padding rows of the destination.
        Layout:   of the source -> of the destination.
        Backward: the sum over distinct consumers (see above), in rank order, in float32 or better if there are
                  several; complete and equal on every replica of the source. Zero for padding.
        Raises:   ShardingError: an axis of another size; with ``checked``, replicas that differ, or a nonzero gradient
                  where it must be zero.
                  ShapeError: not this rank's rows, or not floating point.
        """
        share = self.source.share_of[axis.rank] if axis.size == self.source.size else None
        if share is None:
            raise ShardingError(
                f"bridge between {self.source.size} ranks",
                found=f"an axis of {axis.size}",
                rule="the axis has every rank of both sides",
                fix="pass the axis of all ranks",
            )
        if not values_tD.is_floating_point() or values_tD.dim() < 1 or len(values_tD) != len(share.tokens_t):
            raise ShapeError(
                "cross a bridge",
                found=f"{tuple(values_tD.shape)} {values_tD.dtype} on rank {axis.rank}",
                rule=f"[{len(share.tokens_t)}, ...] of floating point, a row for each token of its share",
                fix="pass the rows that the source side assigns to this rank; [0, ...] if there are none",
            )
        if checked:
            check_replicas(values_tD.detach(), self.source, axis, what="values at the source")
        # Backward is collective: a rank whose values need no gradient must enter it too.
        anchor = values_tD.new_zeros((), requires_grad=torch.is_grad_enabled())
        return _Cross.apply(values_tD, anchor, self, axis, checked)

    @cached_property
    def _provided(self) -> list[tuple[Tensor, Tensor]]:
        """For each rank, the distinct tokens that it receives, and their sender ranks."""
        received = [_received_tokens(share) for share in self.destination.share_of]
        return [(tokens, self.providers_aR[self.share_of_token[tokens], rank]) for rank, tokens in enumerate(received)]

    @cached_property
    def _answered(self) -> list[tuple[Tensor, Tensor]]:
        """For each rank, the tokens whose gradients it receives, once per consumer, and their sender ranks, sorted."""
        routes = []
        answered = [_answered_tokens(share) for share in self.destination.shares]
        for rank, number in enumerate(self.source.number_of):
            tokens = [of_share[self.share_of_token[of_share] == number] for of_share in answered]
            ranks = torch.repeat_interleave(
                self.gradient_providers_cR[:, rank], torch.tensor([len(one) for one in tokens])
            )
            order = ranks.argsort(stable=True)
            routes.append((torch.cat(tokens)[order], ranks[order]))
        return routes

    def _table(self, rank: int, device: torch.device) -> _Table:
        if (rank, device) not in self._tables:
            self._tables[rank, device] = _Table.make(self, rank, device)
        return self._tables[rank, device]


@dataclass(frozen=True, eq=False)
class _Sum:
    """Deterministic sum of rows by index, without atomics: each round has every index at most once."""

    size: int
    rounds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def make(cls, places_n: Tensor, size: int, device: torch.device) -> _Sum:
        order = places_n.argsort(stable=True)
        arranged = places_n[order]
        begins = torch.searchsorted(arranged, arranged)
        turn = torch.empty_like(places_n)
        turn[order] = torch.arange(len(places_n)) - begins
        rounds = [torch.nonzero(turn == number).squeeze(1) for number in range(int(turn.max()) + 1 if len(turn) else 0)]
        return cls(size, tuple((which.to(device), places_n[which].to(device)) for which in rounds))

    def of(self, rows: Tensor) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32) if len(self.rounds) > 1 else rows.dtype
        total = rows.new_zeros(self.size, *rows.shape[1:], dtype=wide)
        for number, (which, where) in enumerate(self.rounds):
            terms = rows.index_select(0, which).to(wide)
            total.index_copy_(0, where, total.index_select(0, where) + terms if number else terms)
        return total.to(rows.dtype)


@dataclass(frozen=True, eq=False)
class _Table:
    """Indices for one rank: rows to send, rows received and their targets, and the same for gradients."""

    sent: Tensor
    received: Tensor
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
        arrival = torch.argsort(source.argsort(stable=True))  # row of each distinct token among the received rows
        filled = torch.nonzero(consumer.tokens_t != PADDING).squeeze(1)
        received = arrival[torch.searchsorted(tokens, consumer.tokens_t[filled])]

        unique = _answered_tokens(consumer)
        answered = torch.nonzero(consumer.gradient_rows_t).squeeze(1)
        distinct = torch.searchsorted(unique, consumer.tokens_t[answered])
        returned = [torch.searchsorted(unique, routed[source == rank]) for routed, source in crossing._answered]
        return cls(
            sent=crossing.row_of_token[sent].to(device),
            received=received.to(device),
            filled=filled.to(device),
            size=len(consumer.tokens_t),
            forward_RR=crossing.forward_RR,
            distinct=_Sum.make(distinct, len(unique), device),
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
        return out.index_copy_(0, table.filled, rows.index_select(0, table.received))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        crossing, axis = ctx.crossing, ctx.axis
        if ctx.checked:
            check_replicas(gradient, crossing.destination, axis, what="gradients at the destination")
        table = crossing._table(axis.rank, gradient.device)
        own = table.distinct.of(gradient.index_select(0, table.answered))
        rows = exchange_rows(own.index_select(0, table.returned), table.backward_RR, axis, caller=ctx.caller)
        return table.summed.of(rows), None, None, None, None


def _received_tokens(share: Share) -> Tensor:
    """Distinct tokens that a share receives, ascending."""
    return torch.unique(share.tokens_t[share.tokens_t != PADDING])


def _answered_tokens(share: Share) -> Tensor:
    """Distinct tokens whose gradients a share sends back, ascending."""
    return torch.unique(share.tokens_t[share.gradient_rows_t])


def _owners(source: Side) -> tuple[Tensor, Tensor]:
    """[N] each: the share that holds a token, and its row."""
    all_tokens = torch.cat([share.tokens_t[share.tokens_t != PADDING] for share in source.shares])
    size = int(all_tokens.max()) + 1 if len(all_tokens) else 0
    share_of_token, row_of_token = torch.full((size,), -1), torch.full((size,), -1)
    for number, share in enumerate(source.shares):
        rows = torch.nonzero(share.tokens_t != PADDING).squeeze(1)
        tokens = share.tokens_t[rows]
        duplicates = tokens[share_of_token[tokens] >= 0].tolist()
        ordered = tokens.sort().values
        duplicates += ordered[1:][ordered[1:] == ordered[:-1]].tolist()
        if duplicates:
            raise ShardingError(
                f"source of a bridge: token {duplicates[0]}",
                found="two rows with this token, on ranks that are not replicas or on one rank",
                rule="a token is in one row of one share of the source",
                fix="make the ranks that hold it replicas of one share",
            )
        share_of_token[tokens], row_of_token[tokens] = number, rows
    return share_of_token, row_of_token


def _refuse_lost(share_of_token: Tensor, destination: Side) -> None:
    """Raise for tokens without a source or without a destination."""
    size, answered = len(share_of_token), torch.zeros(len(share_of_token), dtype=torch.bool)
    for share in destination.shares:
        tokens = _received_tokens(share)
        missing = tokens[(tokens >= size) | (tokens < 0)].tolist() or tokens[share_of_token[tokens] < 0].tolist()
        if missing:
            raise ShardingError(
                f"destination of a bridge: {_listed(missing)} on ranks {share.ranks}",
                found="no source rank holds it",
                rule="the source holds every token of the destination",
                fix="mark rows without a token PADDING",
            )
        answered[_answered_tokens(share)] = True
    if lost := torch.nonzero((share_of_token >= 0) & ~answered).squeeze(1).tolist():
        raise ShardingError(
            f"source of a bridge: {_listed(lost)}",
            found="no destination rank returns its gradient",
            rule="no token is dropped: every token of the source has a gradient",
            fix="mark unused rows of the source PADDING",
        )


def _listed(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:6])) + (" ..." if len(tokens) > 6 else "")
    return f"token {shown}" if len(tokens) == 1 else f"{len(tokens)} tokens ({shown})"


def _senders(sources: Sequence[Share], receivers: Side, overlaps: Sequence[Sequence[bool]]) -> Tensor:
    """[sources, R] the replica of a source share that sends to each receiving rank: itself, else round-robin."""
    senders = torch.zeros(len(sources), receivers.size, dtype=torch.int64)
    for number, (source, overlap) in enumerate(zip(sources, overlaps, strict=True)):
        remote = 0
        for rank, receiver in enumerate(receivers.number_of):
            if rank in source.ranks:
                senders[number, rank] = rank
            elif overlap[receiver]:
                senders[number, rank] = source.ranks[remote % len(source.ranks)]
                remote += 1
    return senders


MAX_RELATIVE_DIFFERENCE = 1e-3
"""Relative to the norm. Nondeterministic kernels differ by rounding; a partial sum differs by about 1."""


def check_replicas(values_tD: Tensor, side: Side, axis: Axis, *, what: str) -> None:
    """Raise, on every rank, if replicas differ, or rows whose gradient must be zero here are nonzero. Collective."""
    share = side.share_of[axis.rank]
    width = values_tD.shape[1:].numel()
    flat = values_tD.detach().reshape(len(values_tD), width).double()
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device).view_as(flat)
    stray = flat[((share.tokens_t != PADDING) & ~share.gradient_rows_t).to(flat.device)]
    kind = flat.new_tensor([width, torch.finfo(values_tD.dtype).eps])
    local = torch.cat([torch.stack([(flat * weights).sum(), flat.norm(), stray.norm()]), kind])
    gathered = gather_equal(local, axis).tolist()
    kinds = {(int(wide), eps) for *_, wide, eps in gathered}
    if len(kinds) > 1:
        raise ShardingError(
            f"bridge: {what}",
            found=f"rows of {' and '.join(str(wide) for wide, _ in sorted(kinds))} "
            f"numbers, in {len({eps for _, eps in kinds})} precision(s)",
            rule="all ranks pass rows of one width and dtype",
            fix="cast before the bridge",
        )
    if nonzero := [rank for rank, (_, norm, stray_norm, *_) in enumerate(gathered) if stray_norm > 0]:
        raise ShardingError(
            f"bridge: {what}",
            found=f"something other than zero on rank(s) {nonzero} in rows that are another cp rank's",
            rule="with an order, only the rank that owns a token uses it",
            fix="pass connect no order, and every rank's gradient is summed",
        )
    for one in side.shares:
        first, largest = gathered[one.ranks[0]][0], max(gathered[rank][1] for rank in one.ranks)
        if differ := [
            rank for rank in one.ranks if not abs(gathered[rank][0] - first) <= MAX_RELATIVE_DIFFERENCE * largest
        ]:
            raise ShardingError(
                f"bridge: {what}",
                found=f"rank(s) {differ} differ from rank {one.ranks[0]} by more than "
                f"{MAX_RELATIVE_DIFFERENCE:g} of the norm",
                rule=f"ranks {', '.join(map(str, one.ranks))} hold equal values",
                fix="complete sums over tp before the bridge: the gradient at the "
                "input of the destination, the output of the source",
            )
