"""Page of the cost of the output head: the records of `workbench bench head head_parallel` with every sample.

Ratios are to the GEMMs, the lower bound of every implementation, measured in the same run.
`python -m experiments.head.page FOLDER` writes the page of a folder's records again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.pages import provenance
from workbench.atomic import from_json, write_whole
from workbench.errors import RecordError
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, significant
from workbench.report.page import document, drawing

QUESTION = "What do log-probabilities without the logits cost, beyond three GEMMs?"
KINDS = {"floor": 3, "ours": 0, "peer": 1, "cross entropy": 4}
"""Kind of contender -> index of its hue and marker."""

RATIO_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 40)

CAPTIONS = {
    "ratios": "Forward and backward over three GEMMs of the same run: medians. Hollow: memory grows with the "
    "number of tokens. The axis is logarithmic.",
    "memory": "Memory beyond operands and both gradients, against time. Left and low is better. Both axes are "
    "logarithmic.",
    "longest": "Peak memory of one row by its length, operands and gradients included, doubled until the row no "
    "longer fits. A line that ends in a cross ran out of memory there; others ended for time.",
    "parallel": "Forward and backward with the vocabulary cut over GPUs: time on one over ranks times the time on "
    "each.",
}


def write_head_report(folder: Path) -> Path:
    """Write ``report.html`` from ``head.json`` and, if it exists, ``head_parallel.json``; atomically.

    Raises:
        RecordError: no ``head.json``.
    """
    one, several = Path(folder) / "head.json", Path(folder) / "head_parallel.json"
    if not one.exists():
        raise RecordError(
            f"report {folder}",
            found="no head.json",
            rule="the page is of a measurement on one GPU",
            fix="run workbench bench head first",
        )
    parallel = from_json(several.read_text()) if several.exists() else None
    return write_whole(Path(folder) / "report.html", page(from_json(one.read_text()), parallel).encode())


def page(record: Mapping[str, Any], parallel: Mapping[str, Any] | None = None) -> str:
    """Render the page as text; the same records give the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "head"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    sections = [
        ("Time", join([drawing("ratios", CAPTIONS["ratios"], ratios(record)), times(record)])),
        ("Memory", memory_section(record)),
    ]
    if record["longest_rows"]:
        sections.append(("The longest row", drawing("longest", CAPTIONS["longest"], longest(record))))
    if parallel:
        sections.append(
            (
                "Vocabulary over GPUs",
                join([drawing("parallel", CAPTIONS["parallel"], efficiency(parallel)), parallel_table(parallel)]),
            )
        )
    sections += [
        ("Errors", errors(record)),
        ("Bars", bars(record)),
        ("Every sample", every_sample(record)),
        ("Provenance", join([provenance(record), provenance(parallel) if parallel else None])),
    ]
    return document("head", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in a sentence."""
    ratios_of_ours = [
        f"{letter} {work['forward_backward']['contenders']['fused_loss']['ratio']:.3f}"
        for letter, work in record["workloads"].items()
        if "ratio" in work["forward_backward"]["contenders"]["fused_loss"]
    ]
    missed = [name for name, bar in record["bars"].items() if not bar["holds"]]
    summary = (
        f"{len(record['bars']) - len(missed)} of {len(record['bars'])} bars hold."
        if record["bars"]
        else "No bar is stated for this device."
    )
    return f"On {record['device']}: fused_loss takes {', '.join(ratios_of_ours)} times three GEMMs. {summary}"


# ---- figures -------------------------------------------------------------------------------------------


def ratios(record: Mapping[str, Any]) -> Figure:
    """Draw every contender's time over the floor, one panel per workload."""
    names = list(dict.fromkeys(name for _, work in _workloads(record) for name in _timed(work)))
    figure = style.chart(0.9 + 0.21 * len(names))
    panels = style.panels(figure, len(record["workloads"]), sharey=True)
    for axes, (letter, work) in zip(panels, _workloads(record), strict=True):
        style.tidy(axes, title=f"{letter}: {work['tokens']} × {work['dimension']}", grid="x", x="times the floor")
        axes.set_xscale("log")
        axes.axvline(1.0, color=style.LINE, linewidth=1.2, zorder=1)
        for name, entry in _timed(work).items():
            _mark(axes, entry, entry["ratio"], names.index(name))
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        _ratio_ticks(axes.xaxis, axes.get_xlim())
    _legend(figure)
    return figure


def memory(record: Mapping[str, Any]) -> Figure:
    """Draw extra memory against time over the floor, one panel per workload."""
    figure = style.chart(3.0)
    panels = style.panels(figure, len(record["workloads"]), sharey=True)
    for axes, (letter, work) in zip(panels, _workloads(record), strict=True):
        style.tidy(axes, title=letter, x="GiB extra", y="times the floor")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for entry in _timed(work).values():
            if entry["kind"] != "floor" and (entry.get("extra_gib") or 0) > 0:
                _mark(axes, entry, entry["extra_gib"], entry["ratio"])
        style.log_ticks(axes.xaxis)
        _ratio_ticks(axes.yaxis, axes.get_ylim())
    _legend(figure)
    return figure


def longest(record: Mapping[str, Any]) -> Figure:
    """Draw peak memory by length of the row, one panel per head."""
    figure = style.chart(3.0)
    panels = style.panels(figure, len(record["longest_rows"]), sharey=True)
    names = list(dict.fromkeys(name for lines in record["longest_rows"].values() for name in lines))
    for axes, (head, lines) in zip(panels, record["longest_rows"].items(), strict=True):
        style.tidy(axes, title=head, x="tokens of one row", y="GiB at the peak")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for name, entry in lines.items():
            at = [(line["tokens"], line["peak_gib"]) for line in entry["rows"]]
            number = names.index(name)
            axes.plot(
                *zip(*at, strict=True),
                color=style.SERIES[number],
                marker=style.MARKERS[number],
                markersize=3.5,
                linestyle=style.DASHES[number],
            ) if at else None
            if at and entry["end"] == "out of memory":
                axes.plot(*at[-1], marker="x", markersize=8, color=style.SERIES[number])
        style.plain_ticks(axes.yaxis, 3)
    handles = [
        Line2D([], [], label=name, color=style.SERIES[i], marker=style.MARKERS[i], linestyle=style.DASHES[i])
        for i, name in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=7.5, labelcolor=style.INK)
    return figure


def efficiency(record: Mapping[str, Any]) -> Figure:
    """Draw efficiency by number of GPUs, one line per head."""
    figure = style.chart(2.4, width_inches=5.0)
    axes = style.tidy(figure.subplots(), x="GPUs", y="efficiency")
    for number, (name, by_ranks) in enumerate(record["heads"].items()):
        at = [(int(ranks), entry["efficiency"]) for ranks, entry in by_ranks.items()]
        axes.plot(
            *zip(*at, strict=True),
            label=_size(record, name),
            color=style.SERIES[number],
            marker=style.MARKERS[number],
            linestyle=style.DASHES[number],
        )
    axes.set_xticks(sorted({int(ranks) for by_ranks in record["heads"].values() for ranks in by_ranks}))
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize=7.5, labelcolor=style.INK)
    return figure


