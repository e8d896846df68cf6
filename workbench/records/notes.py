"""Values that a trainer notes for a recorder: their names, their places, and metrics as numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError, ShapeError
from workbench.records import trainer_files as files


def check_names(names: Iterable[str]) -> None:
    """Refuse per-token values of other names than `trainer_files.TOKENS` with a ShapeError: nothing would read them."""
    for unknown in sorted(set(names) - files.TOKENS.keys()):
        near = difflib.get_close_matches(unknown, files.TOKENS)
        raise ShapeError(
            f"per-token values {unknown!r}",
            found=f"{unknown!r}, which diagnose does not read",
            rule=f"one of {', '.join(files.TOKENS)}",
            fix=f"rename it to {near[0]!r}" if near else "leave it out, or give it as a metric",
        )


def in_places(tokens: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Per-token values in the order of their places in the step, and the number of tokens whose place was taken.

    A place without a token has documents and rows of -1; of several tokens with one place the first is kept.
    """
    source = tokens["source"]
    known = (source >= 0).nonzero().flatten()
    length = int(source.max()) + 1 if len(source) else 0
    none = len(source)
    first = torch.full((length,), none).scatter_reduce(0, source[known].long(), known, "amin")
    places = (first < none).nonzero().flatten()
    ordered = {}
    for name, values in tokens.items():
        if name != "source":
            ordered[name] = values.new_full((length,), -1 if name in ("documents", "rows") else 0)
            ordered[name][places] = values[first[places]]
    return ordered, len(known) - len(places)


def of_parts(by_rank: Iterable[Mapping[str, float]], partial: Iterable[Iterable[str]]) -> list[str]:
    """Names of the metrics that are of parts of a step: with several values on one rank, or another on another."""
    several = {name for names in partial for name in names}
    first: dict[str, float] = {}
    for metrics in by_rank:
        several |= {name for name, value in metrics.items() if first.setdefault(name, value) != value}
    return sorted(several)


def metric_value(name: str, value: Any) -> float:
    """A metric as a number; RecordError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RecordError(
            f"record metric {name!r}",
            found=repr(value)[:60],
            rule="a metric is a number",
            fix="leave it out, or put it into the context",
        ) from None
