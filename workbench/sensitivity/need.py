"""A fact that a fault needs to change a gradient; all of them are in `layout_needs`, `data_needs` and `loss_needs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.sensitivity.facts import Facts

Test = Callable[[Facts], bool]


@dataclass(frozen=True)
class Need:
    """A fact without which a fault has no effect on a gradient.

    Attributes:
        missing: the reason for which a fault is hidden, if the fact does not hold.
        holds: the fact.
        change: name of the change in `workbench.sensitivity.changes` that makes it hold; "" if there is none.
        observed: True if the fact is of the clean run, so that it is not known before that run.
    """

    missing: str
    holds: Test
    change: str = ""
    observed: bool = False
