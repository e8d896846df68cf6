"""One style for every figure: calm ink, petroff10 hues, and a marker and a dash for each hue.

Figures are made with matplotlib's object interface, so drawing one changes nothing outside it. The colours of
`THEME` are replaced by CSS variables when a figure goes into the report page, which is how one drawing reads
well on white, on dark and on paper.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullFormatter

from workbench.report.numbers import power_of_ten, significant

if TYPE_CHECKING:
    from matplotlib.typing import LegendLocType, RcKeyType

INK, MUTED, LINE = "#1c2128", "#667079", "#d9dee3"
SERIES = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadb",
)  # matplotlib's petroff10, arXiv 2107.02270
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
WIDTH_INCHES = 10.0


@dataclass(frozen=True)
class VerdictStyle:
    """Style of one verdict: a hue, and a sign for when the hue is not visible."""

    name: str
    sign: str
    color: str
    marker: str


VERDICT_STYLES = {
    "reference": VerdictStyle("reference", "○", "#5b6570", "o"),
    "equal": VerdictStyle("equal", "=", "#15794a", "o"),
    "within budget": VerdictStyle("within", "≤", "#2368a8", "s"),
    "different": VerdictStyle("different", "≠", "#c2410b", "D"),
    "vacuous": VerdictStyle("vacuous", "∅", "#7d6608", "v"),
    "unsound baseline": VerdictStyle("unsound", "≟", "#5b4bb5", "P"),
    "failed": VerdictStyle("failed", "×", "#8d1f62", "X"),
}

THEME = (
    {INK: "--ink", MUTED: "--muted", LINE: "--line", "#ffffff": "--paper"}
    | {style.color: f"--{style.name}" for style in VERDICT_STYLES.values()}
    | {color: f"--series-{i}" for i, color in enumerate(SERIES)}
)

RC: dict[RcKeyType, Any] = {
    "font.size": 8.0,
    "font.family": ["DejaVu Sans"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # every text of an SVG names them all
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.unicode_minus": True,
    "figure.dpi": 96,
    "figure.autolayout": False,  # a figure without an engine has none
    "figure.constrained_layout.use": False,
    "svg.hashsalt": "workbench",
    "svg.fonttype": "none",
    "path.simplify": False,
}
_DECIMALS = re.compile(r"-?\d+\.\d{3,}")
_USE = re.compile(r'<use xlink:href="#(m[0-9a-f]{10})"[^>]*?(?: style="([^"]*)")?/>')
_MARKER = re.compile(r'(<path id="([^"]*)" d="[^"]*")(?: style="[^"]*")?/>')
_GROUP_OF_ONE = re.compile(r"<g>\n(<(?!g|/)[^\n]*\n)</g>\n")
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


class Chart(Figure):
    """A matplotlib figure that a notebook shows as SVG, without pyplot and its global state."""

    def _repr_svg_(self) -> str:
        return svg_text(self)


def chart(height_inches: float, *, width_inches: float = WIDTH_INCHES) -> Chart:
    """Return an empty figure in this style, with matplotlib's constrained layout."""
    with rc_context(RC):
        return Chart(figsize=(width_inches, height_inches), layout="constrained", facecolor="#ffffff")


def tidy(axes: Axes, *, title: str = "", x: str = "", y: str = "", grid: Literal["", "x", "y"] = "y") -> Axes:
    """Strip an axes to the essentials; the y label is horizontal, above the axes."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(LINE)
    axes.set_facecolor("none")
    axes.tick_params(which="both", length=0, colors=MUTED, labelsize=7.5, pad=4)
    axes.grid(False)
    if grid:
        axes.grid(True, axis=grid, color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    if title:
        # a title without y is moved above ticks on top, for which matplotlib measures the axis in each pass of a layout
        axes.set_title(title, loc="left", y=1.0, fontsize=8, fontweight="bold", color=INK, pad=20 if y else 8)
    if y:
        remark(axes, y, (0, 1), offset=(0, 7), fontsize=7.5)
    axes.set_xlabel(x, fontsize=7.5, color=MUTED, loc="left")
    axes.yaxis.set_label_coords(-0.06, 0.5)  # of no label, for which matplotlib would measure the ticks once more
    return axes


def log_ticks(axis: Any) -> None:
    """Label decades of a logarithmic axis as 10⁻³, without mathtext, and nothing between them."""

    def label(value: float, _: int) -> str:
        if not 0 < value < math.inf:
            return ""
        return significant(value, 1) if 0.01 <= value <= 100 else power_of_ten(round(math.log10(value)))

    axis.set_major_formatter(FuncFormatter(label))
    axis.set_minor_formatter(NullFormatter())


def plain_ticks(axis: Any, digits: int = 3) -> None:
    """Label an axis with plain numbers."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{digits}g}".replace("-", "−")))


