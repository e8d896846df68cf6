"""Credit of every token as a heat map: a row per document, several losses side by side.

Credit is `workbench.attribution`: weight times gradient coefficient. Tokens without credit show the reason:
clipped, rejected by a correction, or without an advantage. The share of each of these in the step is above the map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.attribution import FATES, Credit
from workbench.errors import SpecError
from workbench.report import style
from workbench.report.numbers import significant
from workbench.rollouts.batch import RolloutBatch

LIKELIER, NOTHING, RARER = "#1f64ad", "#f3f2ef", "#c4500f"
"""Hues of negative, vanishing and positive credit."""
SILENT = {"clipped": "#d8c37a", "rejected": "#a98fc0", "zero advantage": "#dcdcd8", "no gradient": "#c9d2cf"}
"""Hues of trained tokens without credit, by their fate."""
LETTER = "#1b2027"
HUES = LinearSegmentedColormap.from_list("credit", [LIKELIER, NOTHING, RARER])
SMALLEST_CELL_INCHES = 0.085
"""Narrower than this, a cell holds no letter."""


def credit_map(
    batch: RolloutBatch,
    credits: Mapping[str, Credit],
    *,
    documents: Sequence[int] | None = None,
    decode: Callable[[int], str] | None = None,
) -> Figure:
    """Draw the credit of every token of some documents under each of several losses.

    Blue: the loss makes the token likelier; orange: less likely; the deeper, the more (depth grows with the square
    root, so that small credits show). All panels share one scale: equal hues are equal updates. Flat hues are trained
    tokens without credit, by the reason. Tokens that do not count have no cell, only a pale letter.

    Args:
        batch: batch of the credits.
        credits: by the name of the loss; from `workbench.attribution.token_credit`.
        documents: rows to draw, in this order; None draws all. Shares and scale are those of the whole step.
        decode: from a token id to the text in its cell; None draws no text.

    Raises:
        SpecError: no credit or no document, a document that is not there, or credits of another batch.
    """
    chosen = list(range(batch.num_documents)) if documents is None else list(documents)
    missing = [d for d in chosen if not 0 <= d < batch.num_documents]
    other = [name for name, credit in credits.items() if credit.credit_T.shape != batch.tokens_T.shape]
    if not credits or not chosen or missing or other:
        problem = f"{len(credits)} credits and {len(chosen)} documents"
        if missing or other:
            problem = f"documents {missing} are not there" if missing else f"{', '.join(other)} of another batch"
        raise SpecError(
            "draw a credit map",
            found=problem,
            rule="at least one credit and one document of the batch that the credits were computed from",
            fix="take both from one batch; documents count from 0",
        )
    columns = int(batch.lengths_N[chosen].max())
    cell_inches = (style.WIDTH_INCHES - 1.6) / (len(credits) * (columns + 1))
    figure = style.chart(1.75 + 0.165 * len(chosen))
    largest = max(float(credit.credit_T.abs().max()) for credit in credits.values()) or 1.0
    panels = style.panels(figure, len(credits), sharey=True)
    for axes, (name, credit) in zip(panels, credits.items(), strict=True):
        style.tidy(axes, title=f"{name}\n{shares_text(credit)}", grid="")
        axes.title.set_fontsize(7.5)
        _cells(axes, batch, credit, chosen, largest).set_label(name)
        if decode is not None and cell_inches >= SMALLEST_CELL_INCHES:
            size = min(7.5, 72 * cell_inches * 0.72)
            _letters(axes, batch, credit, chosen, decode, deep=0.36 * largest, size=size)
        axes.set_xlim(-0.2, columns + 0.2)
        axes.set_ylim(len(chosen) - 0.3, -0.7)
        axes.set_xlabel("token of the document", fontsize=7.5, color=style.MUTED, loc="left")
        axes.spines["bottom"].set_visible(False)
        axes.set_yticks(range(len(chosen)), [str(d) for d in chosen])
    style.remark(panels[0], "document", (0, 1), offset=(-4, 3), ha="right", fontsize=7)
    _legend(figure, credits, largest)
    return figure


def hue(value: float, largest: float) -> str:
    """Return the hue of a credit on the scale of the largest one.

    Example:
        >>> hue(-0.5, 0.5), hue(0.5, 0.5)
        ('#1f64ad', '#c4500f')
    """
    return to_hex(HUES(0.5 + 0.5 * math.copysign(math.sqrt(abs(value) / largest), value)))


def shares_text(credit: Credit) -> str:
    """Return the shares of the trained tokens of the whole step by fate, as text."""
    shares = credit.shares()
    lost = sorted(((part, fate) for fate, part in shares.items() if fate != "acts" and part), key=lambda pair: -pair[0])
    return " · ".join(
        [f"{_percent(shares['acts'])} of tokens act", *(f"{_percent(part)} {fate}" for part, fate in lost)]
    )


def _percent(part: float) -> str:
    """Format a part in per cent; never 0 for something, nor 100 for not everything."""
    written = significant(100 * part, 2) if part < 0.1 else f"{100 * part:.0f}"
    return f"{'99.9' if written == '100' and part < 1 else written} %"


def _places(batch: RolloutBatch, chosen: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (token of the batch, row, column) of every token of the chosen documents."""
    places = []
    for row, document in enumerate(chosen):
        at = torch.nonzero(batch.document_ids_T == document).squeeze(1).tolist()
        places += [(token, row, column) for column, token in enumerate(at)]
    return places


def _cells(axes: Axes, batch: RolloutBatch, credit: Credit, chosen: Sequence[int], largest: float) -> PolyCollection:
    corners, colors = [], []
    for token, row, column in _places(batch, chosen):
        if not credit.trained_T[token]:
            continue
        value, fate = float(credit.credit_T[token]), FATES[int(credit.fates_T[token])]
        corners.append([(column, row - 0.5), (column + 1, row - 0.5), (column + 1, row + 0.5), (column, row + 0.5)])
        colors.append(SILENT[fate] if value == 0 and fate in SILENT else hue(value, largest))
    cells = PolyCollection(corners, facecolors=colors, edgecolors="#ffffff", linewidths=0.7)
    axes.add_collection(cells)
    return cells


def _letters(
    axes: Axes,
    batch: RolloutBatch,
    credit: Credit,
    chosen: Sequence[int],
    decode: Callable[[int], str],
    *,
    deep: float,
    size: float,
) -> None:
    how: dict[str, Any] = {"ha": "center", "va": "center", "family": "DejaVu Sans Mono", "parse_math": False}
    for token, row, column in _places(batch, chosen):
        trained, dark = bool(credit.trained_T[token]), abs(float(credit.credit_T[token])) > deep
        color = style.MUTED if not trained else "#fdfdfd" if dark else LETTER
        axes.text(
            column + 0.5, row, decode(int(batch.tokens_T[token])), fontsize=size, color=color, clip_on=True, **how
        )


def _legend(figure: Figure, credits: Mapping[str, Credit], largest: float) -> None:
    fates = {FATES[int(number)] for credit in credits.values() for number in credit.fates_T.unique()}
    handles = [
        Patch(facecolor=LIKELIER, label=f"made likelier (credit down to {significant(-largest, 2)})"),
        Patch(facecolor=RARER, label=f"made less likely (up to {significant(largest, 2)})"),
        *(Patch(facecolor=color, label=fate) for fate, color in SILENT.items() if fate in fates),
    ]
    style.legend(figure, handles, "outside lower left", ncols=len(handles), handlelength=1.1, handleheight=1.1)
