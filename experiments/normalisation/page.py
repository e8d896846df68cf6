"""Effect of denominators: one batch under all of them, and training with a gradient that is divided once too often.

Ablations whose runs differ on purpose, so there are no verdicts: every run is a baseline run of its own, and the
page shows their records. `python -m experiments.normalisation.page FOLDER` writes ``FOLDER/report.html`` from
``FOLDER/PART/comparison.json`` of each of `PARTS`.

M, everywhere here: documents of the optimizer step with a trained token.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.normalisation import thousand
from workbench.atomic import write_whole
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.reduction.denominators import DENOMINATORS
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, near_one, significant
from workbench.report.page import differences, document, drawing, provenance
from workbench.specs.losses import with_compat

LOSS, NORM, COEFFICIENT = "loss/total/sum", "gradient/norm/global", "gradient/clip/coefficient"
MOVED, DOCUMENTS = "kl/old_policy/k3_mean", "documents/trained/sum"
PARTS = ("one_batch", "fifty_steps", "thousand_documents", "counted_twice")
COLUMNS = ("divisor", "loss", "norm", "coefficient", "norm_by_documents", "coefficient_by_documents")
QUESTION = "What does the denominator of a loss decide, and what shows that the gradient has another?"
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
DIVISORS = {
    "token": "T",
    "document": "M L",
    "document_sum": "M",
    "constant": "M C",
    "prompt_group": "P Tₚ",
    "rollout": "R Tᵣ",
    "group_length": "Lₚ",
    "raw": "1",
    "local_token": "B Tₘ",
}
LETTERS = (
    "Trained tokens: T of the step, L of the document, Tₚ of all completions of the prompt, Tᵣ of the rollout, Tₘ of "
    "the micro-batch. M documents, P prompts, R rollouts, B micro-batches of the step. Lₚ mean length of the "
    "completions of the prompt, prompt included. C a constant of the settings."
)
WHY = (
    "SGD moves by learning rate times gradient: for it, a gradient divided by M is a learning rate divided by M. AdamW "
    "divides a constant factor of the gradient out again, but for its epsilon. A clip at a fixed norm brings the "
    "factor back: it cuts one of the two gradients to the same length at every step, and leaves the other, which is "
    "below that norm, as it is."
)
CAPTIONS = {
    "norms_by_denominator": "L2 norm of the whole gradient before clipping, one batch, one policy. Filled: the "
    "gradient of the loss that is reported. Hollow: divided by M once more. Right of the line "
    "the optimizer gets threshold ÷ norm of it, left of it all.",
    "training": "The same rollouts at every step. Left of a row its optimizer; the two lines differ in nothing but the "
    "weight of the gradient. Norms are those before clipping; the clip coefficient is what the optimizer's "
    "gradient is multiplied with; KL is how far the policy has moved from the one that sampled (k3, mean over "
    "trained tokens).",
}


def write_normalisation(folder: Path) -> Path:
    """Write ``report.html`` of a folder with its comparisons, atomically.

    Raises:
        RecordError: a comparison is missing, or none of its runs succeeded.
    """
    return write_whole(Path(folder) / "report.html", page(*load_parts(folder)).encode())


def load_parts(folder: Path) -> list[Comparison]:
    """Read the comparisons of a folder, in the order of `PARTS`."""
    return [Comparison.load(Path(folder) / part / "comparison.json") for part in PARTS]


def page(one_batch: Comparison, fifty_steps: Comparison, documents: Comparison, counted: Comparison) -> str:
    """Render the page as one self-contained HTML file; the same comparisons give the same bytes."""
    parts = {"One batch": one_batch, "Training": fifty_steps, "Thousand documents": documents, "Counted twice": counted}
    sections = [
        ("One batch under every denominator", denominators_section(one_batch)),
        ("Training with the gradient divided once more", training_section(fifty_steps)),
        ("A thousand documents a step", thousand.section(documents, counted)),
        ("Settings", join(join([tag("h3", name), differences(c)]) for name, c in parts.items())),
        ("Provenance", join(join([tag("h3", name), provenance(c)]) for name, c in parts.items())),
    ]
    answers = [
        tag("p", sentence, class_="answer")
        for sentence in (answer_of_batch(one_batch), answer_of_training(fifty_steps), thousand.answer(documents))
    ]
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "normalisation"), class_="eyebrow"),
        tag("h1", QUESTION),
        answers,
    )
    return document("normalisation", [masthead], sections)


# ---- one batch -----------------------------------------------------------------------------------------


def denominator_table(comparison: Comparison, *, step: int = 0) -> pd.DataFrame:
    """Loss, gradient norm and clip coefficient of one step, one row per denominator, smallest norm first.

    Columns: ``divisor`` (letters as in `LETTERS`), ``loss``, ``norm`` and ``coefficient``, and the last two again with
    the suffix ``_by_documents``, with the gradient divided by M once more. None for runs that do not exist.

    Raises:
        RecordError: no run of the comparison succeeded.
    """
    rows: dict[str, dict[str, Any]] = {}
    for c in _succeeded(comparison):
        name, record = c.settings["loss"]["denominator"], c.steps[step]
        row = rows.setdefault(name, dict.fromkeys(COLUMNS) | {"divisor": DIVISORS[name]})
        twice = "_by_documents" if _divided_twice(c.settings["loss"]) else ""
        row |= {"loss": record[LOSS], f"norm{twice}": record[NORM], f"coefficient{twice}": record[COEFFICIENT]}
    names = sorted(rows, key=lambda name: rows[name]["norm"] or rows[name]["norm_by_documents"])
    index = pd.Index(names, name="denominator")  # objects, so that missing values stay None
    return pd.DataFrame(
        {column: pd.Series([rows[name][column] for name in names], index, dtype=object) for column in COLUMNS}
    )


def norms_by_denominator(comparison: Comparison) -> Figure:
    """Draw the gradient norm of one batch under every denominator, against the threshold of the clip."""
    rows, threshold = denominator_table(comparison), _threshold(comparison)
    figure = style.chart(0.95 + 0.27 * len(rows))
    axes = style.tidy(
        figure.subplots(),
        title="gradient norm of one batch, logarithmic",
        grid="x",
        x="L2 norm over all parameters, before clipping",
    )
    axes.set_xscale("log")
    for row, (_, numbers) in enumerate(rows.iterrows()):
        at = [numbers["norm_by_documents"], numbers["norm"]]
        if None not in at:
            axes.plot(at, [row, row], color=style.LINE, linewidth=2, zorder=1)
        for norm, hollow in zip(at, (True, False), strict=True):
            if norm is not None:
                axes.plot(
                    [norm],
                    [row],
                    marker="o",
                    markersize=6,
                    linestyle="none",
                    color=style.SERIES[0],
                    markerfacecolor="#ffffff" if hollow else style.SERIES[0],
                )
        labels = [_coefficient(numbers[key]) for key in ("coefficient", "coefficient_by_documents")]
        axes.text(
            1.01,
            row,
            " · ".join(labels),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=7.5,
            color=style.INK,
        )
    axes.text(
        1.01,
        -0.85,
        "clip coefficient · with M once more",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=7,
        color=style.MUTED,
    )
    if threshold is not None:
        axes.axvline(threshold, color=style.INK, linewidth=0.9)
        axes.annotate(
            f"threshold {significant(threshold, 1)}",
            (threshold, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            fontsize=7,
            color=style.INK,
        )
    style.log_ticks(axes.xaxis)
    axes.set_yticks(range(len(rows)), list(rows.index))
    axes.set_ylim(len(rows) - 0.4, -1.2)
    axes.tick_params(axis="y", colors=style.INK)
    return figure


def answer_of_batch(comparison: Comparison) -> str:
    """Summarize one batch in two sentences with its numbers."""
    rows, documents = denominator_table(comparison), _documents(comparison)
    plain = rows[rows["norm"].notna()].sort_values("norm")
    low, high = plain.iloc[0], plain.iloc[-1]
    clipped = int((plain["coefficient"] < 1).sum())
    twice = rows[rows["coefficient_by_documents"].notna()]
    acts_twice = int((twice["coefficient_by_documents"] < 1).sum())
    return (
        f"One batch of {documents} documents has a gradient norm of {significant(low['norm'])} under {low.name} "
        f"and of {significant(high['norm'])} under {high.name}; a clip at {significant(_threshold(comparison), 1)} "
        f"acts under {clipped} of {len(plain)} denominators, and leaves {significant(high['coefficient'], 2)} of "
        f"the gradient under {high.name}. With the gradient divided by M once more it acts under {acts_twice} of "
        f"{len(twice)}, and the loss that is logged is the same."
    )


def denominators_section(comparison: Comparison) -> Markup:
    """Figure and table of one batch."""
    rows = [
        [
            tag("code", name),
            row["divisor"],
            significant(row["loss"]),
            significant(row["norm"]),
            _coefficient(row["coefficient"]),
            significant(row["norm_by_documents"]),
            _coefficient(row["coefficient_by_documents"]),
        ]
        for name, row in denominator_table(comparison).iterrows()
    ]
    head = [
        "denominator",
        "divides by",
        "loss",
        "gradient norm",
        "clip coefficient",
        "norm, gradient ÷ M",
        "clip coefficient",
    ]
    return join(
        [
            tag("p", comparison.question),
            _drawn("norms_by_denominator", norms_by_denominator(comparison)),
            table(head, rows, numbers=range(2, 7)),
            tag("p", LETTERS),
            _left_out(comparison),
        ]
    )


# ---- training ------------------------------------------------------------------------------------------


def training(comparison: Comparison) -> Figure:
    """Draw loss, gradient norm, clip coefficient and KL by step: a row per optimizer, a line per gradient weight."""
    rows = _by_optimizer(comparison)
    figure = style.chart(0.5 + 1.75 * len(rows))
    grid = figure.subplots(len(rows), 4, squeeze=False, sharex=True, sharey="col")
    quantities = (
        (LOSS, "loss", "linear"),
        (NORM, "gradient norm, logarithmic", "log"),
        (COEFFICIENT, "clip coefficient, logarithmic", "log"),
        (MOVED, "KL(old ‖ policy), nats", "linear"),
    )
    for (optimizer, lines), panels in zip(rows.items(), grid, strict=True):
        for axes, (key, title, scale) in zip(panels, quantities, strict=True):
            last = panels is grid[-1]
            style.tidy(axes, title=optimizer if axes is panels[0] else " ", y=title, x="optimizer step" if last else "")
            for label, c in lines.items():
                _line(axes, c, key, label)
            axes.set_yscale(scale)
            (style.log_ticks if scale == "log" else style.plain_ticks)(axes.yaxis)
    labels = list(dict.fromkeys(label for lines in rows.values() for label in lines))
    handles = [Line2D([], [], label=label, linewidth=1.8, **_look(label)) for label in labels]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        fontsize=7.5,
        handlelength=3,
        labelcolor=style.INK,
    )
    return figure


def training_table(comparison: Comparison) -> pd.DataFrame:
    """Results of each run, one row per run, keyed by optimizer and weight of the gradient."""
    rows = {}
    for optimizer, lines in _by_optimizer(comparison).items():
        for label, c in lines.items():
            coefficients = [record[COEFFICIENT] for record in c.steps]
            rows[optimizer, label] = {
                "first_norm": c.steps[0][NORM],
                "median_norm": statistics.median(record[NORM] for record in c.steps),
                "median_coefficient": statistics.median(coefficients),
                "steps_clipped": sum(value < 1 for value in coefficients),
                "steps": len(c.steps),
                "first_loss": c.steps[0][LOSS],
                "last_loss": c.steps[-1][LOSS],
                "last_kl": c.steps[-1].get(MOVED),
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["optimizer", "weights"])


def answer_of_training(comparison: Comparison) -> str:
    """Largest difference between two runs with one loss and two gradients, by optimizer, in a sentence."""
    parts = []
    for optimizer, lines in _by_optimizer(comparison).items():
        if len(lines) > 1:
            one, other = (list(lines.values())[at].steps for at in (0, -1))
            apart = max(abs(a[LOSS] - b[LOSS]) for a, b in zip(one, other, strict=True))
            gained = abs(one[-1][LOSS] - one[0][LOSS])
            parts.append(f"{significant(100 * apart / gained if gained else None, 2)} % ({optimizer})")
    if not parts:
        return "No two runs have one optimizer and two weights of the gradient."
    documents = _documents(comparison)
    return (
        f"Trained side by side with one loss, but with the gradient of one divided by M = {documents} once "
        f"more, two runs come apart by at most this part of what the loss falls: {', '.join(parts)}."
    )


def training_section(comparison: Comparison) -> Markup:
    """Figure and table of training."""
    rows = [
        [
            f"{optimizer}; {weights}",
            significant(row["first_norm"]),
            significant(row["median_norm"]),
            _coefficient(row["median_coefficient"]),
            f"{int(row['steps_clipped'])} of {int(row['steps'])}",
            significant(row["last_loss"], 4),
            significant(row["last_kl"]),
        ]
        for (optimizer, weights), row in training_table(comparison).iterrows()
    ]
    head = [
        "run",
        "first gradient norm",
        "median norm",
        "median clip coefficient",
        "steps clipped",
        "last loss",
        "last KL, nats",
    ]
    return join(
        [
            tag("p", comparison.question, " ", WHY),
            _drawn("training", training(comparison)),
            table(head, rows, numbers=range(1, 7)),
            _failures(comparison),
        ]
    )


# ---- parts ---------------------------------------------------------------------------------------------


def _succeeded(comparison: Comparison) -> list[Configuration]:
    succeeded = [c for c in comparison.configurations if c.state == "succeeded" and c.steps]
    if not succeeded:
        raise RecordError(
            f"report {comparison.experiment}",
            found="no run that succeeded",
            rule="at least one run has recorded steps",
            fix="run the ablation again, and read why it failed",
        )
    return succeeded


def _documents(comparison: Comparison) -> int:
    return int(_succeeded(comparison)[0].steps[0][DOCUMENTS])


def _threshold(comparison: Comparison) -> float | None:
    return _succeeded(comparison)[0].settings["optimizer"]["max_grad_norm"]


def _by_optimizer(comparison: Comparison) -> dict[str, dict[str, Configuration]]:
    """Label of the optimizer -> label of the gradient weights -> the run."""
    runs: dict[str, dict[str, Configuration]] = {}
    for c in _succeeded(comparison):
        optimizer, loss = c.settings["optimizer"], c.settings["loss"]
        clip = optimizer["max_grad_norm"]
        label = f"{OPTIMIZERS.get(optimizer['name'], optimizer['name'])}, " + (
            "no clipping" if clip is None else f"clipped at {significant(clip, 1)}"
        )
        runs.setdefault(label, {})[_weights_label(loss)] = c
    return runs


def _divided_twice(loss: Mapping[str, Any]) -> bool:
    return with_compat(loss)["compat"]["normalize_by_documents"]


def _weights_label(loss: Mapping[str, Any]) -> str:
    plain = "loss ÷ M" if loss["denominator"] == "document_sum" else f"denominator {loss['denominator']}"
    if not _divided_twice(loss):
        return plain
    return f"{plain}, gradient ÷ M²" if loss["denominator"] == "document_sum" else f"{plain}, gradient ÷ M once more"


def _look(label: str) -> dict[str, Any]:
    twice = "gradient" in label
    return {"color": style.SERIES[2 if twice else 0], "linestyle": style.DASHES[1 if twice else 0]}


def _line(axes: Axes, c: Configuration, key: str, label: str) -> None:
    at = [(record["step"], record[key]) for record in c.steps if record.get(key) is not None]
    axes.plot([step for step, _ in at], [value for _, value in at], label=label, linewidth=1.6, **_look(label))


def _coefficient(value: float | None) -> str:
    return NONE if value is None else near_one(value)


def _drawn(name: str, figure: Figure) -> Markup:
    return drawing(name, CAPTIONS[name], figure)


def _left_out(comparison: Comparison) -> Markup:
    ran = {c.settings["loss"]["denominator"] for c in comparison.configurations}
    missing = [name for name in DENOMINATORS if name not in ran]
    note = tag("p", "Not run on this rollout dataset: ", ", ".join(missing), ".") if missing else None
    return join([note, _failures(comparison)])


def _failures(comparison: Comparison) -> Markup | None:
    failed = [c for c in comparison.configurations if c.state != "succeeded"]
    return (
        tag("p", "Failed, and not shown: ", "; ".join(f"{c.name} ({c.why})" for c in failed), class_="caution")
        if failed
        else None
    )


def main(arguments: Sequence[str] | None = None) -> Path:
    """Write the page of a folder given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.normalisation.page",
        description="Write report.html from the comparisons of a folder.",
    )
    parser.add_argument("folder", type=Path, help=f"has {' and '.join(f'{part}/comparison.json' for part in PARTS)}")
    return write_normalisation(parser.parse_args(arguments).folder)


if __name__ == "__main__":
    main()
