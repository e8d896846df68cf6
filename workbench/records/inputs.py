"""Fingerprints of what a model was given in a step: vocabulary ids, labels, positions, attention mask.

Of each argument of every call that records a gradient: how many numbers, how many of them count (labels of -100 and
below 0 do not, nor does False), a sum over values and one over rows. Sums do not depend on the order of rows, nor on
how they are dealt to calls and ranks; padding enters. A difference explains other numbers, and is none by itself.

Units: sums are of mixed 64-bit integers, modulo 2^64.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.sharding.data_parallel import is_shard

ROLES = {
    "ids": ("input_ids", "ids", "tokens", "idx", "x"),
    "labels": ("labels", "targets", "target", "y"),
    "positions": ("position_ids", "positions", "pos", "input_pos"),
    "mask": ("attention_mask", "attn_mask", "mask", "allowed", "attention_bias"),
}
"""Role of an argument -> its names; without one the first of integers is ids, the next positions, Booleans a mask."""
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, odd: Knuth's multiplicative hashing, as signed
Fingerprint = tuple[int, int, int, int, int]
"""Numbers, numbers that count, rows, sum over values, sum over rows."""


class Inputs:
    """Arguments of a model's calls since the last step; ``positions`` and ``ids`` are those of the last call."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.calls, self._names = 0, names
        self._seen: dict[str, list[tuple[int, int, Tensor]]] = {}
        self.positions: Tensor | None = None
        self.ids: Tensor | None = None

    def see(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Add a call; without a gradient it is none of training."""
        if not torch.is_grad_enabled():
            return
        self.calls += 1
        self.positions = self.ids = None
        positional = itertools.zip_longest(self._names[: len(arguments)], arguments)
        for role, value in _by_role([*positional, *named.items()]):
            self.positions = value if role == "positions" else self.positions
            self.ids = value if role == "ids" else self.ids
            rows = value.reshape(-1, value.shape[-1]) if value.dim() > 1 else value.reshape(1, -1)
            self._seen.setdefault(role, []).append((value.numel(), len(rows), _sums(rows)))

    def finish(self) -> dict[str, Any]:
        """Calls, and role -> `Fingerprint`, of this rank."""
        result: dict[str, Any] = {"calls": self.calls}
        for role, calls in self._seen.items():
            sums = [[int(part) for part in each.tolist()] for _, _, each in calls]
            counted, values, ordered = (sum(column) for column in zip(*sums, strict=True))
            result[role] = [sum(n for n, _, _ in calls), counted, sum(r for _, r, _ in calls), values, ordered]
        return result


def of_all_ranks(by_rank: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of what ranks that were dealt parts of the step have seen; sums over values as 16 digits."""
    total: dict[str, Any] = {"calls": 0}
    for rank in by_rank:
        for role, seen in rank.items():
            if role == "calls":
                total["calls"] += seen
                continue
            before = total.get(role, [0] * len(seen))
            total[role] = [one + other for one, other in zip(before, seen, strict=True)]
    return {
        role: seen if role == "calls" else [*seen[:3], *(f"{part % 2**64:016x}" for part in seen[3:])]
        for role, seen in total.items()
    }


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward, below wrappers that pass all of them on (DDP)."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, each in inspect.signature(model.forward).parameters.items() if each.kind in kinds)


def _by_role(arguments: Sequence[tuple[str | None, Any]]) -> Iterator[tuple[str, Tensor]]:
    taken: set[str] = set()
    by_name = {name: role for role, names in ROLES.items() for name in names}
    for name, value in arguments:
        if not isinstance(value, Tensor) or is_shard(value) or not value.numel():
            continue
        whole = not value.is_floating_point() and not value.is_complex()
        role = by_name.get(name or "")
        if role is None and whole and (name is None or value.dim() > 1):
            order = ("mask",) if value.dtype == torch.bool else ("ids", "positions") if name is None else ("ids",)
            role = next((each for each in order if each not in taken), None)
        if role is None or role in taken or not (whole or role == "mask"):
            continue
        taken.add(role)
        yield role, value if whole else value.detach() >= 0  # an additive mask is 0 where it allows


@torch.no_grad()
def _sums(rows: Tensor) -> Tensor:
    """Numbers that count, the sum of their mixed values, and that of mixed rows."""
    values = rows.long()
    counted = (rows if rows.dtype == torch.bool else values >= 0).sum()
    each = mixed(values)
    weights = mixed(torch.arange(1, values.shape[1] + 1, device=values.device)) | 1
    return torch.stack([counted, each.sum(), mixed((each * weights).sum(1)).sum()])


def mixed(values: Tensor) -> Tensor:
    """Integers whose bits depend on all bits of the given ones: two rounds of multiplying and shifting."""
    for _ in range(2):
        values = (values + 1) * _ODD
        values = values ^ (values >> 29)
    return values
