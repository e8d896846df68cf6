"""Values that a trainer notes for a recorder: their names, their places, and metrics as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError, ShapeError, nearest_names
from workbench.records import trainer_files as files
from workbench.records.observed import dtype_name
from workbench.sharding.collectives import all_gather
from workbench.sharding.mesh import Axis

_ROW = "row of this rank"


class Notes:
    """Notes of one rank on a step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.metrics: dict[str, float] = {}
        self.tokens: dict[str, list[Tensor]] = {}
        self._counts: list[dict[str, Any]] = []
        self._partial: set[str] = set()

    def __bool__(self) -> bool:
        """True if anything of a micro-batch was noted."""
        return bool(self.losses or self.tokens or any(self._counts))

    def add(
        self,
        loss: Tensor | float | None,
        counts: Mapping[str, float] | None,
        metrics: Mapping[str, float] | None,
        tokens: Mapping[str, Tensor] | None,
    ) -> None:
        """Add a note; see `Recorder.note`."""
        if loss is not None:
            self.losses.append(torch.as_tensor(loss).detach().clone())  # read at the end of the step: no sync here
        self._counts.append(dict(counts or {}))
        for name, value in ((name, metric_value(name, value)) for name, value in (metrics or {}).items()):
            if name in self.metrics and self.metrics[name] != value:
                self._partial.add(name)
            self.metrics[name] = value
        if tokens:
            self._add_tokens(tokens)

    def _add_tokens(self, tokens: Mapping[str, Tensor]) -> None:
        check_names(tokens)
        shapes = {name: tuple(values.shape) for name, values in tokens.items()}
        if len(set(shapes.values())) > 1:
            raise ShapeError(
                "per-token values of a micro-batch",
                found=str(shapes),
                rule="all have one shape",
                fix="give each token of the micro-batch a value, padding too",
            )
        if self.tokens and self.tokens.keys() - {_ROW} != tokens.keys():
            raise ShapeError(
                "per-token values of a micro-batch",
                found=", ".join(sorted(tokens)),
                rule=f"every micro-batch of a step has the same: {', '.join(sorted(self.tokens.keys() - {_ROW}))}",
                fix="leave the others out, or give them always",
            )
        row = torch.full(next(iter(shapes.values())), len(next(iter(self.tokens.values()), [])))
        for name, values in (dict(tokens) if "rows" in tokens else {_ROW: row, **tokens}).items():
            self.tokens.setdefault(name, []).append(values.detach().flatten().clone())

    def as_json(self) -> dict[str, Any]:
        """All but the values of losses and tokens, as a rank tells the others."""
        return {
            "counts": [{name: float(count) for name, count in counts.items()} for counts in self._counts],
            "tokens": {name: dtype_name(pieces[0].dtype) for name, pieces in self.tokens.items()},
            "metrics": self.metrics,
            "partial": sorted(self._partial),
        }

    def gather_tokens(
        self, by_rank: Sequence[Mapping[str, Any]], axis: Axis, device: torch.device
    ) -> tuple[dict[str, Tensor], int]:
        """Per-token values of all ranks, in source order if it is known, and how many were noted twice. Collective.

        ``by_rank`` is `as_json` of each; a rank without any values sends an empty tensor.
        """
        dtypes = {name: dtype for rank in by_rank for name, dtype in rank["tokens"].items()}
        whole = {}
        for name in sorted(dtypes):
            none = torch.empty(0, dtype=getattr(torch, dtypes[name]), device=device)
            local = torch.cat([none, *(values.to(none) for values in self.tokens.get(name, []))])
            pieces = [piece.cpu() for piece in all_gather(local, axis)]
            if name == _ROW:  # numbered rank by rank
                most = max((int(piece.max()) + 1 for piece in pieces if len(piece)), default=1)
                pieces = [piece + rank * most for rank, piece in enumerate(pieces)]
            whole["rows" if name == _ROW else name] = torch.cat(pieces)
        if "source" not in whole:
            return whole, 0
        return in_places(whole)


def check_names(names: Iterable[str]) -> None:
    """Refuse per-token values of other names than `trainer_files.TOKENS` with a ShapeError: nothing would read them."""
    for unknown in sorted(set(names) - files.TOKENS.keys()):
        near = nearest_names(unknown, files.TOKENS)
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
