"""Online training with the plain and with the fused head: one step of both, and fifty of them with two seeds.

One step is judged by budgets. Fifty are not: once a completion differs, two runs diverge as two seeds do, and the page
reports how far apart their curves lie, next to the distances of other pairs of runs.

The page is made of ``step_one``, ``fifty_steps`` and ``other_rounding``, each a folder with ``comparison.json`` and
``sampled.json``, and of ``warm_up.json``. `write_sampled` writes the second of each from the folders of runs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.sampled import (
    Completions,
    completions_of,
    digest,
    read_record,
    run_of,
    share_alike,
    succeeded,
)
from workbench.atomic import to_json, write_whole
from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.distances import FLOAT64_BAR, WHOLE_FACTOR
from workbench.errors import RecordError
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, share, significant
from workbench.report.page import differences, document, drawing, provenance

ABLATIONS = ("step_one", "fifty_steps", "other_rounding")
LOSS, NORM, DEVIATION = "loss/total/sum", "gradient/norm/global", "advantage/all/std"
REWARD, MISMATCH = "reward/all/mean", "kl/policy_sampler/k3_mean"
METRICS = {
    REWARD: "reward, mean",
    "reward/right/fraction": "completions wholly right, share",
    LOSS: "loss",
    NORM: "gradient norm",
    MISMATCH: "KL(policy ‖ sampler), nats",
    "entropy/policy/mean": "entropy, nats",
}
"""Metrics by step, and their titles on the page."""
FLOAT32_EPSILON = 2.0**-23
ENDS = 10
"""Steps at the beginning, and at the end, whose means are the first and last values of a run."""

QUESTION = "Does online training with the fused head go as with the plain one?"
BUDGETS = (
    "One step of the same weights on the same completions, against the plain head in float64. Gradient: the budgets of "
    "every verdict here, 10⁻¹² of each parameter's gradient in float64; below, 2.5 times the error of the plain head's "
    "whole gradient and 3.5 times that of a parameter. Gradient norm: two norms differ by no more than their gradients "
    "do, so by no more than the budget of the whole (in float64 the root of the summed squares of all). Loss: a sum of "
    "advantages of both signs that nearly cancel, so it is measured by their standard deviation: 10⁻¹² of it in "
    "float64; below, 2.5 times the plain head's error or, if that is more, float32's epsilon of the deviation."
)
MEANING = (
    "Equality is claimed for the first step, where it can be judged. After it the weights differ in their last bits; "
    "sooner or later a token is drawn otherwise, its completion takes another course, and from there two runs of one "
    "seed are two runs. So the curves have no budget. Three distances are shown side by side, each a root mean square "
    "over steps: fused − plain at one seed; plain − plain at one seed, where the second sums in another order and "
    "nothing else (four rows a step instead of two); and one seed − the other under one head. The first two share "
    "prompts and draws, the third does not; the fair measure of the fused head is therefore the second: what rounding "
    "alone does. Two seeds are a small sample."
)
CAPTION = (
    "By optimizer step. Colour: what was trained; solid: seed 0, dashed: seed 1. The first six as in the table; then "
    "the share of completions that are the plain run's of the same seed token for token; and, for each metric, two of "
    "the table's distances over that between seeds."
)


@dataclass(frozen=True)
class Records:
    """Records of the page.

    Attributes:
        step_one: one step, by precision and head.
        fifty_steps: training, by head and seed.
        other_rounding: training with the plain head and other rows, by seed.
        sampled: by ablation and run, {"digests", "alike"} by step; see `write_sampled`.
        policy: record of the warm-up of the policy.
    """

    step_one: Comparison
    fifty_steps: Comparison
    other_rounding: Comparison
    sampled: Mapping[str, Mapping[str, Any]]
    policy: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Read the records of a folder.

        Raises:
            RecordError: one is missing or damaged.
        """
        comparisons = {name: Comparison.load(folder / name / "comparison.json") for name in ABLATIONS}
        sampled = {name: read_record(folder / name / "sampled.json") for name in ABLATIONS}
        return cls(**comparisons, sampled=sampled, policy=read_record(folder / "warm_up.json"))


