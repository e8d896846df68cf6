"""Minimum and maximum are reported under each other's name."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault

_OTHER = {"min": "max", "max": "min"}


def _broken(finish_metrics: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    def finish_and_swap(*args: object) -> dict[str, float]:
        found = finish_metrics(*args)
        return {key: found[_swapped(key)] for key in found}

    return finish_and_swap


def _swapped(key: str) -> str:
    group, _, statistic = key.rpartition("/")
    return f"{group}/{_OTHER.get(statistic, statistic)}"


FAULT = Fault(
    family="D",
    what="the reducer of the minimum is given to the key of the maximum, and the other way round",
    origin="PrimeIntellect-ai/prime-rl#816",
    signature="gradient, loss and all other metrics right; every minimum is its maximum and above its mean",
    seam="finish_metrics",
    broken=_broken,
    detected_by="tests/faults/test_unseen_at_first.py::test_swapped_extremes_are_each_other",
    changes_gradient=False,
)
