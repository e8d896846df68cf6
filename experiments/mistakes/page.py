"""The page of the measured mistakes, docs/reference/mistakes.md: ``python -m experiments.mistakes.page``.

Like docs/benchmarks.md it is generated: every number in it is of the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.mistakes.measure import FOLDER, LIMIT_S, PROJECT
from workbench.atomic import from_json, write_whole

PAGE = PROJECT / "docs/reference/mistakes.md"


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record as Markdown."""
    entries = record["entries"]
    right, with_torch = record["right"], record["right_in_2_s_with_torch"]
    head = f"""# Mistakes and their messages

An author who had read the manual, and no code, listed {record["mistakes"]} mistakes of a user before any of them
was run, each with what a right message has to name. {right} of them get such a message in under {LIMIT_S:g} s,
without a traceback and on one screen; {with_torch} do so with `import torch` counted, which takes as long by itself,
and which a script of the user's often imports anyway. Messages were improved with this list at hand, so it is no
blind test of them.

Record: [mistakes.json](../../experiments/mistakes/mistakes.json), with the whole messages. Command:
`{record["command"]}` ({record["date"]}). List: [mistakes.yaml](../../experiments/mistakes/mistakes.yaml).

| mistake | seconds | of these `import torch` | message |
|---|--:|--:|---|
"""
    rows = [
        f"| {name} | {entry['seconds']:.1f} | {_seconds(entry['import_torch_seconds'])} | {_outcome(entry)} |"
        for name, entry in entries.items()
    ]
    return head + "\n".join(rows) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value else ""


def _outcome(entry: Mapping[str, Any]) -> str:
    """The first line of the message, or why it is not right."""
    if entry["problem"]:
        return f"**not right**: {_cell(entry['problem'])}"
    lines = [line for line in entry["message"].splitlines() if "Error: " in line or line.startswith("workbench")]
    return f"`{_cell(lines[-1])}`" if lines else "right"


def _cell(text: str) -> str:
    text = text.removeprefix("workbench.errors.").replace("|", "/").replace("`", "'")
    return text if len(text) <= 110 else f"{text[:107]}..."


if __name__ == "__main__":
    write_whole(PAGE, page(from_json((FOLDER / "mistakes.json").read_bytes())).encode())
