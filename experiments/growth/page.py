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
    "run, configurations": ("`run --where here`", "configurations"),
    "run, steps": ("`run --where here`", "steps"),
    "bisect, documents": ("`bisect`", "documents of a step"),
    "prove, rounds": ("`prove --rounds`", "cases of each invariant"),
    "attribute, documents": ("`attribute --draws 1`", "completions"),
    "rollouts import, documents": ("`rollouts import`", "documents"),
    "rollouts check, documents": ("`rollouts check`", "documents"),
    "logs, all lines": ("`logs --lines -1`", "lines"),
    "logs, last 50 lines": ("`logs`", "lines"),
    "logs, kB of one line": ("`logs`", "kB of one line, a progress bar"),
    "doctor, runs": ("`doctor`", "runs"),
    "sensitivity, documents": ("`sensitivity` to one fault", "documents of a step"),
    "sensitivity, faults": ("`sensitivity`", "faults"),
    "sensitivity, ranks": ("`sensitivity` to one fault", "simulated ranks"),
    "verify, steps": ("`verify --gpus 0`", "steps"),
    "rollouts score, documents": ("`rollouts score`", "documents"),
    "rollouts record, answers": ("`rollouts record --answers`", "completions of a problem"),
    "verify, ranks": ("`verify --gpus 0`, more ranks", "processes, over gloo"),
    "bisect, ranks": ("`bisect`", "simulated ranks"),
    "ls, ranks": ("`ls`", "ranks of a run"),
    "status, ranks": ("`status RUN`", "ranks of a run"),
    "status, ranks of a failed run": ("`status RUN`", "ranks of a failed run"),
    "logs, ranks": ("`logs`", "ranks of a run"),
    "compare, ranks": ("comparing runs, as `run` does", "ranks of a run"),
}
"""Key of the record -> verb, and what it reads many of."""

CONSTANT = {
    "lab": "opens JupyterLab",
    "notebooks": "copies the files that the package has",
    "bench": "has sizes of its own",
    "describe": "prints what the package has",
    "schema": "prints what the package has",
    "completion": "prints what the package has",
    "mcp": "costs at each call what the verb of its tool costs",
}
"""Verb without an input that grows -> what it does."""

_WHOLE_STEP = "every rank prepares the rows of the whole step, one for each rank"
FASTER = {"sensitivity, ranks": _WHOLE_STEP, "bisect, ranks": _WHOLE_STEP}
"""What grows faster than linearly, of `LABELS` -> why."""

SEEN_S = 0.1
"""Seconds from which an exponent is more than the scatter of a few milliseconds."""


def constant() -> str:
    """Return what grows faster than linearly, and the verbs that are not in the table, with reasons."""
    reasons: dict[str, list[str]] = {}
    for verb, reason in CONSTANT.items():
        reasons.setdefault(reason, []).append(f"`{verb}`")
    without_growth = [f"{', '.join(verbs)} ({reason})" for reason, verbs in reasons.items()]
    reasons_to_grow: dict[str, list[str]] = {}
    for key, reason in FASTER.items():
        reasons_to_grow.setdefault(reason, []).append(" with more ".join(LABELS[key]))
    faster = "; ".join(f"{', '.join(verbs)} ({reason})" for reason, verbs in reasons_to_grow.items())
    return (
        f"Faster than linearly: {faster}. No input that grows: {'; '.join(without_growth)}. Not measured: `run` by the "
        "number of its ranks, which are forked and for which no process of it waits, unlike those of `verify`. The "
        "smallest sizes of `verify`, `rollouts record` and verbs on simulated ranks are work, and no start-up alone."
    )


def estimators(record: Mapping[str, Any]) -> str:
    """Return what the advantages of a large step cost."""
    found = record["advantages of a step"]["estimators"]
    number = max(map(int, next(iter(found.values()))["cpu_s"]))
    seconds = {name: entry["cpu_s"][str(number)] for name, entry in found.items()}
    slow = {name: entry["exponent"] for name, entry in found.items() if seconds[name] >= SEEN_S}
    longest = max(seconds, key=lambda name: seconds[name])
    return (
        f"Advantages of a step of {number:,} documents, in groups of four, and the signs of its pairs take at "
        f"most {seconds[longest]:.1f} s (`{longest}`). The exponents of the {len(slow)} of {len(found)} that take "
        f"{SEEN_S} s or more are {min(slow.values()):.2f} to {max(slow.values()):.2f}."
    )


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row for each verb."""
    verbs = [(f"`{name}`", "runs", entry) for name, entry in record["verbs"].items()]
    labelled = record["reading"]["verbs"] | record["computing"]
    verbs += [(*LABELS[key], entry) for key, entry in labelled.items()]
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