def write_fused_ab(folder: Path) -> Path:
    """Write ``report.html`` of a folder of records atomically.

    Raises:
        RecordError: a record is missing, or a run failed.
    """
    return write_whole(Path(folder) / "report.html", page(Records.load(Path(folder))).encode())


def write_sampled(folder: Path, ablation: str) -> Path:
    """Write ``folder/ABLATION/sampled.json``: each run's completions, and their overlap with those of the plain head.

    The plain head is in step_one the first run, and elsewhere that of fifty_steps with the same seed.

    Raises:
        RecordError: a comparison or run is missing.
    """
    plain: dict[int, list[Completions]] = {}
    if ablation != "step_one":
        steps = Comparison.load(folder / "fifty_steps" / "comparison.json")
        plain = {c.settings["seed"]: _drawn(folder / "fifty_steps", c) for c in steps.configurations if not _fused(c)}
    sampled: dict[str, Any] = {}
    for c in Comparison.load(folder / ablation / "comparison.json").configurations:
        drawn = _drawn(folder / ablation, c)
        others = plain.setdefault(c.settings["seed"], drawn)
        sampled[c.name] = {
            "digests": [digest(completions) for completions in drawn],
            "alike": [share_alike(*pair) for pair in zip(drawn, others, strict=True)],
        }
    return write_whole(folder / ablation / "sampled.json", to_json(sampled))


def page(records: Records) -> str:
    """Render the page as one self-contained HTML file; the same records give the same bytes."""
    comparisons = {
        "One step": records.step_one,
        "Fifty steps": records.fifty_steps,
        "The plain head in other rows": records.other_rounding,
    }
    sections = [
        ("One step", step_section(records)),
        ("Fifty steps", training_section(records)),
        ("Settings", join(join([tag("h3", name), differences(c)]) for name, c in comparisons.items())),
        (
            "Provenance",
            join([_made(records.policy), *(join([tag("h3", name), provenance(c)]) for name, c in comparisons.items())]),
        ),
    ]
    answers = [tag("p", text, class_="answer") for text in (answer_of_step(records), answer_of_training(records))]
    masthead = tag(
        "header", tag("p", "workbench report · ", tag("b", "fused_ab"), class_="eyebrow"), tag("h1", QUESTION), answers
    )
    return document("fused_ab", [masthead], sections)


# ---- one step ------------------------------------------------------------------------------------------


def step_table(comparison: Comparison) -> pd.DataFrame:
    """Loss and gradient of the first step, one row per run, with distances from the plain head in float64 and budgets.

    Columns: precision, loss, loss_off, loss_budget, norm, norm_off, norm_budget, gradient (in parts of its budget, as
    in verdicts), verdict. Budgets are None for a baseline run.

    Raises:
        RecordError: a run failed.
    """
    runs = succeeded(comparison)
    truth = next(c for c in runs if c.settings["precision"] == "float64" and not c.against).steps[0]
    plain = {c.settings["precision"]: c.steps[0] for c in runs if not c.against}
    rows = {}
    for c in runs:
        record, precision = c.steps[0], c.settings["precision"]
        row = {"precision": precision, "verdict": c.verdict, "gradient": None}
        for name, key in (("loss", LOSS), ("norm", NORM)):
            row |= {name: record[key], f"{name}_off": abs(record[key] - truth[key]), f"{name}_budget": None}
        if c.against:
            whole = c.whole_gradient[0]
            row["gradient"] = whole["distance"] / whole["budget"] if whole["budget"] else 0.0
            row["norm_budget"] = (
                math.hypot(*(p.budget for p in c.parameters)) if precision == "float64" else whole["budget"]
            )
            row["loss_budget"] = _loss_budget(precision, abs(plain[precision][LOSS] - truth[LOSS]), truth[DEVIATION])
        rows[c.name] = row
    return pd.DataFrame.from_dict(rows, orient="index").astype(object).where(lambda frame: frame.notna(), None)