def step_ticks(axis: Any, steps: Iterable[int]) -> None:
    """Set a tick for every step while they are few, and round numbers otherwise."""
    ticks = sorted(set(steps))
    if len(ticks) > 16:
        axis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        axis.set_ticks(ticks)


class DecadesAroundZero(Locator):
    """Ticks of an asinh axis: 0 and powers of ten on both sides, none so near to the last that labels touch.

    Args:
        linear_width: linear width of the axis' scale.
    """

    def __init__(self, linear_width: float) -> None:
        self.linear_width = linear_width

    def __call__(self) -> list[float]:
        """Return the ticks of the current view."""
        assert self.axis is not None, "matplotlib sets the axis before it requests ticks"
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks between two ends."""

        def place(value: float) -> float:
            return math.asinh(value / self.linear_width)

        spacing = (place(vmax) - place(vmin)) / 14
        ticks, lowest = [0.0], math.floor(math.log10(self.linear_width))
        for sign, end in ((1, vmax), (-1, -vmin)):
            last, highest = 0.0, math.floor(math.log10(end)) if end > 0 else lowest - 1
            for value in (10.0**exponent for exponent in range(lowest, highest + 1)):
                if place(value) >= last + spacing:
                    last = place(value)
                    ticks.append(sign * value)
        return sorted(ticks)


HUGE, TINY = 1e100, 1e-100
"""Magnitudes beyond which a value has no place on any axis here: marked like one that is not finite, or drawn as 0."""


def drawable(value: Any) -> float:
    """Return a value as it is placed on an axis; NaN for infinities, None and all beyond `HUGE`.

    Example:
        >>> drawable(0.5), drawable(float("inf")), drawable(1e300), drawable(None), drawable(1e-300)
        (0.5, nan, nan, nan, 0.0)
    """
    if value is None or not abs(value) <= HUGE:
        return math.nan
    return 0.0 if abs(value) < TINY else float(value)


def empty(text: str, *, height_inches: float = 1.2) -> Chart:
    """Return an empty figure, with the reason in its middle."""
    figure = chart(height_inches)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, fontsize=9)
    return figure


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a hue and a dash for each name."""
    return {
        name: {"color": SERIES[i % len(SERIES)], "linestyle": DASHES[i % len(DASHES)]} for i, name in enumerate(names)
    }


MOST_LETTERS = 36
"""Of a name in a figure: at 7.5 points, a quarter of its width."""


def elided(name: str) -> str:
    """Return a name without its middle if it is too long for a figure; names often differ at their ends.

    Example:
        >>> elided("a_configuration_with_a_rather_long_name-float64")
        'a_configurat…ather_long_name-float64'
    """
    if len(name) <= MOST_LETTERS:
        return name
    start = MOST_LETTERS // 3
    return name[:start] + "…" + name[start + 1 - MOST_LETTERS :]


def wrapped(name: str, width: int) -> str:
    """Wrap a long name, after - and _, and inside a part that is longer than a line."""
    lines, current = [], ""
    for part in name.replace("-", "-\0").replace("_", "_\0").split("\0"):
        for piece in (part[i : i + width] for i in range(0, len(part), width)):
            if current and len(current) + len(piece) > width:
                lines.append(current)
                current = ""
            current += piece
    return "\n".join([*lines, current])


def marks(axes: Axes, x: Sequence[float], y: Sequence[float], color: str, marker: str, size: float, **how: Any) -> None:
    """Draw marks without a line."""
    axes.plot(x, y, color=color, marker=marker, markersize=size, linestyle="none", **how)


def remark(
    axes: Axes, text: str, place: tuple[float, float], *, offset: tuple[float, float] | None = None, **how: Any
) -> None:
    """Write a small text at a place of an axes, given as fractions, with an offset in points."""
    shift: dict[str, Any] = {} if offset is None else {"xytext": offset, "textcoords": "offset points"}
    axes.annotate(text, place, xycoords="axes fraction", **shift, **{"color": MUTED, **how})


def legend(figure: Figure, handles: Sequence[Any], loc: LegendLocType, **how: Any) -> None:
    """Draw a legend in this style outside of the axes."""
    figure.legend(handles=handles, loc=loc, frameon=False, fontsize=7.5, labelcolor=INK, **{"handlelength": 3, **how})


def svg_text(figure: Figure, *, transparent: bool = False, outlines: bool = False) -> str:
    """Render the figure as SVG; the same figure gives the same bytes.

    Half the bytes that matplotlib writes are left out: see `compact`.
    """
    buffer = io.StringIO()
    with rc_context(RC | {"svg.fonttype": "path" if outlines else "none"}), _placed(figure):
        figure.savefig(buffer, format="svg", metadata=NO_METADATA, transparent=transparent)
    return compact(buffer.getvalue())


