"""The page of a record of `measure`: error against time for every choice of precision, and where the error is.

``python -m experiments.precision.page`` writes a page beside every saved record.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.pages import provenance
from workbench.atomic import from_json, write_whole
from workbench.errors import listed
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document, drawing

RECORD = Path(__file__).with_name("precision.json")
TRUTH, UNIT = "float64", "bf16_mixed"
QUESTION = "What does each choice of precision cost?"
WHAT = (
    "Each choice takes one gradient from the same weights, with the clip decisions of the float64 run, and then trains "
    "for some steps (update: all weights after them, minus those before). Its error is its distance from the float64 "
    "run, relative; in the table in units of bf16_mixed. "
    "Flips: tokens whose own clip decision is another. Unmoved: weights that did not change after the steps although "
    "the float64 run's did: updates below one unit in the last place. Unseen: weights that a bfloat16 sampler, which "
    "gets a rounded copy, cannot tell from those before the steps. Bytes: of weights, copies, gradients and moments "
    "per parameter. A format that is emulated has real values, and its time is not that of the format."
)
CAPTION = (
    "Error of the gradient against the time of a step, both logarithmic; a choice to the lower left is better. Hollow: "
    "emulated GEMMs, whose time says nothing."
)
PAGES = {"precision": "report", "qwen3_0.6b": "qwen3_0.6b", "qwen3_8b": "qwen3_8b"}
"""Record -> its page."""


def measured(record: Mapping[str, Any]) -> dict[str, Any]:
    """Choices of a record that ran, and their entries."""
    return {name: entry for name, entry in record["choices"].items() if "left_out" not in entry}


def load_record(path: Path = RECORD) -> Mapping[str, Any]:
    """Read the record."""
    record: Mapping[str, Any] = from_json(path.read_text())
    return record


def median_of(entry: Mapping[str, Any], key: str) -> float:
    """Median of a measure over the batches of a choice."""
    return float(statistics.median(batch[key] for batch in entry["batches"]))


def in_units(record: Mapping[str, Any], name: str, key: str) -> str:
    """Return an error in units of that of bf16_mixed."""
    entries = record["choices"]
    return significant(median_of(entries[name], key) / median_of(entries[UNIT], key), 2)


ERRORS = ("gradient_error", "update_error", "logprob_mean_nats", "loss_error")
COLUMNS = ("gradient", "update", "log-probabilities", "loss", "flips", "unmoved", "unseen", "bytes", "GiB", "ms")


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """One row a choice: its name and `COLUMNS`."""
    result = []
    for name, entry in measured(record).items():
        if name == TRUTH:
            continue
        errors = [in_units(record, name, key) for key in ERRORS]
        shares = [f"{100 * median_of(entry, key):.0f} %" for key in ("unmoved", "unseen_by_bf16_sampler")]
        flips = sum(batch["clip_flips"] for batch in entry["batches"])
        cost = [
            f"{entry['bytes_per_parameter']:.4g}",
            "-" if entry["peak_gib"] is None else f"{entry['peak_gib']:.1f}",
            f"{entry['step_ms']:.0f}{'*' if entry['emulated'] else ''}",
        ]
        result.append([name, *errors, str(flips), *shares, *cost])
    return result


def error_against_time(record: Mapping[str, Any]) -> Figure:
    """Draw each choice at its time and error."""
    figure = style.chart(4.4)
    axes = style.tidy(figure.subplots(), x="milliseconds of a step", y="relative error of the gradient")
    kinds, hues = style.MARKERS, style.SERIES
    for at, (name, entry) in enumerate((name, e) for name, e in measured(record).items() if name != TRUTH):
        axes.plot(
            entry["step_ms"],
            median_of(entry, "gradient_error"),
            marker=kinds[at % len(kinds)],
            color=hues[(at + 3 * (at // len(kinds))) % len(hues)],
            linestyle="none",
            markersize=7,
            fillstyle="none" if entry["emulated"] else "full",
            label=name,
        )
    axes.set(xscale="log", yscale="log")
    style.log_ticks(axes.yaxis)
    style.plain_ticks(axes.xaxis, 4)
    axes.xaxis.set_minor_formatter(axes.xaxis.get_major_formatter())
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=7, labelcolor=style.INK)
    return figure


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences with their numbers."""
    entries = measured(record)
    unit, pure, rowwise = (entries[name] for name in (UNIT, "bf16_pure", "fp8_rowwise"))
    emulated = sorted({each for entry in entries.values() for each in entry["emulated"]})
    missing = sorted(record["choices"].keys() - entries.keys())
    return (
        f"bf16_mixed has a gradient error of {significant(median_of(unit, 'gradient_error'), 2)}, float32 of "
        f"{significant(median_of(entries['float32'], 'gradient_error'), 2)} and FP8 with a scale a row "
        f"{in_units(record, 'fp8_rowwise', 'gradient_error')} times that of bf16_mixed. Weights in "
        f"bfloat16 have the same gradient, and lose {100 * median_of(pure, 'unmoved'):.0f} % of the updates of "
        f"{record['steps']} steps at a rate of {record['base']['optimizer']['learning_rate']:g}. With float32 masters "
        f"the updates arrive, and a bfloat16 sampler still sees no change in "
        f"{100 * median_of(unit, 'unseen_by_bf16_sampler'):.0f} % of the weights. A step takes "
        f"{unit['step_ms']:.0f} ms in bf16_mixed and {rowwise['step_ms']:.0f} ms in fp8_rowwise; emulated formats (*): "
        f"{', '.join(emulated) or 'none'}.{f' Left out: {listed(missing)}.' if missing else ''}"
    )


def page(record: Mapping[str, Any]) -> str:
    """Render the page as one self-contained HTML file; the same record gives the same bytes."""
    errors = join(
        [
            tag("p", f"{record['what']}. {WHAT}"),
            drawing("error_against_time", CAPTION, error_against_time(record)),
            table(["choice", *COLUMNS], rows(record), numbers=range(1, 1 + len(COLUMNS))),
        ]
    )
    left = [[name, tag("code", e["left_out"])] for name, e in record["choices"].items() if "left_out" in e]
    sections = [
        ("Errors", errors),
        ("Parameters that lose most", _worst(record)),
        *([("Left out", table(["choice", "why"], left))] if left else []),
        ("Provenance", provenance(record)),
    ]
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "precision"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    return document("precision", [masthead], sections)


def _worst(record: Mapping[str, Any]) -> Markup:
    most = 10 * max(batch["gradient_error"] for batch in record["choices"][UNIT]["batches"])

    def cause(entry: Mapping[str, Any], worst: Mapping[str, Any]) -> str:
        """Rounding to 7 bits and more explains no error far above that of bf16_mixed."""
        far = worst["error"] > most and entry["coarsest"] != "float8"
        return "not explained" if worst["cause"] == "rounding" and far else str(worst["cause"])

    lines = [
        [name if not at else "", tag("code", worst["parameter"]), significant(worst["error"], 2), cause(entry, worst)]
        for name, entry in measured(record).items()
        for at, worst in enumerate(entry["worst_parameters"])
    ]
    return table(["choice", "parameter", "relative error", "explained by"], lines, numbers=[2])


if __name__ == "__main__":
    for record_name, page_name in PAGES.items():
        shown = page(load_record(RECORD.with_name(f"{record_name}.json")))
        write_whole(RECORD.with_name(f"{page_name}.html"), shown.encode())
