"""Page of the record of `make engine-matrix`: a verdict for every engine and invariant, and the counterexamples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.pages import provenance
from workbench.engines.invariants import INVARIANTS
from workbench.report.markup import Markup, join, table, tag
from workbench.report.page import document

QUESTION = "Does a step of this engine depend on how its documents are split?"
HEADS = ("engine", "versions", *INVARIANTS)


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "engines under proof"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    statements = [[tag("code", each.name), each.says] for each in INVARIANTS.values()]
    return document(
        "engine_matrix",
        [masthead],
        [
            ("Matrix", table(list(HEADS), rows(record))),
            ("Invariants", table(["invariant", "statement"], statements)),
            ("Counterexamples", counterexamples(record)),
            ("Not judged", not_judged(record)),
            ("Provenance", join([provenance(record), measured(record)])),
        ],
    )


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the matrix; "expected" follows a break that the documentation or the release's notes name."""
    lines = []
    for title, entry in record["engines"].items():
        cells = []
        for name in INVARIANTS:
            verdict = entry["invariants"].get(name, {}).get("verdict", "")
            cells.append("broken, expected" if verdict == "broken" and name in entry["expected"] else verdict)
        lines.append([title, entry["versions"], *cells])
    return lines


def counts(record: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of engines and verdicts."""
    results = [
        (entry, name, each) for entry in record["engines"].values() for name, each in entry["invariants"].items()
    ]
    broken = [(entry, name) for entry, name, each in results if each["verdict"] == "broken"]
    return {
        "engines": len(record["engines"]),
        "holds": sum(each["verdict"] == "holds" for *_, each in results),
        "broken": len(broken),
        "expected": sum(name in entry["expected"] for entry, name in broken),
        "not_judged": sum(each["verdict"] in ("not offered", "failed") for *_, each in results),
    }


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record."""
    number = counts(record)
    return (
        f"{number['engines']} configurations of engines: {number['holds']} invariants hold, {number['broken']} are "
        f"broken, {number['expected']} of these as the documentation or a later release says; {number['not_judged']} "
        "could not be judged. Only weights before and after a step, and the reported loss and norm, were looked at."
    )


def counterexamples(record: Mapping[str, Any]) -> Markup:
    """Each broken invariant with its smallest documents: dots are tokens of the prompt, # trained ones."""
    parts = []
    for title, entry in record["engines"].items():
        for name, result in entry["invariants"].items():
            if result["verdict"] != "broken":
                continue
            reason = entry["expected"].get(name, "")
            lines = [*(f"case: {case}" for case in result["cases"]), *result["documents"]]
            parts.append(tag("h3", f"{title}: {name}"))
            parts.append(tag("p", result["description"] + (f" ({reason})" if reason else "")))
            parts.append(tag("pre", "\n".join(lines)))
    return join(parts) if parts else tag("p", "None.")


def measured(record: Mapping[str, Any]) -> Markup:
    """Table of the commits at which engines were measured, and how long it took."""
    lines = [[title, entry["commit"][:12], f"{entry['seconds']:.0f} s"] for title, entry in record["engines"].items()]
    return table(["engine", "measured at commit", "duration"], lines)


def not_judged(record: Mapping[str, Any]) -> Markup:
    """Table of invariants that an engine does not offer or that failed, with the reason."""
    lines = [
        [title, tag("code", name), result["verdict"], result["why"]]
        for title, entry in record["engines"].items()
        for name, result in entry["invariants"].items()
        if result["verdict"] in ("not offered", "failed")
    ]
    return table(["engine", "invariant", "verdict", "why"], lines)
