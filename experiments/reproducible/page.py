"""Page of the cost and the bits of the reproducible mode: the record of `workbench bench reproducible`.

`python -m experiments.reproducible.page FOLDER` writes the page of a folder's record again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.pages import expect_benchmark, facts_table
from workbench.atomic import from_json, write_whole
from workbench.errors import RecordError
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, significant
from workbench.report.page import CPU_CAPTION, document, drawing
from workbench.specs.reading import flatten

MODES = ("fast", "reproducible")
CAPTION = (
    "What the GPU does in one optimizer step of one rank, by what its kernels are for, above in the fast mode, "
    "below in the reproducible one. In the fast mode weight gradients are among the matrix products. Kernels of "
    "several streams run beside each other, so that a bar may be longer than the step."
)


def write_reproducible_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    expect_benchmark(record, "reproducible")
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "reproducible"), class_="eyebrow"),
        tag("h1", record["plan"]["question"]),
        tag("p", answer(record), class_="answer"),
    )
    sections: list[tuple[str, Any]] = [
        ("What it costs", costs(record)),
        ("Where the time goes", breakdown(record)),
        ("The same bits", bits(record)),
        ("Accuracy", accuracy(record)),
        ("Bars", bars(record)),
        ("What was measured", setting(record)),
        ("Every sample", every_sample(record)),
        ("Provenance", provenance(record)),
    ]
    return document("reproducible", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences."""
    compared = [entry["same"] for _, _, _, entry in _entries(record) if "same" in entry]
    sentences = []
    if compared:
        alike = {mode: sum(same[mode]["equal"] == same[mode]["tensors"] for same in compared) for mode in MODES}
        sentences.append(
            f"Of {len(compared)} runs of a workload in a layout, {alike['reproducible']} have every bit of one "
            f"rank's in the reproducible mode, {alike['fast']} in the fast one."
        )
    for _, name, layout, entry in _entries(record):
        if "timed" in entry and layout == "one_rank":
            fast, exact = (entry["timed"][mode] for mode in MODES)
            sentences.append(
                f"{name}: {exact['step_ms'] / fast['step_ms']:.2f} times the time of the fast mode, "
                f"{exact['peak_gib'] / fast['peak_gib']:.2f} times its memory."
            )
    if missed := [name for name, bar in record["bars"].items() if sentences and not bar["holds"]]:
        sentences.append(f"Of {len(record['bars'])} bars {len(missed)} are missed: {'; '.join(missed)}.")
    return " ".join(sentences) or "Nothing was measured."


def costs(record: Mapping[str, Any]) -> Markup:
    """Table of time and memory of both modes in each timed layout."""
    rows = []
    for machine, name, layout, entry in _entries(record):
        if "timed" in entry:
            fast, exact = (entry["timed"][mode] for mode in MODES)
            rows.append(
                [
                    tag("b", name),
                    layout,
                    machine["gpus"],
                    significant(fast["step_ms"], 4),
                    significant(exact["step_ms"], 4),
                    f"{exact['step_ms'] / fast['step_ms']:.2f}",
                    significant(fast["peak_gib"], 3),
                    significant(exact["peak_gib"], 3),
                    f"{exact['peak_gib'] / fast['peak_gib']:.2f}",
                ]
            )
    left_out = [
        tag("p", tag("b", f"{name}, {layout}"), f": left out ({entry['left_out']})", class_="caution")
        for _, name, layout, entry in _entries(record)
        if "left_out" in entry
    ]
    on_gpu = any(machine["gpus"] for machine in record["machines"])
    return join(
        [
            table(
                [
                    "",
                    "layout",
                    "GPUs",
                    "fast, ms",
                    "reproducible, ms",
                    "times",
                    "fast, GiB",
                    "reproducible, GiB",
                    "times",
                ],
                rows,
                numbers=range(2, 9),
            ),
            None if on_gpu else tag("p", CPU_CAPTION),
            left_out,
        ]
    )


def breakdown(record: Mapping[str, Any]) -> Markup:
    """Time by purpose of the kernels, in both modes, of every timed entry of one rank."""
    parts = []
    for machine, name, layout, entry in _entries(record):
        if layout != "one_rank" or "groups_ms" not in entry.get("timed", {}).get("fast", {}):
            continue
        groups = {mode: entry["timed"][mode]["groups_ms"] for mode in MODES}
        rows = [
            [
                group,
                *(significant(groups[mode][group], 3) for mode in MODES),
                significant(groups["reproducible"][group] - groups["fast"][group], 3),
            ]
            for group in groups["fast"]
        ]
        rows.append(
            [
                tag("b", "all kernels"),
                *(significant(sum(groups[mode].values()), 4) for mode in MODES),
                significant(sum(groups["reproducible"].values()) - sum(groups["fast"].values()), 3),
            ]
        )
        rows.append(
            [
                "kernels",
                *(entry["timed"][mode]["kernels"] for mode in MODES),
                entry["timed"]["reproducible"]["kernels"] - entry["timed"]["fast"]["kernels"],
            ]
        )
        parts += [
            tag("h3", f"{name}, {machine['gpus']} × {machine['device']}"),
            drawing(f"time_of_{name}_{machine['gpus']}", CAPTION, stacked(groups)),
            table(["ms of the GPU", *MODES, "more"], rows, numbers=(1, 2, 3)),
        ]
    return join(parts) if parts else tag("p", "Not measured without a GPU.")