def _loss_budget(precision: str, plain_error: float, deviation: float) -> float:
    if precision == "float64":
        return FLOAT64_BAR * deviation
    return WHOLE_FACTOR * max(plain_error, FLOAT32_EPSILON * deviation)


def holds(comparison: Comparison) -> bool:
    """True if every run of the first step is within all of its budgets."""
    rows = [row for _, row in step_table(comparison).iterrows() if row["norm_budget"] is not None]
    return all(
        row["verdict"] in ("equal", "within budget")
        and row["loss_off"] <= row["loss_budget"]
        and row["norm_off"] <= row["norm_budget"]
        for row in rows
    )


def answer_of_step(records: Records) -> str:
    """Summarize the first step in a sentence with its numbers."""
    rows = step_table(records.step_one)
    summaries = []
    for c in succeeded(records.step_one):
        if _fused(c):
            row = rows.loc[c.name]
            summaries.append(
                f"in {row['precision']} its loss is {significant(row['loss_off'], 2)} and its gradient norm "
                f"{significant(row['norm_off'], 2)} away, where {significant(row['loss_budget'], 2)} and "
                f"{significant(row['norm_budget'], 2)} are allowed"
            )
    truth = rows.iloc[0]
    same = _same_completions(records)
    return (
        f"One step on the same completions: the plain head in float64 finds a loss of {significant(truth['loss'], 4)} "
        f"and a gradient norm of {significant(truth['norm'], 5)}. The fused head: {'; '.join(summaries)}. "
        f"{'All budgets hold' if holds(records.step_one) else 'Not all budgets hold'}"
        f"{'' if same else ', but the runs did not draw the same completions'}."
    )


def step_section(records: Records) -> Markup:
    """The table of the first step."""
    rows = [
        [
            tag("code", name),
            row["precision"],
            significant(row["loss"], 8),
            significant(row["loss_off"], 2),
            significant(row["loss_budget"], 2),
            significant(row["norm"], 8),
            significant(row["norm_off"], 2),
            significant(row["norm_budget"], 2),
            share(row["gradient"]),
            row["verdict"],
        ]
        for name, row in step_table(records.step_one).iterrows()
    ]
    head = [
        "run",
        "precision",
        "loss",
        "off by",
        "budget",
        "gradient norm",
        "off by",
        "budget",
        "gradient ÷ budget",
        "verdict",
    ]
    tokens = succeeded(records.step_one)[0].steps[0]["tokens/trained/sum"]
    drew = (
        "All runs drew the same completions, token for token."
        if _same_completions(records)
        else "The runs did not draw the same completions: nothing below is about the head alone."
    )
    return join(
        [
            tag("p", BUDGETS),
            tag(
                "p",
                f"{int(tokens)} trained tokens. {drew} plain_again is the plain head run "
                "once more: what this machine repeats.",
            ),
            table(head, rows, numbers=range(2, 9)),
        ]
    )


# ---- fifty steps ---------------------------------------------------------------------------------------

HEADS = {"plain": 0, "fused": 2, "plain, other rows": 3}
"""Trained head -> index of its hue; the last is drawn below the others."""


