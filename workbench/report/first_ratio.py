"""The ratio at step 0 of online runs: exactly 1, or the differences between trainer and old pass that can move it.

Before the first update the policy has the weights that sampled. Where old log-probabilities come from the trainer's
own pass, everything is shared, and the ratio of every token is exactly 1. Where they come from the sampler, another
program with settings of its own, the page names each difference, and what it did where two configurations differ in it
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.compare.comparison import Comparison, Configuration, flatten
from workbench.report.markup import Markup, breakable, join, table, tag
from workbench.report.numbers import NONE, near_one, significant

RATIO = "ratio/policy_old"
WHAT = (
    "Probability of each trained token under the policy before the first update, over its old probability: the "
    "smallest, the largest and the mean over tokens. It is exactly 1 where the old pass has the weights and the "
    "arithmetic of the trainer. Elsewhere the differences between the two are listed; the last column has what one of "
    "them did, measured by the configurations that differ in nothing else. Distance: the largest |log ratio|, nats."
)
ARITHMETIC = (
    "precision",
    "policy.temperature",
    "policy.support",
    "policy.fp32_head",
    "policy.logprobs",
    "policy.fused_loss",
    "online.temperature",
    "online.top_k",
    "online.top_p",
    "online.min_p",
    "online.truncation_order",
    "online.sampler_logprobs",
    "online.sampler_precision",
    "online.old_logprobs",
    "sync.cast",
    "loss.old_policy",
    "layout.kernel",
    "faults",
)
"""Settings that can move the ratio at step 0, besides those of `mixed_precision`, `kernels` and `reproducible`."""
_GROUPS = ("mixed_precision.", "kernels.", "reproducible.")


@dataclass(frozen=True)
class FirstRatio:
    """The ratios of the trained tokens of a run at step 0.

    Attributes:
        smallest, largest, mean: over trained tokens.
        shared: True if the old pass has the weights and the arithmetic of the trainer, by the settings.
        differences: of the old pass, by the settings; empty where shared.
    """

    smallest: float
    largest: float
    mean: float
    shared: bool
    differences: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """True if the ratio of every token is exactly 1."""
        return self.smallest == self.largest == 1.0

    @property
    def distance(self) -> float:
        """Largest |log ratio|, nats."""
        ratios = (self.smallest, self.largest)
        return max(abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf for ratio in ratios)


def first_ratio(c: Configuration) -> FirstRatio | None:
    """Return the ratio of an online run at step 0; None for other runs, and where it was not recorded."""
    online = c.settings.get("online") or {}
    step = next((step for step in c.steps if step.get("step") == 0), {})
    numbers = [step.get(f"{RATIO}/{name}") for name in ("min", "max", "mean")]
    if not online.get("task") or not all(isinstance(number, int | float) for number in numbers):
        return None
    smallest, largest, mean = (float(number) for number in numbers if number is not None)
    differences = tuple(_differences(c.settings))
    return FirstRatio(smallest, largest, mean, not differences, differences)


def _differences(settings: Mapping[str, Any]) -> list[str]:
    """Differences of the old pass of an online run from the trainer, by the settings."""
    online, policy = settings["online"], settings.get("policy") or {}
    faults = [f"planted: {fault}" for fault in settings.get("faults") or ()]
    loss, sync = settings.get("loss") or {}, settings.get("sync") or {}
    # all weights are those of the start at step 0, so behaviour is the trainer's own pass
    if online.get("old_logprobs", "trainer") in ("trainer", "behaviour") or loss.get("old_policy") == "current":
        return faults
    found = ["another program: a stock decoder with a KV cache and padded rows", *faults]
    run, sampler = settings.get("precision"), online.get("sampler_precision")
    if sampler and sampler != run:
        found.append(f"precision: {sampler} in the sampler, {run} in the trainer")
    if sync.get("cast"):
        found.append(f"weights: rounded to {sync['cast']} on their way to the sampler")
    if policy.get("fp32_head"):
        found.append("head: logits in float32 in the trainer alone")
    trained_at, sampled_at = policy.get("temperature"), online.get("temperature", 1.0)
    if trained_at and trained_at != sampled_at:
        found.append(f"temperature: {sampled_at:g} in the sampler, {trained_at:g} in the trainer")
    truncates = online.get("top_k") is not None or online.get("top_p", 1) < 1 or online.get("min_p", 0) > 0
    if truncates and policy.get("support", "whole") == "whole":
        found.append("truncated support: of the sampler alone, converted by the recorded mass")
    return found


def effects(comparison: Comparison, name: str) -> list[tuple[str, str, float]]:
    """Return, of the runs that differ from a run in one setting of arithmetic alone: setting, name and distance."""
    found = []
    flat = {c.name: flatten(c.settings) for c in comparison.configurations}
    own = flat[name]
    for c in comparison.configurations:
        ratio, other = first_ratio(c), flat[c.name]
        changed = [key for key in own.keys() | other.keys() if own.get(key) != other.get(key)]
        if ratio is not None and len(changed) == 1 and _is_arithmetic(changed[0]):
            found.append((changed[0], c.name, ratio.distance))
    return found


def _is_arithmetic(key: str) -> bool:
    return key in ARITHMETIC or key.startswith(_GROUPS)


def first_ratio_section(comparison: Comparison) -> Markup | None:
    """Tabulate the ratio at step 0 of each online run; None if there is none."""
    ratios = {c.name: ratio for c in comparison.configurations if (ratio := first_ratio(c)) is not None}
    if not ratios:
        return None
    rows = [
        [
            tag("code", breakable(name)),
            near_one(ratio.smallest),
            near_one(ratio.largest),
            near_one(ratio.mean),
            _distance(ratio.distance),
            _judgement(ratio),
            _lines(ratio.differences),
            _lines(_effect_lines(comparison, name, ratio)),
        ]
        for name, ratio in ratios.items()
    ]
    numbers = ("smallest", "largest", "mean", "distance")
    head = ["configuration", *numbers, "exactly 1", "old pass has", "moved by"]
    return join([tag("p", WHAT), table(head, rows, numbers=(1, 2, 3, 4), class_="prose")])


def _judgement(ratio: FirstRatio) -> Markup:
    if ratio.exact:
        return tag("span", "yes")
    return tag("b", "no, though all is shared") if ratio.shared else tag("span", "no")


def _effect_lines(comparison: Comparison, name: str, ratio: FirstRatio) -> list[str]:
    own = flatten(comparison[name].settings)
    return [
        f"{key}: {_value(own.get(key))} here, {_distance(ratio.distance)}; "
        f"{_value(flatten(comparison[other].settings).get(key))} in {other}, {_distance(distance)}"
        for key, other, distance in effects(comparison, name)
        if distance != ratio.distance
    ]


def _value(value: Any) -> str:
    return "none" if value in (None, [], ()) else f"{value:g}" if isinstance(value, float) else str(value)


def _distance(value: float) -> str:
    return "0" if value == 0 else significant(value, 2)


def _lines(texts: Sequence[str]) -> Markup | str:
    return join([tag("span", breakable(text), class_="line") for text in texts]) if texts else NONE