def stacked(groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw both modes as bars, divided by purpose of the kernels."""
    figure = style.chart(2.2)
    axes = figure.subplots()
    style.tidy(axes, grid="x", x="ms of the GPU in one step")
    shades = dict(zip(groups["fast"], style.SERIES, strict=False))
    for row, mode in enumerate(MODES):
        left = 0.0
        for group, milliseconds in groups[mode].items():
            axes.barh(
                row,
                milliseconds,
                left=left,
                height=0.6,
                color=shades[group],
                edgecolor="#ffffff",
                linewidth=0.6,
                label=None if row else group,
            )
            left += milliseconds
    axes.set_yticks(range(len(MODES)), list(MODES))
    axes.set_ylim(len(MODES) - 0.5, -0.5)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=7.5, labelcolor=style.INK)
    return figure


def bits(record: Mapping[str, Any]) -> Markup:
    """Table of the tensors that each layout has in common with one rank, in both modes."""
    rows = []
    for machine, name, layout, entry in _entries(record):
        if "same" in entry:
            same, last = entry["same"], entry["steps"]["reproducible"][-1]
            where = ", its ranks in turns on one GPU" if "simulated" in entry else ""
            rows.append(
                [
                    tag("b", name),
                    tag("span", layout, tag("br"), entry["layout"], where),
                    machine["gpus"],
                    *(f"{same[mode]['equal']} of {same[mode]['tensors']}" for mode in reversed(MODES)),
                    tag("code", last["certificate"][:12]),
                    tag("code", same["fast"]["first"] or NONE),
                ]
            )
    return join(
        [
            tag(
                "p",
                "Log-probabilities, loss, every gradient and every weight after each optimizer step; equal "
                "certificates are equal bits of all of them in the last step.",
            ),
            table(
                [
                    "",
                    "layout",
                    "GPUs",
                    "reproducible: same bits as one rank",
                    "fast",
                    "last certificate",
                    "first of other bits in the fast mode",
                ],
                rows,
                numbers=(2, 3, 4),
            ),
        ]
    )


def accuracy(record: Mapping[str, Any]) -> Markup:
    """Table of distances of gradients from a truth of higher precision, with the truth's clip decisions."""
    rows = [
        [
            tag("b", name),
            record["plan"]["workloads"][name]["truth"],
            machine["gpus"],
            *(significant(entry["accuracy"][mode], 3) for mode in MODES),
            f"{entry['accuracy']['factor']:.3f}",
        ]
        for machine, name, _, entry in _entries(record)
        if "accuracy" in entry
    ]
    return table(
        ["", "truth in", "GPUs", "fast: error of the whole gradient", "reproducible", "times"],
        rows,
        numbers=(2, 3, 4, 5),
    )


def bars(record: Mapping[str, Any]) -> Markup:
    """Table of the bars."""
    return table(
        ["", "worst", "at most", ""],
        [
            [
                name,
                significant(bar["median"], 3),
                significant(bar["bar"], 3),
                "holds" if bar["holds"] else tag("b", "missed"),
            ]
            for name, bar in record["bars"].items()
        ],
        numbers=(1, 2),
    )


def setting(record: Mapping[str, Any]) -> Markup:
    """Describe models, documents and resolutions."""
    plan, lines = record["plan"], []
    for name, workload in plan["workloads"].items():
        model, exact = plan["models"][workload["model"]], workload["reproducible"]
        lines.append(
            f"{name}: {model['name']} with {model['layers']} layers, {workload['precision']}, {workload['rows']} "
            f"packed rows of {workload['row_tokens']} tokens, documents of {workload['document_tokens'][0]} to "
            f"{workload['document_tokens'][1]}; blocks of {exact['block_tokens']} tokens, "
            f"{exact['weight_chunks']} pieces of a weight, {exact['bits']} bits after the point."
        )
    lines.append(
        f"Weights and documents from seed {plan['seed']}; the old policy finds every token as likely as any, "
        "give or take 0.3 nats. Loss: GRPO, clipped below 0.8 and above 1.28. A step: forward, backward, "
        "reduction, clipping to norm 1 and AdamW; both modes in the same process, two steps each before the "
        "timed ones."
    )
    return join([tag("p", line) for line in lines])


def every_sample(record: Mapping[str, Any]) -> Markup:
    """Table of all times, in the order of measurement."""
    rows = [
        [
            name,
            layout,
            mode,
            ", ".join(f"{ms:.1f}" for ms in entry["timed"][mode]["warm_ms"]),
            ", ".join(f"{ms:.1f}" for ms in entry["timed"][mode]["samples_ms"]),
        ]
        for _, name, layout, entry in _entries(record)
        if "timed" in entry
        for mode in MODES
    ]
    return table(["", "", "", "before, ms", "steps, ms"], rows)


def provenance(record: Mapping[str, Any]) -> Markup:
    """Table of versions, git state, command and machines."""
    facts: dict[str, Any] = {"command": record.get("command")}
    for machine in record["machines"]:
        of = f"{machine['gpus']} GPUs, {' and '.join(machine['workloads'])}"
        facts |= {f"{of}: {key}": value for key, value in flatten(machine["provenance"]).items()}
    return facts_table(facts)


def _entries(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, str, Mapping[str, Any]]]:
    """Iterate over machine, workload, layout and result."""
    for machine in record["machines"]:
        for name, layouts in machine["workloads"].items():
            for layout, entry in layouts.items():
                yield machine, name, layout, entry


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page of a folder given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.reproducible.page", description="Write report.html from the record of a folder."
    )
    parser.add_argument("folder", type=Path, help="has reproducible.json")
    folder = parser.parse_args(arguments).folder
    if not (folder / "reproducible.json").exists():
        raise RecordError(
            f"report {folder}",
            found="no reproducible.json",
            rule="the page is of a measurement",
            fix="run workbench bench reproducible first",
        )
    return write_reproducible_report(from_json((folder / "reproducible.json").read_text()), folder)


if __name__ == "__main__":
    main()