# ---- sections ------------------------------------------------------------------------------------------


def times(record: Mapping[str, Any]) -> Markup:
    """Tables of the medians of both passes, and contenders left out with the reason."""
    parts: list[Any] = []
    for letter, work in _workloads(record):
        for passes, title in (("forward_backward", "forward and backward"), ("forward", "forward alone")):
            listed = work[passes]["contenders"]
            rows = [
                [
                    name,
                    entry["what"],
                    significant(entry["median_ms"], 4),
                    significant(entry["ratio"], 4),
                    significant(entry.get("extra_gib"), 3),
                    entry["version"] or NONE,
                ]
                for name, entry in sorted(_timed(work, passes).items(), key=lambda pair: pair[1]["ratio"])
            ]
            parts += [
                tag(
                    "h3",
                    f"{letter}: {work['tokens']} tokens, hidden {work['dimension']}, vocabulary "
                    f"{work['vocabulary']}: {title}",
                ),
                table(["", "what", "ms", "times the floor", "GiB extra", "version"], rows, numbers=(2, 3, 4)),
            ]
            missing = [f"{name} ({entry['left_out']})" for name, entry in listed.items() if "left_out" in entry]
            if missing:
                parts.append(tag("p", "Left out: ", "; ".join(missing), class_="caution"))
    return join(parts)