def compact(text: str) -> str:
    """Return matplotlib's SVG with the same drawing in fewer bytes.

    Left out: indentation, comments (a text's letters once more), rotations by 0, groups without content or attributes,
    ids that matplotlib numbers and nothing refers to, the style of a marker at each of its points, digits of a
    coordinate below a hundredth of a point.
    """
    text = re.sub(r"\n\s+", "\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    text = re.sub(r'\stransform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(r'\s(?:d|x|y|points|transform)="[^"]*"', lambda attribute: _shorter(attribute[0]), text)
    references = {a or b for a, b in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)}
    text = re.sub(r'\sid="([\w.]+_\d+)"', lambda own: own[0] if own[1] in references else "", text)
    text = _styled_markers(text)
    text, before = re.sub(r"<g/>\n", "", text), ""
    while text != before:  # groups inside each other, from the innermost
        text, before = _GROUP_OF_ONE.sub(r"\1", text), text
    return text


def _styled_markers(text: str) -> str:
    """Move the style that all uses of a marker have to the marker itself, which has a part of it.

    Its name has a hash of path and style, so that figures of one page share a marker only if they share both.
    """
    styles: dict[str, set[str]] = {}
    for name, style in _USE.findall(text):
        styles.setdefault(name, set()).add(style)
    shared = {name: style for name, (style, *others) in styles.items() if style and not others}

    def marker(path: re.Match[str]) -> str:
        return f'''{path[1]} style="{shared[path[2]]}"/>''' if path[2] in shared else path[0]

    def use(each: re.Match[str]) -> str:
        return each[0].replace(f''' style="{each[2]}"''', "") if each[1] in shared else each[0]

    return _USE.sub(use, _MARKER.sub(marker, text))


def _shorter(attribute: str) -> str:
    """Return an attribute of coordinates with two decimals and no breaks; a scale keeps its digits."""
    if "scale(" not in attribute:
        attribute = _DECIMALS.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), attribute)
    else:
        before, scale, after = attribute.partition("scale(")
        attribute = _shorter(before) + scale + after
    name, equals, value = attribute.partition("=")
    return name + equals + re.sub(r"(?<=[MLQCz]) | ?\n(?=[MLQCz\"])", "", value)


@contextlib.contextmanager
def _placed(figure: Figure) -> Iterator[None]:
    """Place the axes with the figure's layout engine, and take it off meanwhile.

    `savefig` would draw the whole figure once more, to nowhere, only to call the engine.
    """
    engine, dpi, canvas = figure.get_layout_engine(), figure.dpi, figure.canvas
    if engine is None or not figure.axes:
        yield
        return
    FigureCanvasSVG(figure)  # measures texts as savefig does, and leaves the dpi of SVG behind
    try:
        engine.execute(figure)
        figure.set_layout_engine(None)  # "none" is an engine, too, for which it would draw as well
        yield
    finally:
        figure.dpi = dpi
        figure.set_canvas(canvas)
        figure.set_layout_engine(engine)


def inline_svg(figure: Figure, *, prefix: str) -> str:
    """Render the figure as an SVG element for an HTML page.

    Every id begins with ``prefix``, so that two figures on one page never share a marker or a clip path. The
    colours of `THEME` become CSS variables. Nothing in it names an address.
    """
    text = svg_text(figure, transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sid="([^"]*)"', functools.partial(_own_id, prefix, set()), text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for color, variable in THEME.items():
        text = text.replace(color, f"var({variable})")
    opening, rest = text.split(">", 1)
    return re.sub(r'\s(?:width|height)="[^"]*"', "", opening) + ">" + rest


def _own_id(prefix: str, taken: set[str], found: re.Match[str]) -> str:
    """Return an id that no other element of the page has: two axes may draw a line of one name."""
    name, number = f"{prefix}-{found[1]}", 1
    while (own := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    taken.add(own)
    return f' id="{own}"'


def save_svg(figure: Figure, path: Path) -> Path:
    """Write the figure as an SVG file, letters as curves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg_text(figure, outlines=True), encoding="utf8")
    return path


PANELS_A_ROW = 6


def panels(figure: Figure, count: int, *, ratios: Sequence[float] | None = None, **how: Any) -> list[Axes]:
    """Add so many axes to a figure, in rows of at most `PANELS_A_ROW`."""
    columns = min(count, PANELS_A_ROW)
    axes = figure.subplots(-(-count // columns), columns, squeeze=False, width_ratios=ratios, **how).flatten()
    for unused in axes[count:]:
        unused.set_visible(False)
    return list(axes[:count])
