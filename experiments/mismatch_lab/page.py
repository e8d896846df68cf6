"""Page of the record of `bench mismatch_lab`: corrections on one recorded gap, and in online runs over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document

QUESTION = "What do corrections of the gap between trainer and sampler discard, and does it help?"
GAP_HEAD = (
    "correction",
    "tokens rejected",
    "documents rejected",
    "credit left",
    "of likelier tokens",
    "of unlikelier tokens",
    "effective tokens",
    "cosine",
)
ONLINE_HEAD = (
    "model",
    "correction",
    "first 10",
    "reward",
    "by seed",
    "effect",
    "spread",
    "seen",
    "gap k3, nats",
    "tokens kept",
)
GAP_CAPTION = (
    "One sampling of a tiny dense policy: a bfloat16 sampler, weights 0 to 3 optimizer steps old. Shares of trained "
    "tokens, of documents with one, and of the absolute credit (weight times gradient coefficient of a token) without "
    "a correction; of tokens that the step makes likelier, and of the others. Effective tokens: of the applied "
    "weights, as a share. Cosine: with the credit under the exact ratio of each token."
)
ONLINE_CAPTION = (
    "First 10, reward: mean of the first and of the last 10 steps, then over seeds. The learning rate is five times "
    "that of the online experiment, so that weights of a few steps ago are another policy. Effect: mean over seeds of "
    "the difference to the run without a correction; spread: standard deviation over seeds of that run. Seen: one sign "
    "in all seeds, and larger than the spread. Three seeds of a tiny policy: what is not seen may be there. Gap: k3 of "
    "the sampler and the old policy, of which tis_behaviour has that of the engine alone. Completions are one segment, "
    "so segment_tis is sequence_tis_mean."
)


def write_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "mismatch lab"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    sections = [
        ("One recorded gap", _section(GAP_CAPTION, GAP_HEAD, gap_rows(record), range(1, 8))),
        ("Online runs", _section(ONLINE_CAPTION, ONLINE_HEAD, online_rows(record), (2, 3, 5, 6, 8, 9))),
        ("Provenance", provenance(record)),
    ]
    return document("mismatch lab", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences."""
    gates = [row for row in record["gap"] if row["rejected_tokens"] > 0]
    most = max(gates, key=lambda row: row["rejected_tokens"])
    tried = [row for row in record["online"] if row["name"] not in ("none", "synchronous")]
    seen = [row for row in tried if row["seen"]]
    names = ", ".join(f"{row['name']} ({row['model']}, {row['effect']:+.3f})" for row in seen)
    return (
        f"On one recorded gap {len(gates)} of {len(record['gap'])} corrections reject tokens; {most['name']} the most, "
        f"{_percent(most['rejected_tokens'])}, with {_percent(1 - most['credit'])} of the credit. In {record['steps']} "
        f"online steps over {len(record['seeds'])} seeds, {len(seen)} of {len(tried)} corrections have an effect on "
        f"the reward that is larger than the seeds' spread and of one sign{': ' + names if names else ''}. "
        f"{_falls(record)}"
    )


def _falls(record: Mapping[str, Any]) -> str:
    """Sentence on the configurations of each model whose reward falls."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in record["online"]):
        of_model = [row for row in record["online"] if row["model"] == model]
        falling = sum(row["reward"] < row["start"] for row in of_model)
        parts.append(f"{falling} of {len(of_model)} configurations of the {model} model")
    return f"The reward falls in {' and '.join(parts)}: an effect there is less harm, and no better training."


def gap_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table of the recorded gap."""
    shares = (
        "rejected_tokens",
        "rejected_documents",
        "credit",
        "credit_likelier",
        "credit_unlikelier",
        "effective_tokens",
    )
    return [[row["name"], *(_percent(row[key]) for key in shares), f"{row['cosine']:.4f}"] for row in record["gap"]]


def online_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table of online runs."""
    return [
        [
            row["model"],
            row["name"],
            f"{row['start']:.3f}",
            f"{row['reward']:.3f}",
            ", ".join(f"{reward:.3f}" for reward in row["rewards"]),
            f"{row['effect']:+.3f}",
            f"{row['spread']:.3f}",
            "yes" if row["seen"] else "no",
            significant(row["gap_k3_nats"], 2),
            _percent(row["kept"]),
        ]
        for row in record["online"]
    ]


def _section(caption: str, head: tuple[str, ...], rows: list[list[str]], numbers: Any) -> Markup:
    return join([tag("p", caption), table(list(head), rows, numbers=tuple(numbers), class_="prose")])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
