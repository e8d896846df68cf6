"""Page of the cost and parity of layouts: the record of `workbench bench layouts` with every sample.

`python -m experiments.gpu_layouts.page FOLDER` writes the page of a folder's record again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.pages import expect_benchmark, provenance
from workbench.atomic import from_json, write_whole
from workbench.errors import RecordError
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import CPU_CAPTION, document, drawing

CAPTION = (
    "One optimizer step of the same documents in every layout. Left: each timed step, the median filled. "
    "Middle: the rank that needs most. Right: distance of the whole gradient from the truth over that of one "
    "rank; right of the dotted line a layout is out of its budget."
)
PANELS = (
    ("step_ms", "ms a step"),
    ("peak_gib", "GiB at the peak"),
    ("distance", "distance to the truth, one rank = 1"),
)
WHOLE_BUDGET = 1.5


def write_layout_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    expect_benchmark(record, "layouts")
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "gpu_layouts"), class_="eyebrow"),
        tag("h1", record["plan"]["question"]),
        tag("p", answer(record), class_="answer"),
    )
    sections: list[tuple[str, Any]] = [(title(record, name), workload(record, name)) for name in record["workloads"]]
    sections += [
        ("What was measured", setting(record)),
        ("Every sample", every_sample(record)),
        ("Provenance", provenance(record, minutes=f"{record['minutes']:.1f}")),
    ]
    return document("gpu_layouts", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences."""
    sentences = []
    for name, layouts in record["workloads"].items():
        ran = _ran(layouts)
        if not ran:
            sentences.append(f"{name}: nothing was measured.")
            continue
        agreeing = sum(entry["parity"]["within"] for entry in ran.values())
        fastest = max(ran, key=lambda layout: ran[layout]["tokens_per_second"])
        sentences.append(
            f"{name}: {agreeing} of {len(ran)} layouts are within the budget of one rank's own rounding; "
            f"fastest is {fastest} with {significant(ran[fastest]['tokens_per_second'], 3)} tokens a second, "
            f"efficiency {ran[fastest]['efficiency']:.2f}."
        )
    where = f"{record['gpus']} × {record['device']}" if record["gpus"] else "CPU"
    return f"On {where}. {' '.join(sentences)}"


def title(record: Mapping[str, Any], name: str) -> str:
    """Short description of a workload."""
    settings = record["plan"]["workloads"][name]
    return f"{settings['precision']}, {settings['rows']} packed rows of {settings['row_tokens']} tokens"


def workload(record: Mapping[str, Any], name: str) -> Markup:
    """Figure and table of one workload, and layouts left out with the reason."""
    layouts = record["workloads"][name]
    left_out = [
        tag("p", tag("b", layout), f": left out ({entry['left_out']})", class_="caution")
        for layout, entry in layouts.items()
        if "left_out" in entry
    ]
    ran = _ran(layouts).items()
    if not ran:
        return join(left_out)
    cost = [
        [
            _named(layout, entry),
            entry["ranks"],
            significant(entry["step_ms"], 4),
            significant(entry["tokens_per_second"], 4),
            f"{entry['efficiency']:.2f}",
            significant(entry["peak_gib"], 3),
            f"{entry['attention_max_over_mean']:.2f}",
            f"{entry['attention_in_lock_step']:.2f}",
            f"{entry['padding']:.1%}",
        ]
        for layout, entry in ran
    ]
    parity = [
        [
            tag("b", layout),
            significant(entry["parity"]["distance"] / entry["parity"]["norm"], 2),
            f"{entry['parity']['distance_in_one_ranks']:.2f}",
            f"{entry['parity']['worst_in_one_ranks']:.2f}",
            tag("code", entry["parity"]["worst_parameter"]),
            significant(entry["parity"]["logprobs_apart_nats"], 2),
            entry["parity"]["flipped_clips"],
            "within" if entry["parity"]["within"] else tag("b", "over"),
        ]
        for layout, entry in ran
    ]
    return join(
        [
            drawing(f"layouts_{name}", CAPTION, costs(layouts)),
            None if record["gpus"] else tag("p", CPU_CAPTION),
            table(
                [
                    "",
                    "ranks",
                    "ms",
                    "tokens / s",
                    "efficiency",
                    "GiB",
                    "attention of the slowest over the mean",
                    "in a ring",
                    "padding",
                ],
                cost,
                numbers=range(1, 9),
            ),
            tag("h3", "Parity"),
            table(
                [
                    "",
                    "error of the gradient",
                    "in one rank's",
                    "worst parameter, in one rank's",
                    "which",
                    "log-probabilities apart, nats",
                    "flipped clips",
                    "",
                ],
                parity,
                numbers=(1, 2, 3, 5, 6),
            ),
            left_out,
        ]
    )