def curves(records: Records) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Step records by head, a key of `HEADS`, and seed.

    Raises:
        RecordError: a run failed, or a head has other seeds or steps than another.
    """
    by_head: dict[str, dict[int, list[dict[str, Any]]]] = {head: {} for head in HEADS}
    for c in succeeded(records.fifty_steps):
        by_head["fused" if _fused(c) else "plain"][c.settings["seed"]] = c.steps
    by_head["plain, other rows"] = {c.settings["seed"]: c.steps for c in succeeded(records.other_rounding)}
    shapes = {head: {seed: len(steps) for seed, steps in seeds.items()} for head, seeds in by_head.items()}
    if len({repr(sorted(shape.items())) for shape in shapes.values()}) != 1:
        raise RecordError(
            "compare the curves of fused_ab",
            found=f"steps by head and seed {shapes}",
            rule="every head has the same seeds, and as many steps",
            fix="run both ablations again",
        )
    return by_head


def training_table(records: Records) -> pd.DataFrame:
    """Levels of the curves and distances between them, one row per metric of `METRICS`.

    Columns: first and last of the plain head and fused_last, means over seeds and over the steps of one end; and three
    root mean squares over steps: fused_plain of fused − plain at one seed (all seeds), rounding of plain in other rows
    − plain at one seed (all seeds), seeds of one seed − another under one head (all pairs of seeds, both heads).
    """
    by_head = curves(records)
    rows = {key: _row(key, by_head) for key in METRICS}
    return pd.DataFrame.from_dict(rows, orient="index")


def _row(key: str, by_head: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]) -> dict[str, float]:
    values = {
        head: {seed: [record[key] for record in steps] for seed, steps in seeds.items()}
        for head, seeds in by_head.items()
    }
    plain, fused, other = (values[head] for head in HEADS)

    def mean(of: Mapping[int, list[float]], steps: slice) -> float:
        return statistics.fmean(value for line in of.values() for value in line[steps])

    def apart(lines: Iterable[tuple[list[float], list[float]]]) -> float:
        squares = [(a - b) ** 2 for one, other in lines for a, b in zip(one, other, strict=True)]
        return math.sqrt(statistics.fmean(squares)) if squares else math.nan

    return {
        "first": mean(plain, slice(ENDS)),
        "last": mean(plain, slice(-ENDS, None)),
        "fused_last": mean(fused, slice(-ENDS, None)),
        "fused_plain": apart((fused[seed], plain[seed]) for seed in plain),
        "rounding": apart((other[seed], plain[seed]) for seed in plain),
        "seeds": apart((of[one], of[two]) for of in (plain, fused) for one, two in itertools.combinations(plain, 2)),
    }


@dataclass(frozen=True)
class Parting:
    """First differences between two runs of one seed.

    Attributes:
        head: that is compared with the plain head, of `HEADS`.
        seed: of both.
        record: first step whose loss or gradient norm differs; None if none.
        answers: first step in which a completion differs; None if none.
        alike_last: share of equal completions in the last step.
    """

    head: str
    seed: int
    record: int | None
    answers: int | None
    alike_last: float


def partings(records: Records) -> list[Parting]:
    """First differences of each run from the plain one of its seed."""
    by_head, rows = curves(records), []
    for head, alike_by_seed in alike(records).items():
        for seed, shares in alike_by_seed.items():
            pairs = list(zip(by_head[head][seed], by_head["plain"][seed], strict=True))
            rows.append(
                Parting(
                    head,
                    seed,
                    _first(pairs, lambda pair: any(pair[0][key] != pair[1][key] for key in (LOSS, NORM))),
                    _first(shares, lambda value: value < 1),
                    shares[-1],
                )
            )
    return rows


def alike(records: Records) -> dict[str, dict[int, list[float]]]:
    """By head (except plain) and seed: by step, the share of completions equal to the plain run's."""
    shares: dict[str, dict[int, list[float]]] = {"fused": {}, "plain, other rows": {}}
    for name, comparison, head in (
        ("fifty_steps", records.fifty_steps, "fused"),
        ("other_rounding", records.other_rounding, "plain, other rows"),
    ):
        for c in succeeded(comparison):
            if _fused(c) or name == "other_rounding":
                shares[head][c.settings["seed"]] = records.sampled[name][c.name]["alike"]
    return shares


def _first(values: Sequence[Any], predicate: Callable[[Any], bool]) -> int | None:
    return next((index for index, value in enumerate(values) if predicate(value)), None)