def memory_section(record: Mapping[str, Any]) -> Markup:
    """The figure of memory, or a sentence if nothing was measured."""
    known = any(entry.get("extra_gib") for _, work in _workloads(record) for entry in _timed(work).values())
    if not known:
        return tag("p", "Not measured: memory is that of a GPU.")
    return drawing("memory", CAPTIONS["memory"], memory(record))


def parallel_table(record: Mapping[str, Any]) -> Markup:
    """Table of times over GPUs, with every sample."""
    rows = [
        [
            _size(record, name),
            ranks,
            significant(entry["median_ms"], 4),
            significant(entry["efficiency"], 3),
            ", ".join(f"{ms:.2f}" for ms in entry["samples_ms"]),
        ]
        for name, by_ranks in record["heads"].items()
        for ranks, entry in by_ranks.items()
    ]
    return table(["", "GPUs", "ms", "efficiency", "samples, ms"], rows, numbers=(1, 2, 3))


def errors(record: Mapping[str, Any]) -> Markup:
    """Table of errors against float64 of the same operands."""
    rows = [
        [letter, name, *(significant(entry.get(key), 2) for key in ("logprob_error", "hidden_error", "weight_error"))]
        for letter, work in _workloads(record)
        for name, entry in work["forward_backward"]["contenders"].items()
        if "hidden_error" in entry
    ]
    legend = tag(
        "p",
        "Mean absolute error of the log-probabilities in nats; L2 norm of the error of each gradient over "
        "that of the gradient.",
    )
    return join([legend, table(["", "", "log-probability", "hidden", "weight"], rows, numbers=(2, 3, 4))])


def bars(record: Mapping[str, Any]) -> Markup:
    """Table of the bars and the measured medians."""
    if not record["bars"]:
        return tag("p", "None for this device.")
    rows = [
        [
            name,
            f"{'≥' if bar.get('least') else '≤'} {significant(bar['bar'], 4)}",
            significant(bar["median"], 4),
            "holds" if bar["holds"] else tag("b", "missed"),
        ]
        for name, bar in record["bars"].items()
    ]
    return table(["", "bar", "found", ""], rows, numbers=(2,))


def every_sample(record: Mapping[str, Any]) -> Markup:
    """Table of all times, in the order of measurement."""
    rows = [
        [letter, passes.replace("_", " + "), name, ", ".join(f"{ms:.2f}" for ms in entry["samples_ms"])]
        for letter, work in _workloads(record)
        for passes in ("forward_backward", "forward")
        for name, entry in _timed(work, passes).items()
    ]
    return table(["", "", "", "ms"], rows)


# ---- parts ---------------------------------------------------------------------------------------------


def _size(record: Mapping[str, Any], name: str) -> str:
    size = record["sizes"][name]
    return f"{name}: {size['tokens']} × {size['dimension']}, vocabulary {size['vocabulary']}"


def _workloads(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from record["workloads"].items()


def _timed(work: Mapping[str, Any], passes: str = "forward_backward") -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in work[passes]["contenders"].items() if "ratio" in entry}


def _mark(axes: Axes, entry: Mapping[str, Any], x: float, y: float) -> None:
    number = KINDS[entry["kind"]]
    hollow = entry["memory"] != "chunk"
    axes.plot(
        [x],
        [y],
        marker=style.MARKERS[number],
        markersize=5,
        linestyle="none",
        color=style.SERIES[number],
        markerfacecolor="#ffffff" if hollow else style.SERIES[number],
    )


def _ratio_ticks(axis: Any, limits: tuple[float, float]) -> None:
    axis.set_major_locator(FixedLocator([value for value in RATIO_TICKS if limits[0] <= value <= limits[1]]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _legend(figure: Figure) -> None:
    handles = [
        Line2D([], [], label=kind, marker=style.MARKERS[number], linestyle="none", color=style.SERIES[number])
        for kind, number in KINDS.items()
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=7.5, labelcolor=style.INK
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page of a folder given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.head.page", description="Write report.html from the records of a folder."
    )
    parser.add_argument("folder", type=Path, help="has head.json, and optionally head_parallel.json")
    return write_head_report(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
