"""The interchange format of one optimizer step: safetensors of tensors, and a JSON file with the rest.

    folder/step.json             format, version, files, system, settings, recorded numbers; written last
    folder/<name>.safetensors    values of tokens and of documents, of all ranks or one file a rank

Values of tokens are [B, C], one document a row, or, with `document_ids`, [T] packed. docs/guides/check-a-step.md has
the names, and a writer of ten lines.

Letters: T tokens of a file | N documents of a file | B rows | C padded length.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from workbench.dumps.shards import Shard, join, join_ids
from workbench.dumps.step import DOCUMENT_FIELDS, ID_FIELDS, TOKEN_FIELDS, StepDump, as_value
from workbench.errors import RecordError, check_kind, did_you_mean
from workbench.specs.mistakes import mistakes
from workbench.untrusted import parse_json

STEP = "step.json"
_PLACES = ("document_ids", "positions", "document_numbers")
"""Tensors that say which tokens and documents a file holds."""


class Layout(BaseModel):
    """Sizes of the trainer's layout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp: int = Field(1, ge=1)
    """Data-parallel ranks."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks that share a row."""
    micro_batches: int = Field(1, ge=1)
    """Micro-batches of a rank in the step."""


class StepFile(BaseModel):
    """Contents of `step.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["rl step"]
    version: Literal[1]
    files: tuple[str, ...] = Field(min_length=1)
    """Names of the safetensors files, in this folder."""
    system: str = ""
    """The trainer: a system of `workbench.systems`; "": settings are those of a `LossSpec`."""
    settings: dict[str, Any] = {}
    """Options of the loss, by the system's names."""
    advantages: dict[str, Any] = {}
    """Options of the advantage estimator, by the system's names."""
    layout: Layout = Layout()
    """Ranks and micro-batches."""
    losses: dict[str, float] = {}
    """Recorded: "total", and terms ("policy", "kl", "entropy") with their coefficients."""
    counts: dict[Literal["tokens", "documents"], float] = {}
    """Recorded: what the loss was divided by."""
    metrics: dict[str, float] = {}
    """Recorded: numbers by the system's names."""
    gradient_norm: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Recorded: L2 norm of the whole gradient, before a clip."""
    texts: tuple[str, ...] = ()
    """Of the completions as the engine returned them, in the order of documents."""
    gradients: tuple[str, ...] = ()
    """Names of safetensors files with the step's gradient, whole, by the name of the parameter in the checkpoint."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Precision in which the trainer computed the loss."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits when the tokens were sampled."""
    on_policy: bool = False
    """The loss was computed on the old policy itself."""

    @field_validator("files", "gradients")
    @classmethod
    def _names(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(files)) < len(files) or any(Path(name).name != name for name in files):
            raise ValueError("different names of files in this folder, without a path")
        return files


def read_step(folder: Path | str) -> StepDump:
    """Read a step in the interchange format, and check every rule of it.

    Raises:
        SpecError: the folder is no path.
        RecordError: a file is missing, damaged or of another version; an unknown name, with the nearest known one; a
            shape, a mask or a value that breaks a rule, with document and token; shards that overlap or leave a gap.
    """
    check_kind("read a step", folder, (str, Path), f"pass the folder of {STEP}")
    folder = Path(folder)
    about = _read_about(folder / STEP)
    shards = [_read_shard(folder / name, alone=len(about.files) == 1) for name in about.files]
    ids_T, tokens, documents = join(shards, str(folder))
    ids = join_ids(shards, int(ids_T.max()) + 1, str(folder))
    given = about.model_dump(exclude={"format", "version", "files", "gradients"})
    return StepDump(
        ids_T, tokens, documents, ids, _read_gradients(folder, about.gradients), **given, origin=str(folder)
    )