def training(records: Records) -> Figure:
    """Draw the curves, the share of equal completions, and the three distances side by side."""
    by_head, rows = curves(records), training_table(records)
    figure = style.chart(5.6)
    grid = figure.subplots(2, 4).flatten()
    for axes, (key, title) in zip(grid, METRICS.items(), strict=False):
        style.tidy(axes, title=title.partition(",")[0], x="optimizer step")
        for head, seeds in by_head.items():
            for index, (_, steps) in enumerate(sorted(seeds.items())):
                axes.plot([record["step"] for record in steps], [record[key] for record in steps], **_look(head, index))
        style.plain_ticks(axes.yaxis)
    style.tidy(grid[6], title="completions equal to plain", x="optimizer step")
    for head, by_seed in alike(records).items():
        for index, (_, shares) in enumerate(sorted(by_seed.items())):
            grid[6].plot(range(len(shares)), shares, **_look(head, index))
    grid[6].set_ylim(-0.03, 1.03)
    _distances(grid[7], rows)
    handles = [Line2D([], [], label=head, **_look(head, 0)) for head in HEADS]
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


def _distances(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw one row per metric: fused − plain and plain in other rows − plain, over the difference of two seeds."""
    style.tidy(axes, title="distance ÷ that of two seeds", grid="x")
    for index, (_, row) in enumerate(rows.iterrows()):
        for column, head, marker in (("rounding", "plain, other rows", "s"), ("fused_plain", "fused", "o")):
            if row["seeds"]:
                axes.plot(
                    [row[column] / row["seeds"]],
                    [index],
                    marker=marker,
                    markersize=6,
                    linestyle="none",
                    color=style.SERIES[HEADS[head]],
                )
    axes.axvline(1.0, color=style.INK, linewidth=0.9)
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(rows)), [METRICS[str(key)].partition(",")[0].partition("(")[0] for key in rows.index])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", colors=style.INK)


def _look(head: str, index: int) -> dict[str, Any]:
    width, layer = {"plain": (2.2, 2), "fused": (1.0, 3), "plain, other rows": (1.0, 1)}[head]
    return {
        "color": style.SERIES[HEADS[head]],
        "linestyle": style.DASHES[index % len(style.DASHES)],
        "linewidth": width,
        "zorder": layer,
    }


def answer_of_training(records: Records) -> str:
    """Summarize fifty steps in sentences with their numbers."""
    rows, steps = training_table(records), len(next(iter(curves(records)["plain"].values())))
    reward = rows.loc[REWARD]
    kl = {
        head: statistics.median(record[MISMATCH] for line in curves(records)[head].values() for record in line)
        for head in ("plain", "fused")
    }
    return (
        f"Over {steps} steps the reward goes from {significant(reward['first'])} to {significant(reward['last'])} "
        f"with the plain head and to {significant(reward['fused_last'])} with the fused one (means of {ENDS} steps "
        f"at either end, all seeds). Curves of the two lie {significant(reward['fused_plain'], 2)} apart at one "
        f"seed, two plain heads that sum in another order {significant(reward['rounding'], 2)}, and two seeds of "
        f"one head {significant(reward['seeds'], 2)}. KL from policy to sampler is {significant(kl['plain'], 2)} "
        f"nats with the plain and {significant(kl['fused'], 2)} with the fused head (median of steps)."
    )


def furthest(records: Records) -> str:
    """Metric in which the fused head is furthest beyond rounding, and the sign of its difference at each seed."""
    by_head, rows = curves(records), training_table(records)
    beyond = rows[rows["rounding"] > 0]
    if beyond.empty:
        return "Rounding moved nothing."
    key = str((beyond["fused_plain"] / beyond["rounding"]).idxmax())
    means = [
        statistics.fmean(
            one[key] - other[key] for one, other in zip(by_head["fused"][seed], by_head["plain"][seed], strict=True)
        )
        for seed in sorted(by_head["plain"])
    ]
    times = share(rows.loc[key, "fused_plain"] / rows.loc[key, "rounding"])
    return (
        f"Furthest beyond rounding lies {METRICS[key].partition(',')[0]}, {times} times as far. Its fused − plain, "
        f"mean over steps, is {' and '.join(significant(mean, 2) for mean in means)} at the {len(means)} seeds."
    )


def training_section(records: Records) -> Markup:
    """Figure and table of training, and the first differences of runs."""
    rows = [
        [
            METRICS[str(key)],
            *(significant(row[name], 3) for name in ("first", "last", "fused_last")),
            *(significant(row[name], 2) for name in ("fused_plain", "rounding", "seeds")),
            share(row["fused_plain"] / row["rounding"] if row["rounding"] else None),
            share(row["fused_plain"] / row["seeds"] if row["seeds"] else None),
        ]
        for key, row in training_table(records).iterrows()
    ]
    head = [
        "",
        "first",
        "last, plain",
        "last, fused",
        "fused − plain",
        "rounding",
        "seeds",
        "fused ÷ rounding",
        "fused ÷ seeds",
    ]
    apart = [
        [p.head, p.seed, _step(p.record), _step(p.answers), significant(p.alike_last, 2)] for p in partings(records)
    ]
    return join(
        [
            tag("p", _trained_on(records)),
            tag("p", MEANING),
            drawing("training", CAPTION, training(records)),
            table(head, rows, numbers=range(1, 9)),
            tag(
                "p",
                f"first: mean over seeds of the first {ENDS} steps, plain head. last: of the last {ENDS}. fused − "
                "plain, rounding and seeds: the three distances. KL: k3 on the sampler's tokens, which is KL(policy ‖ "
                "sampler) while the two are close; a mean in which one unlikely token can be most of a step, in "
                "whichever run draws it.",
            ),
            tag("p", furthest(records)),
            tag("h3", "When a run came apart from the plain one of its seed"),
            table(
                [
                    "run",
                    "seed",
                    "loss or norm first another at step",
                    "a completion first another at step",
                    "completions alike in the last step",
                ],
                apart,
                numbers=range(1, 5),
            ),
        ]
    )


def _step(step: int | None) -> str:
    return "never" if step is None else str(step)


# ---- parts ---------------------------------------------------------------------------------------------


def _fused(c: Configuration) -> bool:
    return c.settings["policy"]["fused_loss"]


def _drawn(experiment: Path, c: Configuration) -> list[Completions]:
    run = run_of(experiment, c)
    return [completions_of(run, record["step"]) for record in c.steps]


def _same_completions(records: Records) -> bool:
    return len({tuple(entry["digests"]) for entry in records.sampled["step_one"].values()}) == 1


def _trained_on(records: Records) -> str:
    """Describe the runs of fifty steps in a sentence."""
    settings = succeeded(records.fifty_steps)[0].settings
    online, optimizer = settings["online"], settings["optimizer"]
    return (
        f"Each step samples {online['prompts']} prompts with {online['answers']} completions at temperature "
        f"{online['temperature']:g}, the sampler in {online['sampler_precision'] or settings['precision']}, and "
        f"trains on them in {settings['precision']}, with the loss {settings['loss']['name']} and "
        f"{optimizer['name']} at {optimizer['learning_rate']:g}; the old policy is the {online['old_logprobs']}."
    )


def _made(policy: Mapping[str, Any]) -> Markup:
    sizes = ", ".join(f"{name} {value}" for name, value in policy["sizes"].items())
    machine = policy["provenance"]["gpus"] or [policy["provenance"]["cpu"]]
    total, without_embedding = (policy[name] / 1e6 for name in ("parameters", "parameters_beside_embedding"))
    return tag(
        "p",
        f"The policy: a Qwen3 of {total:.1f} million parameters, {without_embedding:.1f} million of them outside "
        f"its embedding ({sizes}). It learnt in {policy['steps']} steps and {policy['seconds']:.0f} s on "
        f"{machine[0] or NONE}, until {policy['success_rate']:.0%} of its completions were right.",
    )
