"""Boxes of the texts of a figure, as they are drawn: which ones leave the figure, and which ones touch each other."""

from __future__ import annotations

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

SLACK = 1.0
"""Pixels by which boxes may overlap: they include the space of letters that go below the line."""


def misplaced(figure: Figure) -> list[str]:
    """Describe every text that leaves the figure or overlaps another one; nothing if all can be read."""
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # places all texts
    renderer = canvas.get_renderer()
    width, height = figure.bbox.size
    boxes, undrawn = [], _undrawn(figure)
    for text in figure.findobj(Text):
        if not text.get_text().strip() or not text.get_visible() or text in undrawn:
            continue
        x0, y0, x1, y1 = map(float, text.get_window_extent(renderer).extents)
        if x1 > x0 and y1 > y0:
            boxes.append((text.get_text(), x0, y0, x1, y1))
    found = [
        f"{name!r} leaves the figure"
        for name, x0, y0, x1, y1 in boxes
        if x0 < -SLACK or y0 < -SLACK or x1 > width + SLACK or y1 > height + SLACK
    ]
    for (one, ax0, ay0, ax1, ay1), (other, bx0, by0, bx1, by1) in itertools.combinations(boxes, 2):
        if min(ax1, bx1) - max(ax0, bx0) > SLACK and min(ay1, by1) - max(ay0, by0) > SLACK:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def _undrawn(figure: Figure) -> set[Text]:
    """Return the labels of ticks beyond their axis, and of hidden axes: matplotlib keeps them, undrawn."""
    undrawn: set[Text] = set()
    for axes in figure.axes:
        if not axes.get_visible():
            undrawn |= set(axes.findobj(Text))
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_visible():
                undrawn |= set(axis.findobj(Text))
                continue
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - slack <= tick.get_loc() <= high + slack:
                    undrawn |= {tick.label1, tick.label2}
    return undrawn
