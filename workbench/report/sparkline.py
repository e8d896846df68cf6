"""Sparklines: a series in the space of a word, as inline SVG and as text.

The drawing is scaled to the finite values. A value that is not finite is a gap with a cross in it, so that a run that
diverges does not look like a constant one. The same values give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from workbench.report.markup import Markup, tag
from workbench.report.numbers import significant

WIDTH, HEIGHT = 80.0, 20.0
"""Size of the drawing, in its own units (pixels at its natural size)."""

_EDGE = 2.0  # room for the line's own width and for the crosses
_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float | None], *, label: str) -> Markup:
    """Draw the series as an SVG element in the colour of the text around it.

    Args:
        values: in order; None, NaN and infinities are drawn as crosses in a gap.
        label: name of the values; screen readers and the tooltip get it with a summary.

    Example:
        >>> sparkline([1.0, 3.0, 2.0], label="loss")   # doctest: +SKIP
        '<svg class="sparkline" role="img" ...'
    """
    series = [math.nan if value is None else float(value) for value in values]
    description = f"{label}: {summary(series)}"
    return tag(
        "svg",
        tag("title", description),
        _lines(_thinned(series)),
        class_="sparkline",
        role="img",
        aria_label=description,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        width=f"{WIDTH:g}",
        height=f"{HEIGHT:g}",
    )


def sparkline_text(values: Iterable[float | None], *, width: int = 12) -> str:
    """Draw the last values as one character each.

    Example:
        >>> sparkline_text([1.0, 3.0, float("nan"), 2.0])
        '▁█×▅'
    """
    series = [math.nan if value is None else float(value) for value in values][-width:]
    place = _scale(series)
    return "".join(
        _BLOCKS[round(place(value) * (len(_BLOCKS) - 1))] if math.isfinite(value) else "×" for value in series
    )


def summary(values: Sequence[float]) -> str:
    """Describe a series: number of values, the last one, the range of the finite ones, and the number of others.

    Example:
        >>> summary([1.0, float("nan"), 2.0])
        '3 values, last 2.00, from 1.00 to 2.00, 1 not finite'
    """
    if not values:
        return "no values yet"
    parts = [f"{len(values)} value{'s' if len(values) > 1 else ''}", f"last {significant(values[-1])}"]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) > 1:
        parts.append(f"from {significant(min(finite))} to {significant(max(finite))}")
    if lost := len(values) - len(finite):
        parts.append(f"{lost} not finite")
    return ", ".join(parts)


def _lines(points: Sequence[tuple[float, float]]) -> list[Markup]:
    """Draw lines through finite neighbours, a dot for an isolated value, and a cross for one that is not finite."""
    place = _scale([value for _, value in points])
    pieces: list[list[str]] = [[]]
    crosses = []
    for across, value in points:
        x = _EDGE + across * (WIDTH - 2 * _EDGE)
        if math.isfinite(value):
            pieces[-1].append(f"{x:.1f},{HEIGHT - _EDGE - place(value) * (HEIGHT - 2 * _EDGE):.1f}")
        else:
            crosses.append(f"M{x - 2:.1f} {HEIGHT / 2 - 2:.1f}l4 4m0 -4l-4 4")
            pieces.append([])
    drawn = [
        tag(
            "polyline",
            points=" ".join(piece),
            fill="none",
            stroke="currentColor",
            stroke_width="1.3",
            stroke_linejoin="round",
        )
        for piece in pieces
        if len(piece) > 1
    ]
    ends = [piece[0] for piece in pieces if len(piece) == 1]
    if points and math.isfinite(points[-1][1]) and len(pieces[-1]) > 1:
        ends.append(pieces[-1][-1])
    dots = [tag("circle", cx=end.split(",")[0], cy=end.split(",")[1], r="1.8", fill="currentColor") for end in ends]
    lost = [tag("path", d="".join(crosses), fill="none", stroke="currentColor", class_="lost")] if crosses else []
    return [*drawn, *dots, *lost]


def _thinned(series: Sequence[float]) -> list[tuple[float, float]]:
    """Return (share of the width, value) of at most 200 points: per bucket the lowest, the highest and a lost one.

    A spike of one step stays visible however long the series is, and so does a value that is not finite.
    """
    last = max(len(series) - 1, 1)
    if len(series) <= 2 * WIDTH:
        return [(index / last, value) for index, value in enumerate(series)]
    indices: set[int] = {0, len(series) - 1}
    buckets = int(WIDTH / 2)
    for bucket in range(buckets):
        inside = range(bucket * len(series) // buckets, (bucket + 1) * len(series) // buckets)
        finite = [index for index in inside if math.isfinite(series[index])]
        lost = [index for index in inside if not math.isfinite(series[index])]
        indices.update(lost[:1])
        if finite:
            indices.update((min(finite, key=series.__getitem__), max(finite, key=series.__getitem__)))
    return [(index / last, series[index]) for index in sorted(indices)]


def _scale(series: Sequence[float]) -> Callable[[float], float]:
    finite = [value for value in series if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def place(value: float) -> float:
        # halved first: the range of two finite numbers need not be finite
        span = high / 2 - low / 2
        return 0.5 if span == 0 else (value / 2 - low / 2) / span

    return place
