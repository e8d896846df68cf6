"""Settings of a loss that a run's context states, under the names of several trainers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_CAPS = re.compile(r"(^|_)(cap|trunc|truncation|tis|is|rho|imp|max_weight)(_|$)")
"""Words of the name of a largest weight of a correction for the sampler: `tis_imp_ratio_cap`, `vllm_..._cap`, ..."""


def is_number(value: Any) -> bool:
    """True for a number that is no Boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def clip_ranges(context: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Lower and upper distance from 1 at which ratios are clipped; one number stands for both."""
    both = next((context[name] for name in ("clip", "clip_ratio", "cliprange", "epsilon") if name in context), None)
    if isinstance(both, list | tuple) and len(both) == 2 and all(map(is_number, both)):
        yield float(both[0]), float(both[1])
        return
    low, high = (
        next((context[name] for name in names if name in context), both)
        for names in (
            ("clip_low", "clip_ratio_low", "epsilon_low", "eps_clip"),
            ("clip_high", "clip_ratio_high", "epsilon_high", "eps_clip_high"),
        )
    )
    if is_number(low) and is_number(high):
        yield float(low), float(high)  # type: ignore[arg-type]


def caps(context: Mapping[str, Any]) -> list[float]:
    """Largest weights of a correction."""
    named = [value for name, value in context.items() if _CAPS.search(name.lower()) and is_number(value)]
    return [float(value) for value in named if value >= 1]