def _read_gradients(folder: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for name in names:
        tensors = _load(folder / name)
        if twice := sorted(set(tensors) & set(gradients)):
            raise _broken(folder / name, f"the gradient of {twice[0]}, which another file has, too")
        gradients |= tensors
    return gradients


def _read_about(path: Path) -> StepFile:
    try:
        about = StepFile.model_validate(parse_json(path.read_text(encoding="utf8")))
    except ValidationError as error:
        raise _broken(path, mistakes(error, StepFile)) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _broken(path, f"{type(error).__name__}: {reason}") from None
    for name, value in [*about.losses.items(), *about.counts.items()]:
        if not math.isfinite(value):
            raise _broken(path, f"{name} = {value}: leave out numbers that are not finite")
    return about


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors_torch.load(path.read_bytes())
    except OSError as error:
        raise _broken(path, f"{type(error).__name__}: {error.strerror}") from None
    except (SafetensorError, ValueError) as error:
        raise _broken(path, f"not safetensors: {error}") from None


def _read_shard(path: Path, *, alone: bool) -> Shard:
    tensors = _load(path)
    known = (*TOKEN_FIELDS, *DOCUMENT_FIELDS, *_PLACES, *ID_FIELDS, *(_lengths_of(name) for name in ID_FIELDS))
    if unknown := [name for name in tensors if name not in known]:
        hints = "; ".join(f"{name}: {did_you_mean(name, known, 'not known')}" for name in unknown)
        raise _broken(path, f"unknown tensors: {hints}")
    packed = "document_ids" in tensors
    if not packed and "positions" in tensors:
        raise _broken(path, "positions without document_ids: rows of a rectangle begin at token 0")
    if "loss_mask" not in tensors or tensors["loss_mask"].dim() != (1 if packed else 2):
        present = list(tensors["loss_mask"].shape) if "loss_mask" in tensors else "none"
        raise _broken(path, f"loss_mask: {present}, where it is {'[T], as document_ids' if packed else '[B, C]'}")
    shape = tensors["loss_mask"].shape
    for name in _PLACES:
        if name in tensors and (tensors[name].is_floating_point() or tensors[name].dim() != 1):
            raise _broken(path, f"{name}: {tensors[name].dtype} {list(tensors[name].shape)}, where it is [n] of int64")
    of_documents = [name for name in DOCUMENT_FIELDS if name in tensors and tensors[name].shape != shape]
    tokens = {name: as_value(name, tensors[name]) for name in TOKEN_FIELDS if name in {*tensors} - {*of_documents}}
    for name, value in tokens.items():
        if value.shape != shape:
            raise _broken(path, f"{name}: {list(value.shape)}, where loss_mask is {list(shape)}")
    ids_T, positions_T, numbers_N = _places(path, tensors, shape, packed=packed, alone=alone)
    documents = {name: as_value(name, tensors[name]) for name in of_documents}
    flat = {name: value.reshape(-1) for name, value in tokens.items()}
    ids = {name: _ids(path, tensors, name, len(numbers_N)) for name in ID_FIELDS if name in tensors}
    if idle := [name for name in map(_lengths_of, ID_FIELDS) if name in tensors and _ids_of(name) not in tensors]:
        raise _broken(path, f"{idle[0]} without {_ids_of(idle[0])}")
    return Shard(path.name, ids_T, positions_T, flat, numbers_N, documents, ids)


def _lengths_of(name: str) -> str:
    """prompt_ids -> prompt_lengths."""
    return name.replace("_ids", "_lengths")


def _ids_of(lengths: str) -> str:
    return lengths.replace("_lengths", "_ids")


def _ids(path: Path, tensors: dict[str, Tensor], name: str, number: int) -> list[Tensor]:
    """Token ids of each document, [n] each, of ids end to end and their counts."""
    lengths = _lengths_of(name)
    if lengths not in tensors:
        raise _broken(path, f"{name} without {lengths}: how many are of each document")
    for one in (name, lengths):
        if tensors[one].is_floating_point() or tensors[one].dim() != 1:
            raise _broken(path, f"{one}: {tensors[one].dtype} {list(tensors[one].shape)}, where it is [n] of int64")
    counts = tensors[lengths].tolist()
    if len(counts) != number or min(counts, default=0) < 0 or sum(counts) != len(tensors[name]):
        found = f"{lengths}: {len(counts)} documents of {number}, {sum(counts)} tokens of {len(tensors[name])}"
        raise _broken(path, found)
    return list(tensors[name].long().split(counts))


def _places(
    path: Path, tensors: dict[str, Tensor], shape: torch.Size, *, packed: bool, alone: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Documents and positions of the tokens, and the numbers of the documents."""
    needed = ("document_numbers", "positions") if packed else ("document_numbers",)
    if not alone and (missing := [name for name in needed if name not in tensors]):
        raise _broken(path, f"no {', '.join(missing)}: one file of several says which tokens it holds")
    if not packed:
        numbers_N = tensors.get("document_numbers", torch.arange(shape[0])).long()
        if len(numbers_N) != shape[0]:
            raise _broken(path, f"document_numbers: {len(numbers_N)}, of {shape[0]} rows")
        return (
            numbers_N.repeat_interleave(shape[1]),
            torch.arange(shape[1]).repeat(shape[0]),
            numbers_N,
        )
    ids_T = tensors["document_ids"].long()
    if ids_T.shape != shape or tensors.get("positions", ids_T).shape != shape:
        raise _broken(path, f"document_ids or positions: {list(ids_T.shape)}, where loss_mask is {list(shape)}")
    positions_T = tensors["positions"].long() if "positions" in tensors else _running(ids_T)
    number = int(ids_T.max()) + 1 if len(ids_T) else 0
    return ids_T, positions_T, tensors.get("document_numbers", torch.arange(number)).long()


def _running(ids_T: Tensor) -> Tensor:
    """[T] how many tokens of the same document come before."""
    order_T = torch.argsort(ids_T, stable=True)
    sorted_T = ids_T[order_T]
    starts_T = torch.searchsorted(sorted_T, sorted_T)
    return torch.empty_like(ids_T).scatter_(0, order_T, torch.arange(len(ids_T)) - starts_T)


def _broken(path: Path, found: str) -> RecordError:
    return RecordError(
        f"read the step file {path}",
        found=found,
        rule=f'{STEP} of format "rl step", version 1, and the safetensors that it names',
        fix="correct the writer: docs/guides/check-a-step.md",
    )
