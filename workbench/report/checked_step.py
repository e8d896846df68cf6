"""The page of a checked step: stages, causes, and the tokens of each document, recorded and recomputed.

The same check gives the same bytes. The page needs no network. Long steps show the documents that differ first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workbench.atomic import write_whole
from workbench.check.stages import STAGES
from workbench.check.verdict import StepCheck
from workbench.dumps.step import StepDump
from workbench.errors import SpecError
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document

QUESTION = "Is this the loss that the settings say?"
MOST_TOKENS = 2000
"""Tokens that a page shows: some 400 bytes each, so that it stays below a megabyte."""
GIVEN = ("token_ids", "loss_mask", "policy_logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs")
"""Values of tokens that are inputs, in the order of their columns."""


def write_page(result: StepCheck, path: Path) -> Path:
    """Write the page of a check atomically, and return its path.

    Raises:
        SpecError: a check without its numbers, such as one read back from JSON.
    """
    return write_whole(Path(path), page(result).encode(errors="backslashreplace"))


def page(result: StepCheck) -> str:
    """Return the page as text."""
    if result.numbers is None:
        raise SpecError(
            "the page of a checked step",
            found="a StepCheck without its numbers",
            rule="tokens are drawn from the numbers of check_step",
            fix="check the dump again in this process",
        )
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", Path(result.origin).name), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", _answer(result), class_="answer"),
    )
    sections = [
        ("Stages", _stages(result)),
        ("Causes", _causes(result)),
        ("Tokens", _tokens(result)),
        ("What this dump cannot decide", tag("ul", [tag("li", sentence) for sentence in result.undecided])),
    ]
    return document(f"check of {Path(result.origin).name}", [masthead], sections)


def _answer(result: StepCheck) -> str:
    if result.first is None:
        return f"It {result.verdict}: {result.evidence}."
    cause = f" A cause that reproduces it: {result.causes[0].description}." if result.causes else ""
    return f"It differs, first in the stage {result.first.name}; {result.evidence}.{cause}"


def _stages(result: StepCheck) -> Markup:
    rows = []
    for stage in result.stages:
        worst = stage.mismatches[0] if stage.mismatches else None
        numbers = ["", ""] if worst is None else [significant(worst.recorded, 7), significant(worst.expected, 7)]
        what = stage.missing or (worst.quantity if worst is not None else ", ".join(stage.compared))
        rows.append([stage.name, stage.status, what, *numbers])
    return table(["stage", "status", "quantities", "recorded", "expected"], rows, numbers=range(3, 5))


def _causes(result: StepCheck) -> Markup:
    if not result.causes:
        text = "Nothing differs." if result.first is None else "No known mistake explains it."
        return join([tag("p", text), tag("ul", [tag("li", place) for place in result.places])])
    rows = [[cause.kind, cause.description, ", ".join(cause.explains)] for cause in result.causes]
    places = tag("ul", [tag("li", place) for place in result.places])
    return join([table(["kind", "what the trainer would have done", "explains"], rows), places])


def _tokens(result: StepCheck) -> Markup:
    """A table a document, those with a difference first, up to `MOST_TOKENS`."""
    numbers = result.numbers
    assert numbers is not None, "page"
    dump = numbers.reading.dump
    pairs = {name: _pair(numbers.recorded, numbers.expected, name) for name in _compared(numbers.recorded)}
    differ_T = torch.zeros(len(dump.document_ids_T), dtype=torch.bool)
    for name, (recorded_T, expected_T) in pairs.items():
        if recorded_T is not None and expected_T is not None and name in numbers.bounds:
            bound_T = torch.as_tensor(numbers.bounds[name])
            differ_T |= (recorded_T - expected_T).abs().nan_to_num(nan=math.inf) > bound_T
    differ_T &= dump.loss_mask_T
    differing_N = torch.bincount(dump.document_ids_T[differ_T], minlength=dump.num_documents)
    order = sorted(range(dump.num_documents), key=lambda n: (not bool(differing_N[n]), n))
    parts, left = list[Markup](), MOST_TOKENS
    for number in order:
        index_t = torch.nonzero(dump.document_ids_T == number).squeeze(1)
        if parts and len(index_t) > left:
            break
        shown_t, left = index_t[:left], left - len(index_t)
        title = f"document {number}: {len(index_t)} tokens, {int(differing_N[number])} differ"
        rows = [_row(dump, pairs, int(at), bool(differ_T[at])) for at in shown_t.tolist()]
        parts.append(tag("h3", title))
        parts.append(table(_head(dump, pairs), rows, numbers=range(1, len(rows[0]) if rows else 1)))
    hidden = len(order) - len(parts) // 2
    note = f"{hidden} further documents are not drawn." if hidden else "All documents are drawn."
    return join(
        [tag("p", "Recorded / recomputed in float64; ≠ where they differ by more than rounding. ", note), *parts]
    )


def _compared(recorded: Mapping[str, Tensor | float]) -> list[str]:
    """Names of recorded values of tokens, in the order of the stages."""
    names = [name for of_stage in STAGES.values() for name in of_stage]
    return [name for name in names if isinstance(recorded.get(name), Tensor)]


def _pair(
    recorded: Mapping[str, Tensor | float], expected: Mapping[str, Tensor | float], name: str
) -> tuple[Tensor | None, Tensor | None]:
    one, other = recorded.get(name), expected.get(name)
    return (one if isinstance(one, Tensor) else None), (other if isinstance(other, Tensor) else None)


def _head(dump: StepDump, pairs: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> list[str]:
    return ["token", *(name.replace("_", " ") for name in GIVEN if name in dump.tokens), *pairs, ""]


def _row(
    dump: StepDump, pairs: Mapping[str, tuple[Tensor | None, Tensor | None]], at: int, differs: bool
) -> Sequence[str]:
    cells = [str(int(dump.positions_T[at]))]
    for name in (name for name in GIVEN if name in dump.tokens):
        value = dump.tokens[name][at]
        cells.append(str(int(value)) if name in ("token_ids", "loss_mask") else significant(float(value), 4))
    for recorded_T, expected_T in pairs.values():
        sides = (None if side_T is None else float(side_T[at]) for side_T in (recorded_T, expected_T))
        cells.append(" / ".join("" if side is None else significant(side, 4) for side in sides))
    return [*cells, "≠" if differs else ""]
