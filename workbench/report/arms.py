"""Verdicts on the curves of online arms that share seeds, in sentences that say what they could have seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.power import LEVEL, compare_arms, least_seeds
from workbench.compare.seeds import seeds_of
from workbench.report.markup import Markup, join, tag
from workbench.report.online import RIGHT, online_groups

CAPTION = (
    "Right completions, mean of the last quarter of the steps, paired by seed: runs of one seed share their problems "
    f"and the random numbers of their tokens. Flips of signs accuse arms that differ in nothing in {LEVEL:.0%} of "
    f"cases or fewer, which takes {least_seeds()} shared seeds."
)
ONE_ARM = "There is one arm here, so its curve is compared with no other: a second arm with the same seeds would be."


def arm_verdicts(comparison: Comparison) -> Markup | None:
    """Return a sentence for each online arm against the first; None if all runs are compared by their gradients."""
    sentences = arm_sentences(comparison)
    return join([tag("p", CAPTION), [tag("p", sentence) for sentence in sentences]]) if sentences else None


def arm_sentences(comparison: Comparison, key: str = RIGHT) -> list[str]:
    """Return the verdicts as text, in the order of the arms; one arm has none, and the sentence says so.

    The arms are the lines of the figure, but for runs that have a baseline: gradients judge those.

    Args:
        comparison: with online runs.
        key: metric of the curves.
    """
    groups = online_groups(comparison)
    arms = [(name, arm) for name, arm in groups.items() if not any(c.against for c in arm)]
    if not arms or (len(arms) == 1 and len(groups) > 1):
        return []
    (base, first), *others = arms
    return [f"{name} against {base}: {_verdict(first, arm, key)}." for name, arm in others] or [ONE_ARM]


def _verdict(first: Sequence[Configuration], second: Sequence[Configuration], key: str) -> str:
    curves = [{seeds_of(c): _curve(c, key) for c in arm} for arm in (first, second)]
    shared = [seed for seed in curves[0] if seed in curves[1]]
    whole = [seed for seed in shared if all(_whole(arm[seed]) for arm in curves)]
    if not whole:
        return "not compared: no seed has a finite curve in both arms"
    steps = sorted(set.intersection(*({*arm[seed]} for arm in curves for seed in whole)))
    if not steps:
        return "not compared: their runs have no step in common"
    left_out = f"; {len(shared) - len(whole)} seeds without a finite curve are left out" * (len(whole) < len(shared))
    return f"{compare_arms(*([[arm[seed][step] for step in steps] for seed in whole] for arm in curves))}{left_out}"


def _curve(c: Configuration, key: str) -> Mapping[int, float]:
    return {record["step"]: float(record[key]) for record in c.steps if record.get(key) is not None}


def _whole(curve: Mapping[int, float]) -> bool:
    return bool(curve) and all(map(math.isfinite, curve.values()))
