"""Steps of about 1,000 documents before and after their gradient is divided by them, next to Fast-LLM's figures.

The columns are those of a table in ServiceNow/Fast-LLM#520 (its GRPO pull request): training before the change, after
it, and with DeepSpeed's convention, each by loss, gradient norm, clip coefficient and log-probability. Ours are runs of
``thousand_documents.yaml`` and ``counted_twice.yaml``; theirs are a reporter's, of another model on another task.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, near_one, significant
from workbench.report.page import drawing

LOSS, NORM, COEFFICIENT = "loss/total/sum", "gradient/norm/global", "gradient/clip/coefficient"
LOGPROB, DOCUMENTS = "logprob/policy/mean", "documents/trained/sum"
SPIKE = 3.0
"""A step is a spike if its norm is more than this times the median of the run."""
RUNS = {
    "before": (False, "float32"),
    "after": (True, "float32"),
    "DeepSpeed's": (True, "deepspeed_bf16"),
}
"""Column -> gradient divided by the documents once more, and precision."""
REPORTED: Mapping[str, Mapping[str, str]] = {
    "initial loss": {"before": "−13.7", "after": "−1.7"},
    "first gradient norm": {"before": "141", "after": "0.135", "DeepSpeed's": "0.145"},
    "first clip coefficient": {"before": "0.002", "after": "1"},
    "log-probability of the policy": {"before": "−0.17", "after": "−0.103", "DeepSpeed's": "−0.105"},
}
"""Row -> figures of the pull request, by column."""
WHY = (
    "Before: the loss is divided by the documents of the step, and so is its gradient. After, and in DeepSpeed, the "
    "gradient is divided by them once more, and the loss that is logged is not: a gradient norm about as many times "
    "smaller as there are documents, below the threshold of the clip. The runs here differ in that and, in the last "
    "column, in DeepSpeed's dtypes."
)
APART = (
    "What differs from the reported figures: their first step is not on-policy, so its loss is not zero, and part of "
    "its factor of 8 is a metric that a group of sequence-parallel ranks counted more than once (below). Their norms "
    "are of a language model on long completions; only the ratio of before and after can be compared, and it is the "
    "number of documents in both. AdamW divides a constant factor out again, so that the runs here stay close to each "
    "other, except where the clip acts."
)


def runs_of(comparison: Comparison) -> dict[str, Configuration]:
    """Return the run of each column.

    Raises:
        RecordError: one of them is missing or failed.
    """
    found = {
        (c.settings["loss"]["compat"]["normalize_by_documents"], c.settings["precision"]): c
        for c in comparison.configurations
        if c.state == "succeeded"
    }
    if missing := [name for name, key in RUNS.items() if key not in found]:
        raise RecordError(
            f"report {comparison.experiment}",
            found=f"no successful run for {', '.join(missing)}",
            rule="a run for each column",
            fix="run thousand_documents.yaml again",
        )
    return {name: found[key] for name, key in RUNS.items()}


def spikes(c: Configuration) -> int:
    """Count the steps whose gradient norm is more than `SPIKE` times the run's median."""
    norms = [record[NORM] for record in c.steps]
    return sum(norm > SPIKE * statistics.median(norms) for norm in norms)


ROWS: Mapping[str, Callable[[Configuration], str]] = {
    "documents of the first step": lambda c: str(int(c.steps[0][DOCUMENTS])),
    "initial loss": lambda c: significant(c.steps[0][LOSS], 2),
    "first gradient norm": lambda c: significant(_first(c, NORM)),
    "first clip coefficient": lambda c: near_one(_first(c, COEFFICIENT)),
    "median clip coefficient": lambda c: near_one(statistics.median(record[COEFFICIENT] for record in c.steps)),
    "log-probability of the policy": lambda c: f"{c.steps[0][LOGPROB]:.3f} to {c.steps[-1][LOGPROB]:.3f}",
    f"spikes, norm above {SPIKE:g} medians": lambda c: f"{spikes(c)} of {len(c.steps)}",
}
"""Row -> its text for a run."""


def _first(c: Configuration, key: str) -> float:
    return float(c.steps[0][key])


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the table: a name, ours by column, theirs by column."""
    runs = runs_of(comparison)
    return [
        [name, *(text(c) for c in runs.values()), *(REPORTED.get(name, {}).get(column, NONE) for column in RUNS)]
        for name, text in ROWS.items()
    ]


def by_step(comparison: Comparison) -> Figure:
    """Draw gradient norm, clip coefficient and log-probability by step, a line a column."""
    figure = style.chart(2.3)
    quantities = (
        (NORM, "gradient norm, logarithmic", "log"),
        (COEFFICIENT, "clip coefficient, logarithmic", "log"),
        (LOGPROB, "log-probability, nats", "linear"),
    )
    looks = style.line_styles(list(RUNS))
    for axes, (key, title, scale) in zip(figure.subplots(1, 3), quantities, strict=True):
        style.tidy(axes, y=title, x="optimizer step")
        for name, c in runs_of(comparison).items():
            axes.plot([r["step"] for r in c.steps], [r[key] for r in c.steps], label=name, linewidth=1.6, **looks[name])
        axes.set_yscale(scale)
        (style.log_ticks if scale == "log" else style.plain_ticks)(axes.yaxis)
        if key == NORM:
            axes.legend(frameon=False, fontsize=7, labelcolor=style.INK)
    return figure


def answer(comparison: Comparison) -> str:
    """Return the ratio of the norms in a sentence."""
    before, after, other = (float(c.steps[0][NORM]) for c in runs_of(comparison).values())
    return (
        f"At {int(runs_of(comparison)['before'].steps[0][DOCUMENTS])} documents a step the first gradient norm is "
        f"{significant(before)} before and {significant(after)} after the gradient is divided by them, "
        f"{significant(before / after, 4)} times less, and {significant(other)} in DeepSpeed's dtypes; Fast-LLM "
        "reports 141, 0.135 and 0.145."
    )


def section(comparison: Comparison, counted: Comparison) -> Markup:
    """Figure, table, and the metric that is counted twice."""
    head = ["", *RUNS, *(f"{name}, reported" for name in RUNS)]
    caption = "The same task, seeds and rates; before, after, and after in DeepSpeed's dtypes."
    return join(
        [
            tag("p", comparison.question, " ", WHY),
            drawing("thousand", caption, by_step(comparison)),
            table(head, rows(comparison), numbers=range(1, 1 + 2 * len(RUNS))),
            tag("p", APART),
            tag("p", counted_answer(counted)),
        ]
    )


def counted_answer(counted: Comparison) -> str:
    """Return what a loss becomes that both ranks of a group report, in a sentence."""
    by_name: dict[str, Any] = {c.name: c for c in counted.configurations}
    right, wrong = (by_name[name].steps[-1] for name in ("right", "counted_by_every_rank"))
    return (
        "Counted twice: two ranks that share sequences and both hold the whole GSPO loss report "
        f"{significant(wrong[LOSS])} instead of {significant(right[LOSS])} in step {right['step']}, "
        f"{significant(wrong[LOSS] / right[LOSS], 4)} times as much; the gradient norm is {significant(wrong[NORM])} "
        f"in both, and the verdict on the gradients is {by_name['counted_by_every_rank'].verdict}."
    )
