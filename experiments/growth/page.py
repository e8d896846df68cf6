"""Growth of cost, as a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("verb", "of", "CPU seconds by number", "exponent")

LABELS = {
    "compare, runs": ("comparing runs, as `run` does", "runs"),
    "export, runs": ("`export --to tensorboard`", "runs"),
    "compare, saved configurations": ("`compare EXPERIMENT`", "saved configurations"),
    "report, saved configurations": ("`report --no-notebook`", "saved configurations"),
    "diagnose, steps of two runs": ("`diagnose`", "steps"),
    "check, documents of a dump": ("`check`", "documents"),
}
"""Key of the record -> verb, and what it reads many of."""


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row for each verb."""
    verbs = [(f"`{name}`", "runs", entry) for name, entry in record["verbs"].items()]
    verbs += [(*LABELS[key], entry) for key, entry in record["reading"]["verbs"].items()]
    return [
        [
            verb,
            many,
            ", ".join(f"{int(size):,}: {value:.2f}" for size, value in entry["cpu_s"].items()),
            "none" if entry["exponent"] is None else f"{entry['exponent']:.2f}",
        ]
        for verb, many, entry in verbs
    ]


def long_comparison(record: Mapping[str, Any]) -> str:
    """Return what columns save."""
    long = record["long comparison"]
    columns, whole = long["columns"], long["one JSON"]
    return (
        f"A comparison of {long['configurations']} configurations with {long['rows']:,} rows of steps and parameters "
        f"is a JSON of {columns['json_mb']:.1f} MB and columns of {columns['columns_mb']:.0f} MB, saved in "
        f"{columns['save_s']:.0f} s and read in {columns['load_s']:.0f} s; as one JSON it would be "
        f"{whole['json_mb']:.0f} MB, {whole['save_s']:.0f} s and {whole['load_s']:.0f} s."
    )
