"""The manifest of a rollout dataset, and the writer; `workbench.rollouts.files` has the format and the reader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors import torch as safetensors_torch
from torch import Tensor

from workbench.atomic import write_whole
from workbench.errors import RecordError, ShapeError
from workbench.rollouts.sampling import Order, Quantity, Sampling
from workbench.specs.mistakes import mistakes
from workbench.untrusted import parse_json

if TYPE_CHECKING:
    from workbench.rollouts.batch import RolloutBatch

TENSORS, MANIFEST = "rollouts.safetensors", "manifest.json"

MEANINGS = {
    "tokens_T": "the documents, end to end",
    "positions_T": "index of the token in its own document, from 0",
    "document_ids_T": "document of the token; -1 on padding",
    "loss_mask_T": "true if the token counts for the loss",
    "advantages_T": "advantage of the document over its group",
    "old_logprobs_T": "log-probability under the policy at the start of the update",
    "sampler_logprobs_T": "log-probability as the sampler reported it",
    "ref_logprobs_T": "log-probability under the frozen reference policy",
    "source_T": "index of the token in the batch that the row was packed from; -1 on padding",
    "group_ids_N": "prompt of the document",
    "rewards_N": "reward of the document",
}
"""One sentence for each field of `RolloutBatch`."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorFile(_Model):
    """Name, checksum and size of the tensor file."""

    file: Literal["rollouts.safetensors"]
    sha256: str
    bytes: int


class FieldEntry(_Model):
    """One tensor of the rollout dataset."""

    level: Literal["token", "document"]
    dtype: str
    shape: tuple[int, ...]
    unit: str
    meaning: str
    extension: bool = False
    """True for a field that is not one of `RolloutBatch`."""
    pad: float | None = None
    """The harmless value of an extension on padding."""
    at: Literal["target", "input"] | None = None
    """Alignment of an extension: with the predicted token, or with the input token."""


class Counts(_Model):
    """Sizes of the batch, known before a tensor is read."""

    documents: int
    tokens: int
    trained_tokens: int


class SamplingEntry(_Model):
    """Truncation of the sampler and quantities of the log-probabilities; see `workbench.rollouts.sampling.Sampling`."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    sampler_logprobs: Quantity = "scaled"
    trainer_logprobs: Quantity = "scaled"
    order: Order = "transformers"

    @model_validator(mode="after")
    def _check_values(self) -> SamplingEntry:
        try:
            self.sampling()
        except ShapeError as error:
            raise ValueError(str(error)) from None
        return self

    def sampling(self) -> Sampling:
        """Return the settings."""
        return Sampling(**self.model_dump())


class Manifest(_Model):
    """Contents of `manifest.json`."""

    format: Literal["workbench rollouts"]
    version: Literal[1]
    tensors: TensorFile
    temperature: float
    """Divisor of the logits when the tokens were sampled."""
    sampling: SamplingEntry | None = None
    """None: the sampler did not truncate, and all log-probabilities are scaled."""
    counts: Counts
    fields: dict[str, FieldEntry]
    provenance: dict[str, Any]
    """Free-form data of the writer."""


def save(
    batch: RolloutBatch, folder: Path, *, provenance: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Manifest:
    """Write a batch to ``folder`` atomically.

    A rollout dataset is its own source: its tokens are numbered from 0, also if ``batch`` was selected from another.
    Every other value comes back bit for bit, in its dtype. The provenance is any JSON data.

    Raises:
        RecordError: there is a rollout dataset in the folder and ``overwrite`` is False.
        ShapeError: the provenance does not fit in JSON.
    """
    if not overwrite:
        refuse_existing(folder)
    provenance = dict(provenance or {})
    try:
        json.dumps(provenance, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"save rollouts to {folder}",
            found=f"provenance: {error}",
            rule="the manifest is JSON",
            fix="leave out values that JSON cannot represent",
        ) from None
    entries, tensors = _describe(batch.as_source())
    content = safetensors_torch.save(tensors)
    manifest = Manifest(
        format="workbench rollouts",
        version=1,
        tensors=TensorFile(file=TENSORS, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content)),
        temperature=batch.temperature,
        sampling=SamplingEntry(**batch.sampling.changed()) if batch.sampling.changed() else None,
        counts=Counts(documents=batch.num_documents, tokens=batch.num_tokens, trained_tokens=batch.num_trained_tokens),
        fields=entries,
        provenance=provenance,
    )
    # Without a truncated sampler the file is that of earlier versions, which read it.
    left_out = {"sampling"} if manifest.sampling is None else set()
    text = json.dumps(manifest.model_dump(mode="json", exclude=left_out), indent=1, ensure_ascii=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_whole(folder / TENSORS, content)
    write_whole(folder / MANIFEST, f"{text}\n".encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a rollout dataset, without its tensors.

    Raises:
        RecordError: no manifest, not JSON, or not of this version.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate(parse_json(path.read_text(encoding="utf8")))
    except FileNotFoundError:
        raise damaged(path, "no such file" if folder.is_dir() else "no such folder") from None
    except ValidationError as error:
        raise damaged(path, mistakes(error, Manifest)) from None
    except (OSError, ValueError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from None


def refuse_existing(folder: Path) -> None:
    """Raise RecordError if a folder already has a rollout dataset."""
    if (folder / MANIFEST).exists():
        raise RecordError(
            f"write a rollout dataset to {folder}",
            found=f"a rollout dataset ({MANIFEST})",
            rule="a rollout dataset is not overwritten by accident",
            fix="choose another folder, or pass overwrite=True (--overwrite)",
        )


def _describe(batch: RolloutBatch) -> tuple[dict[str, FieldEntry], dict[str, Tensor]]:
    about: dict[str, dict[str, Any]] = {
        f.name: {"level": f.metadata["level"], "unit": f.metadata["unit"], "meaning": MEANINGS[f.name]}
        for f in fields(batch)
        if "level" in f.metadata
    }
    about |= {
        name: {"level": e.level, "unit": e.unit, "meaning": e.meaning, "extension": True, "pad": e.pad, "at": e.at}
        for name, e in batch.extensions.items()
    }
    # Clone each one, because safetensors refuses tensors that share memory.
    tensors = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in (batch.token_fields() | batch.document_fields()).items()
    }

    entries = {
        name: FieldEntry(**about[name], dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
        for name, value in tensors.items()
    }
    return entries, tensors


def damaged(path: Path, found: str) -> RecordError:
    """The error about a file of a rollout dataset."""
    return RecordError(
        f"read the rollout dataset file {path}",
        found=found,
        rule=f"{TENSORS} and {MANIFEST} as `save` wrote them together, format version 1",
        fix="copy or create the rollout dataset again, and see `workbench rollouts check`",
    )
