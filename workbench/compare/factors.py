"""Names for factors: a gradient that is 0.5 times another usually has a wrong 1 / cp."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from workbench.compare.comparison import ParameterDifference
from workbench.specs.run import RunSpec

SAME = 1e-6
"""Relative tolerance for identifying a factor with a size."""


def name_factor(rows: Sequence[ParameterDifference], spec: RunSpec) -> tuple[float | None, str]:
    """The median gradient-norm ratio over parameters, and its meaning if all parameters share one simple ratio.

    Args:
        rows: one step's parameters.
        spec: of the run, for the sizes that a factor may equal.

    Returns:
        The factor (None if nothing has a reference norm) and its meaning, such as "1 / cp"; "" where parameters
        scatter or the factor equals nothing simple.
    """
    ratios = [row.norm_ratio for row in rows if row.reference_norm > 0 and row.judged_by != "floor"]
    if not ratios:
        return None, ""
    factor = statistics.median(ratios)
    if not factor or max(abs(ratio / factor - 1) for ratio in ratios) > SAME:
        return factor, ""
    return factor, meaning(
        factor,
        {
            "cp": spec.layout.cp,
            "dp": spec.layout.dp,
            "tp": spec.layout.tp,
            "micro_batches": spec.data.micro_batches,
            "dp * cp": spec.layout.dp * spec.layout.cp,
        },
    )


def meaning(factor: float, sizes: Mapping[str, float]) -> str:
    """Name of a factor: a size, or 1 over one; "" if none of them. The first that fits is taken.

    Args:
        factor: the number.
        sizes: sizes by name, the likeliest first; a size of 1 explains nothing.

    Example:
        >>> meaning(0.5, {"dp": 3, "cp": 2})
        '1 / cp'
        >>> meaning(0.8, {"padded tokens / tokens": 1.25})
        'tokens / padded tokens'
    """
    for name, size in sizes.items():
        if abs(size - 1) <= SAME:
            continue
        if abs(factor * size - 1) <= SAME:
            return _one_over(name)
        if abs(factor / size - 1) <= SAME:
            return name
    return ""


def _one_over(name: str) -> str:
    above, slash, below = name.partition(" / ")
    if slash:
        return f"{below} / {above}"
    return f"1 / ({name})" if " " in name else f"1 / {name}"
