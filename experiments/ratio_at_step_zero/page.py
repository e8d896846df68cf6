"""Distance of the first ratio from 1: policy over sampler, of the sampler's own tokens, before the policy has moved.

Policy and sampler have the same weights, so any difference between them is arithmetic: another temperature, or
rounding in other places. The page is made of three ablations, each a folder with ``comparison.json`` and
``log_ratios.json``; `write_log_ratios` writes the second from the folders of runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.sampled import (
    completions_of,
    digest,
    log_ratios,
    read_record,
    run_of,
    shares_beyond,
    succeeded,
)
from workbench.atomic import to_json, write_whole
from workbench.compare.comparison import Comparison
from workbench.report import style
from workbench.report.first_ratio import first_ratio_section
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import near_one, significant
from workbench.report.page import differences, document, drawing, provenance
from workbench.specs.losses import parse_surrogate

ABLATIONS = {
    "bfloat16": "Sampler and trainer in bfloat16",
    "float32_trainer": "The same completions, trainer in float32",
    "float32_sampler": "Sampler in float32, trainer in bfloat16",
}
DISTANCES = [10 ** (power / 8) for power in range(-64, 17)]
"""Of the log ratio from 0, nats: eight in each decade, from 1e-8 to 100."""
OUTSIDE, KL, SAMPLES = "clip/region/fraction", "kl/policy_sampler/k3_mean", "ratio/policy_old/effective_samples"

QUESTION = "How far from 1 does the importance ratio start?"
HEADS = {
    ("reference", False): "bfloat16 logits",
    ("auto", False): "float32 logits",
    ("reference", True): "float32 head",
    ("auto", True): "float32 head, fused",
}
"""Logprobs and fp32_head of the settings -> label of the trainer's head on a GPU; on a CPU auto is reference."""
PLAIN_HEADS = ("bfloat16 logits", "float32")
"""Heads whose temperatures are drawn."""
WHAT = (
    "The ratio of each trained token is exp(policy − old log-probability), where old is the sampler's own when it drew "
    "the token. Both have the same weights and no step has been taken: a trainer that computed as the sampler "
    "does would find 1 everywhere. The sampler's logits are divided by its temperature; a trainer that divides by "
    "another compares another distribution with it. bfloat16 logits are rounded to 8 bits: one near 20 is off by up to "
    "1/16. float32 logits come of the same bfloat16 weights and hidden states, as the fused head sums them; a float32 "
    "head lifts weights and hidden states first. A bfloat16 sampler rounds its own logits: a trainer that rounds them "
    "too makes the same errors, token by token, and one that does not is nearer to the exact log-probabilities and "
    "further from the sampler's. What helps is the same arithmetic on both sides, trunk and head."
)
CAPTION = (
    "Share of trained tokens whose log ratio is further from 0 than the abscissa, both axes logarithmic: a line "
    "further left is a better start, and where it ends is the largest log ratio. Vertical: where the loss clips, on "
    "the nearer side."
)