def _named(layout: str, entry: Mapping[str, Any]) -> Markup:
    return tag("span", tag("b", layout), tag("br"), entry["layout"])


def costs(layouts: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw time, memory and distance to the truth of every layout that ran."""
    ran = _ran(layouts)
    figure = style.chart(1.0 + 0.22 * len(ran))
    panels = style.panels(figure, len(PANELS), sharey=True)
    ranks = sorted({entry["ranks"] for entry in ran.values()})
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        style.tidy(axes, grid="x", x=label)
        for row, entry in enumerate(ran.values()):
            number = ranks.index(entry["ranks"])
            look = {
                "color": style.SERIES[number],
                "marker": style.MARKERS[number],
                "linestyle": "none",
                "markersize": 5,
            }
            if key == "step_ms":
                axes.plot(entry["samples_ms"], [row] * len(entry["samples_ms"]), **look, markerfacecolor="#ffffff")
            value = entry["parity"]["distance_in_one_ranks"] if key == "distance" else entry[key]
            axes.plot([value], [row], **look, label=f"{entry['ranks']} rank{'s' * (entry['ranks'] > 1)}")
        if key == "distance":
            axes.axvline(WHOLE_BUDGET, color=style.MUTED, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.08 * axes.dataLim.x1)
        style.plain_ticks(axes.xaxis, 4)
    panels[0].set_yticks(range(len(ran)), list(ran))
    panels[0].set_ylim(len(ran) - 0.5, -0.5)
    handles = dict(zip(*reversed(panels[-1].get_legend_handles_labels()), strict=True))
    figure.legend(
        handles=list(handles.values()),
        labels=list(handles),
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        fontsize=7.5,
        labelcolor=style.INK,
    )
    return figure


def setting(record: Mapping[str, Any]) -> Markup:
    """Describe model, documents, old policy and truths."""
    plan = record["plan"]
    old = plan["old_policy"]
    lines = [
        f"Model: {plan['model']}, weights drawn from seed {plan['seed']}. Old policy: each weight moved by "
        f"{old['relative']:g} standard deviations of its tensor times a normal number from seed {old['seed']}. "
        "Loss: GRPO, clipped below 0.8 and above 1.28, per-token mean over the step; its gradient is made in the "
        "forward pass over the head. Efficiency: time of one rank over ranks times time. Each time is of forward, "
        "backward, reduction and an optimizer step (learning rate 0)."
    ]
    for name, settings in plan["workloads"].items():
        drawn, truth = record["rollouts"][name], settings["truth"]
        lines.append(
            f"{name}: {drawn['documents']} documents of {settings['document_tokens'][0]} to "
            f"{settings['document_tokens'][1]} tokens, {drawn['tokens']} in all, {drawn['trained_tokens']} "
            "trained; log-probabilities of old and present policy "
            f"{significant(drawn['old_policy_apart_nats'], 2)} nats apart on average, "
            f"{drawn['clipped']:.0%} of trained tokens clipped. Truth: one rank in {truth['precision']}, "
            f"rows of {truth['row_tokens']} tokens; clip decisions are the truth's."
        )
    return join([tag("p", line) for line in lines])


def every_sample(record: Mapping[str, Any]) -> Markup:
    """Table of all times, in the order of measurement, and of the time to prepare rows on the host."""
    rows = [
        [layout, name, ", ".join(f"{ms:.1f}" for ms in entry["samples_ms"]), f"{entry['prepare_ms']:.0f}"]
        for name, layouts in record["workloads"].items()
        for layout, entry in _ran(layouts).items()
    ]
    return table(["", "", "steps, ms", "preparing rows, ms"], rows, numbers=(3,))


def _ran(layouts: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in layouts.items() if "left_out" not in entry}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page of a folder given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu_layouts.page", description="Write report.html from the record of a folder."
    )
    parser.add_argument("folder", type=Path, help="has layouts.json")
    folder = parser.parse_args(arguments).folder
    if not (folder / "layouts.json").exists():
        raise RecordError(
            f"report {folder}",
            found="no layouts.json",
            rule="the page is of a measurement",
            fix="run workbench bench layouts first",
        )
    return write_layout_report(from_json((folder / "layouts.json").read_text()), folder)


if __name__ == "__main__":
    main()
