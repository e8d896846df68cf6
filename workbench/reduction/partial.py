"""Scalars that carry the mesh axes over which they are still partial.

A sum over this rank's tokens is a *part* of a number. It looks like a number, logs like one, and is wrong by a
factor that depends on the layout. Here it raises if it is read before it is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor

from workbench.errors import UnreducedError
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Mesh


@dataclass(frozen=True, eq=False)
class Scalar:
    """A scalar that is still to be summed over some mesh axes.

    Attributes:
        value: this rank's part, 0-dimensional; may carry a gradient.
        partial_over: axes over which the parts sum to the number; empty if it is whole.

    Example:
        >>> import torch
        >>> float(Scalar(torch.tensor(2.0), frozenset()))
        2.0
    """

    value: Tensor
    partial_over: frozenset[str]

    def complete(self, mesh: Mesh) -> Scalar:
        """Sum over the axes that are missing. Collective over them; leaves autograd.

        Backward: none. A rank back-propagates its own part, before this.
        """
        value = self.value.detach()
        for axis in sorted(self.partial_over):
            value = all_sum(value, mesh[axis])
        return Scalar(value, frozenset())

    def detach(self) -> Scalar:
        """Return it without its graph, which is freed with the last tensor of it."""
        return replace(self, value=self.value.detach())

    def __add__(self, other: Scalar) -> Scalar:
        if not isinstance(other, Scalar) or other.partial_over != self.partial_over:
            self._refuse(f"added to {other!r}")
        return Scalar(self.value + other.value, self.partial_over)

    def __float__(self) -> float:
        if self.partial_over:
            self._refuse("read as a number")
        return float(self.value)

    def __bool__(self) -> NoReturn:
        self._refuse("used as a truth value")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compared")

    def __lt__(self, other: object) -> NoReturn:
        self._refuse("compared")

    __gt__ = __le__ = __ge__ = __lt__
    __hash__ = None  # type: ignore[assignment]

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        if self.partial_over:
            return f"Scalar(partial over {', '.join(sorted(self.partial_over))})"
        return f"Scalar({float(self.value):.6g})"

    def _refuse(self, use: str) -> NoReturn:
        axes = ", ".join(sorted(self.partial_over)) or "no axis"
        raise UnreducedError(
            f"a scalar that is partial over {axes} was {use}",
            rule="only whole scalars are numbers, and comparing needs float() of both",
            fix="call .complete(mesh) first (on every rank)",
        )