@dataclass(frozen=True)
class Records:
    """Records of the page.

    Attributes:
        comparisons: by ablation, of `ABLATIONS`.
        log_ratios: by ablation and run; see `write_log_ratios`.
    """

    comparisons: Mapping[str, Comparison]
    log_ratios: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Read the records of a folder.

        Raises:
            RecordError: one is missing or damaged.
        """
        return cls(
            {name: Comparison.load(folder / name / "comparison.json") for name in ABLATIONS},
            {name: read_record(folder / name / "log_ratios.json") for name in ABLATIONS},
        )


def write_log_ratios(folder: Path, ablation: str) -> Path:
    """Write ``folder/ABLATION/log_ratios.json``: the spread of the log ratios of each run, and its completions.

    Raises:
        RecordError: a comparison or run is missing.
    """
    spreads = {}
    for c in Comparison.load(folder / ablation / "comparison.json").configurations:
        run = run_of(folder / ablation, c)
        log_ratio_S = log_ratios(run)
        spreads[c.name] = {
            "answers": digest(completions_of(run, 0)),
            "tokens": len(log_ratio_S),
            "mean": float(log_ratio_S.mean()),
            "mean_distance": float(log_ratio_S.abs().mean()),
            "most": float(log_ratio_S.abs().max()),
            "shares_beyond": shares_beyond(log_ratio_S.abs(), DISTANCES),
        }
    return write_whole(folder / ablation / "log_ratios.json", to_json(spreads))


def write_ratio_at_step_zero(folder: Path) -> Path:
    """Write ``report.html`` of a folder of records atomically.

    Raises:
        RecordError: a record is missing, or a run failed.
    """
    return write_whole(Path(folder) / "report.html", page(Records.load(Path(folder))).encode())


def page(records: Records) -> str:
    """Render the page as one self-contained HTML file; the same records give the same bytes."""
    comparisons = {ABLATIONS[name]: comparison for name, comparison in records.comparisons.items()}
    sections = [
        ("Ratios before the first step", ratios_section(records)),
        ("What moved it", join(join([tag("h3", name), first_ratio_section(c)]) for name, c in comparisons.items())),
        ("Settings", join(join([tag("h3", name), differences(c)]) for name, c in comparisons.items())),
        ("Provenance", join(join([tag("h3", name), provenance(c)]) for name, c in comparisons.items())),
    ]
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "ratio_at_step_zero"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(records), class_="answer"),
    )
    return document("ratio_at_step_zero", [masthead], sections)


def ratios(records: Records) -> pd.DataFrame:
    """Distance of the first ratio from 1, one row per run, keyed by ablation and name.

    Columns: sampler and trainer (precisions), head (label), temperature (of the trainer), tokens, mean_distance,
    most and mean of the log ratio (nats), outside (share of tokens beyond the clip), kl (k3 on the sampler's
    tokens, nats), samples (effective sample size, as a share of the tokens), answers (digest of the completions).

    Raises:
        RecordError: a run failed.
    """
    rows = {}
    for ablation, comparison in records.comparisons.items():
        for c in succeeded(comparison):
            spread, step, settings = records.log_ratios[ablation][c.name], c.steps[0], c.settings
            online, policy = settings["online"], settings["policy"]
            head = HEADS[policy["logprobs"] if c.device == "cuda" else "reference", policy["fp32_head"]]
            rows[ablation, c.name] = {
                "sampler": online["sampler_precision"] or settings["precision"],
                "trainer": settings["precision"],
                "head": head if settings["precision"] == "bfloat16" else settings["precision"],
                "temperature": policy["temperature"] or online["temperature"],
                **{name: spread[name] for name in ("tokens", "mean_distance", "most", "mean", "answers")},
                "outside": step[OUTSIDE],
                "kl": step[KL],
                "samples": step[SAMPLES] / spread["tokens"],
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["ablation", "run"])


def beyond(records: Records) -> Figure:
    """Draw the share of tokens whose log ratio is further from 0 than a distance: by temperature, and by rounding."""
    rows, sampled_at = ratios(records), _sampled_at(records)
    at = rows["temperature"] == sampled_at
    figure = style.chart(4.6)
    parts = {
        "by the trainer's temperature": rows[(rows["sampler"] == "bfloat16") & rows["head"].isin(PLAIN_HEADS)],
        f"at the sampler's temperature, {sampled_at:g}: by rounding": rows[at],
    }
    for axes, (title, part) in zip(figure.subplots(1, 2, sharey=True), parts.items(), strict=True):
        style.tidy(axes, title=title, x="distance of the log ratio from 0, nats", y="share of tokens further away")
        for (ablation, name), row in part.iterrows():
            shares = records.log_ratios[ablation][name]["shares_beyond"]
            axes.plot(DISTANCES, [value or math.nan for value in shares], label=_label(row), **_look(row, sampled_at))
        axes.set(xscale="log", yscale="log")
        axes.axvline(_nearer_clip(records), color=style.INK, linewidth=0.9)
        style.log_ticks(axes.xaxis)
        style.log_ticks(axes.yaxis)
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
            frameon=False,
            fontsize=7,
            handlelength=3.2,
            labelcolor=style.INK,
        )
    return figure


def answer(records: Records) -> str:
    """Summarize the runs in sentences with their numbers."""
    rows, sampled_at = ratios(records), _sampled_at(records)

    def mean_of(ablation: str, head: str) -> str:
        part = rows.loc[ablation]
        chosen = part[(part["temperature"] == sampled_at) & (part["head"] == head)]
        return significant(chosen["mean_distance"].iloc[0], 2)

    plain = rows.loc["bfloat16"][rows.loc["bfloat16"]["head"] == PLAIN_HEADS[0]]
    same, other = (plain[(plain["temperature"] == sampled_at) == equal].iloc[0] for equal in (True, False))
    return (
        f"Sampled at temperature {sampled_at:g} in bfloat16. A trainer in bfloat16 with that temperature starts "
        f"with log ratios {significant(same['mean_distance'], 2)} nats from 0 in the mean and "
        f"{significant(same['most'], 2)} at most, {_percent(same['outside'])} of tokens outside the clip; without "
        f"it, at {other['temperature']:g}, with {significant(other['mean_distance'], 2)} and "
        f"{significant(other['most'], 2)}, and {_percent(other['outside'])} outside. A float32 head in the trainer "
        f"alone makes the first {mean_of('bfloat16', 'float32 head')}, and a trainer wholly in float32 "
        f"{mean_of('float32_trainer', 'float32')}: the sampler's own logits are bfloat16. Against a float32 "
        f"sampler it is {mean_of('float32_sampler', 'bfloat16 logits')} with bfloat16 logits and "
        f"{mean_of('float32_sampler', 'float32 head')} with a float32 head."
    )


def ratios_section(records: Records) -> Markup:
    """Figure and table."""
    rows = [
        [
            row["sampler"],
            row["trainer"],
            row["head"],
            f"{row['temperature']:g}",
            significant(row["mean_distance"], 2),
            significant(row["most"], 2),
            significant(row["mean"], 2),
            _percent(row["outside"]),
            significant(row["kl"], 2),
            near_one(row["samples"]),
        ]
        for _, row in ratios(records).iterrows()
    ]
    head = [
        "sampler",
        "trainer",
        "its head",
        "T",
        "mean |log ratio|",
        "largest",
        "mean log ratio",
        "outside the clip",
        "KL, k3",
        "effective samples",
    ]
    return join(
        [
            tag("p", WHAT),
            tag("p", _drew(records)),
            drawing("beyond", CAPTION, beyond(records)),
            table(head, rows, numbers=range(3, 10)),
            tag(
                "p",
                "T: the trainer's temperature. Log ratios and KL in nats. KL: k3 on the sampler's tokens, "
                "which is KL(policy ‖ sampler) while the two are close. Effective samples: as a share of the "
                "tokens.",
            ),
        ]
    )


# ---- parts ---------------------------------------------------------------------------------------------


def _drew(records: Records) -> str:
    """Sentences on the runs that drew the same completions."""
    rows = ratios(records)
    same = {sampler: of["answers"].nunique() == 1 for sampler, of in rows.groupby("sampler")}
    tokens = {sampler: int(of["tokens"].iloc[0]) for sampler, of in rows.groupby("sampler")}
    return " ".join(
        f"All runs with a {sampler} sampler drew the same completions, {tokens[sampler]} trained tokens."
        if alike
        else f"The runs with a {sampler} sampler did not draw the same completions."
        for sampler, alike in same.items()
    )


def _sampled_at(records: Records) -> float:
    return succeeded(records.comparisons["bfloat16"])[0].settings["online"]["temperature"]


def _nearer_clip(records: Records) -> float:
    """The distance of the nearer clip bound, as a log ratio."""
    settings = succeeded(records.comparisons["bfloat16"])[0].settings
    surrogate = parse_surrogate(**settings["loss"]["surrogate"])
    return min(math.log1p(surrogate.clip_high), -math.log1p(-surrogate.clip_low))


def _label(row: Mapping[str, Any]) -> str:
    side = "float32 trainer" if row["trainer"] == "float32" else row["head"]
    return f"{side}, T = {row['temperature']:g}" + (
        "" if row["sampler"] == "bfloat16" else f"; {row['sampler']} sampler"
    )


def _look(row: Mapping[str, Any], sampled_at: float) -> dict[str, Any]:
    hue = [*HEADS.values(), "float32"].index(row["head"])
    dash = 1 if row["temperature"] != sampled_at else 2 if row["sampler"] == "float32" else 0
    return {"color": style.SERIES[hue], "linestyle": style.DASHES[dash], "linewidth": 1.5}


def _percent(value: float) -> str:
    return f"{significant(100 * value, 2)} %"
