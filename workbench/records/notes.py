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


def in_places(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-token values in the order of their places in the step; a place without a token has documents and rows of -1.

    Raises:
        ShapeError: two tokens with the same place.
    """
    source = tokens["source"]
    known = source >= 0
    length = int(source.max()) + 1 if len(source) else 0
    times = torch.bincount(source[known], minlength=length)
    if length and int(times.max()) > 1:
        place = int(times.argmax())
        raise ShapeError(
            "per-token values with source",
            found=f"{int(times[place])} tokens with place {place}, and {int((times > 1).sum())} such places",
            rule="each token of the step has a place of its own, over all ranks and micro-batches",
            fix="number the tokens of the whole step, with -1 for padding; or leave source out, if ranks do train the "
            "same tokens",
        )
    ordered = {}
    for name, values in tokens.items():
        if name != "source":
            ordered[name] = values.new_full((length,), -1 if name in ("documents", "rows") else 0)
            ordered[name][source[known]] = values[known]
    return ordered


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
