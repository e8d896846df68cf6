"""Batch as strips, one per document: prompt, trained tokens with their direction, padding."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import NONE, significant
from workbench.report.rich.strips import Piece, framed, labelled, legend, not_drawn, runs
from workbench.rollouts.batch import PADDING, RolloutBatch

AT_ONCE, AT_ALL = 16, 400
"""Documents drawn at once, and drawn at all; the rest is counted."""

_MEANING = {
    "prompt": "prompt",
    "up": "trained, advantage > 0",
    "down": "trained, advantage < 0",
    "zero": "trained, advantage 0",
    "context": "after the prompt, not trained",
    "padding": "padding",
}


def batch_html(batch: RolloutBatch) -> Markup:
    """Return the documents in order, and a table of the fields."""
    rows = _rows(batch)
    summary = (
        f"{batch.num_documents} documents, {batch.num_tokens} tokens, {batch.num_trained_tokens} of them trained; "
        f"sampled at temperature {significant(batch.temperature)}"
    )
    shown = [tag("div", rows[:AT_ONCE], class_="strips")]
    if rest := rows[AT_ONCE:]:
        shown.append(tag("details", tag("summary", f"{len(rest)} more"), tag("div", rest, class_="strips")))
    return framed(
        tag("p", tag("strong", "RolloutBatch"), f" {summary}"),
        legend(_MEANING.items()),
        shown,
        not_drawn(batch.num_documents - AT_ALL, "documents"),
        tag("details", tag("summary", "fields"), _fields(batch)),
    )


def _rows(batch: RolloutBatch) -> list[list[Markup]]:
    """Return (name, strip, description) of every document that is drawn, and of the padding."""
    lengths = batch.lengths_N.tolist()
    padding = batch.num_tokens - sum(lengths)
    longest = max([*lengths, 1])
    order = batch.document_ids_T.argsort(stable=True)
    unordered = _kinds(batch)
    kinds = [unordered[index] for index in order.tolist()][padding:]
    advantages = batch.advantages_T[order].tolist()[padding:]
    rows, begin = [], 0
    for document, length in enumerate(lengths[:AT_ALL]):
        inside = slice(begin, begin + length)
        pieces = [Piece(b - a, kind, f"{_MEANING[kind]}: tokens {a} to {b - 1}") for kind, a, b in runs(kinds[inside])]
        named = zip(advantages[inside], kinds[inside], strict=True)
        trained = [value for value, kind in named if kind in ("up", "down", "zero")]
        text = f"{length} tokens, {len(trained)} trained, advantage {_span(trained)}"
        if batch.rewards_N is not None:
            text += f", reward {significant(float(batch.rewards_N[document]))}"
        rows.append(labelled(f"{document}", pieces, longest, f"document {document}: {text}", text))
        begin += length
    if padding:
        text = f"{padding} tokens"
        pieces = [Piece(min(padding, longest), "padding", text)]
        rows.append(labelled("padding", pieces, longest, f"padding: {text}", text))
    return rows


def _kinds(batch: RolloutBatch) -> list[str]:
    """Return the kind of each token, in the order of the packed row."""
    kinds, opened = [], set()
    for document, trains, advantage in zip(
        batch.document_ids_T.tolist(), batch.loss_mask_T.tolist(), batch.advantages_T.tolist(), strict=True
    ):
        if document == PADDING:
            kinds.append("padding")
        elif trains:
            opened.add(document)
            kinds.append("up" if advantage > 0 else "down" if advantage < 0 else "zero")
        else:
            kinds.append("context" if document in opened else "prompt")
    return kinds


def _span(values: list[float]) -> str:
    """Format one number with its sign if all are equal, or else the lowest and the highest."""
    if not values:
        return NONE
    ends = dict.fromkeys(f"{'+' if value > 0 else ''}{significant(value)}" for value in (min(values), max(values)))
    return " to ".join(ends)


def _fields(batch: RolloutBatch) -> Markup:
    units = {f.name: f.metadata["unit"] for f in fields(batch) if "unit" in f.metadata}
    units |= {name: extension.unit for name, extension in batch.extensions.items()}
    rows: list[list[Any]] = []
    for level, values in (("token", batch.token_fields()), ("document", batch.document_fields())):
        for name, value in values.items():
            counted = value[batch.loss_mask_T] if level == "token" and value.dtype != torch.bool else value
            shape, kind = "×".join(map(str, value.shape)), str(value.dtype).removeprefix("torch.")
            rows.append([tag("code", name), shape, kind, units[name], _range(counted)])
    return table(["field", "shape", "type", "unit", "range (of token fields, where trained)"], rows, class_="table")


def _range(values: Tensor) -> str:
    if not values.numel():
        return NONE
    if values.dtype == torch.bool:
        return f"true on {int(values.sum())} of {values.numel()}"
    write = (lambda end: significant(float(end))) if values.is_floating_point() else (lambda end: str(int(end)))
    return " to ".join(dict.fromkeys([write(values.min()), write(values.max())]))
