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
    canvas.draw()
    renderer = canvas.get_renderer()
    width, height = figure.bbox.size
    boxes, undrawn = [], _undrawn(figure)
    for text in figure.findobj(Text):
        if not text.get_text().strip() or not text.get_visible() or text in undrawn:
            continue
        box = text.get_window_extent(renderer)
        if box.width and box.height:
            boxes.append((text.get_text(), box))
    found = [
        f"{name!r} leaves the figure"
        for name, box in boxes
        if box.x0 < -SLACK or box.y0 < -SLACK or box.x1 > width + SLACK or box.y1 > height + SLACK
    ]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > SLACK and min(a.y1, b.y1) - max(a.y0, b.y0) > SLACK:
            found.append(f"{one!r} overlaps {other!r}")
    return found


def _undrawn(figure: Figure) -> set[Text]:
    """Return the labels of ticks beyond their axis, and of hidden axes: matplotlib keeps them, undrawn."""
    undrawn: set[Text] = set()
    for axes in figure.axes:
        if not axes.get_visible():
            undrawn |= set(axes.findobj(Text))
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - slack <= tick.get_loc() <= high + slack:
                    undrawn |= {tick.label1, tick.label2}
    return undrawn
