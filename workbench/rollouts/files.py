"""A rollout dataset on disk: one safetensors file, and a manifest with its contents and checksum.

    folder/rollouts.safetensors     every field of the batch, bit for bit
    folder/manifest.json            format, checksum, shape, unit and meaning of each field, provenance

Both files are written under another name, flushed and renamed, the manifest last; its presence marks a complete
dataset. Nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from workbench.errors import ShapeError, check_kind
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.manifest import (
    MANIFEST,
    MEANINGS,
    TENSORS,
    Counts,
    FieldEntry,
    Manifest,
    damaged,
    read_manifest,
    refuse_existing,
    save,
)
from workbench.rollouts.sampling import Sampling

__all__ = ["MANIFEST", "MEANINGS", "FieldEntry", "load", "read_manifest", "refuse_existing", "save"]


def load(folder: Path | str) -> RolloutBatch:
    """Read the batch that `save` wrote.

    Raises:
        SpecError: the folder is no path.
        RecordError: a file is missing, truncated, changed, of another version, or contradicts the other one; the
            message names the file.
    """
    check_kind("load rollouts", folder, (str, Path), "pass the folder that holds manifest.json")
    folder = Path(folder)
    manifest = read_manifest(folder)
    path = folder / TENSORS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"{type(error).__name__}: {error.strerror}") from None
    expected = manifest.tensors
    if len(content) != expected.bytes:
        cut = "truncated: " if len(content) < expected.bytes else ""
        raise damaged(path, f"{cut}{len(content)} bytes, where {MANIFEST} says {expected.bytes}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected.sha256:
        raise damaged(path, f"sha256 {digest[:16]}..., where {MANIFEST} says {expected.sha256[:16]}...")
    try:
        tensors = safetensors_torch.load(content)
    except SafetensorError as error:
        raise damaged(path, f"not safetensors: {error}") from None
    return _batch(manifest, tensors, folder)


def _batch(manifest: Manifest, tensors: dict[str, Tensor], folder: Path) -> RolloutBatch:
    path = folder / TENSORS
    if set(tensors) != set(manifest.fields):
        raise damaged(path, f"tensors {sorted(tensors)}, where {MANIFEST} says {sorted(manifest.fields)}")
    for name, entry in manifest.fields.items():
        dtype, shape = str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape)
        if (dtype, shape) != (entry.dtype, entry.shape):
            raise damaged(
                path, f"{name} is {dtype}{list(shape)}, where {MANIFEST} says {entry.dtype}{list(entry.shape)}"
            )
    own = {name: value for name, value in tensors.items() if not manifest.fields[name].extension}
    extensions = {
        name: Extension(tensors[name], entry.level, entry.unit, entry.meaning, entry.pad or 0.0, entry.at or "target")
        for name, entry in manifest.fields.items()
        if entry.extension
    }
    unknown = sorted(set(own) - set(MEANINGS))
    if unknown:
        raise damaged(folder / MANIFEST, f"fields {unknown}, which no batch has")
    try:
        sampling = Sampling() if manifest.sampling is None else manifest.sampling.sampling()
        batch = RolloutBatch(**own, extensions=extensions, temperature=manifest.temperature, sampling=sampling)
    except (ShapeError, TypeError) as error:
        raise damaged(path, f"not a valid batch: {error}") from None
    counts = Counts(documents=batch.num_documents, tokens=batch.num_tokens, trained_tokens=batch.num_trained_tokens)
    if counts != manifest.counts:
        raise damaged(folder / MANIFEST, f"counts {manifest.counts}, where {TENSORS} holds {counts}")
    return batch
