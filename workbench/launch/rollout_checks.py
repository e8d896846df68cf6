"""Checks of a recorded rollout dataset against settings and model, before a process starts and without torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import SpecError, listed
from workbench.sharding.divisibility import check_row_multiple, multiples
from workbench.specs.run import RunSpec

MOST_BYTES = 1 << 30
"""Size of the files that are read before the ranks read them: 1 GiB takes a second from a page cache."""
_NAME = "rollouts.safetensors"


@dataclass(frozen=True)
class Documents:
    """Lengths [N], group ids [N] (None without) and the largest token id of a rollout dataset."""

    lengths_N: np.ndarray
    groups_N: np.ndarray | None
    largest_token: int


@functools.lru_cache(8)
def _read(path: Path, _changed_ns: int) -> Documents | None:
    from safetensors import SafetensorError, safe_open

    with contextlib.suppress(OSError, SafetensorError, ValueError), safe_open(path, framework="np") as file:
        names = set(file.keys())
        ids_T, tokens_T = file.get_tensor("document_ids_T"), file.get_tensor("tokens_T")
        groups_N = file.get_tensor("group_ids_N") if "group_ids_N" in names else None
        return Documents(np.bincount(ids_T[ids_T >= 0]), groups_N, int(tokens_T.max(initial=0)))
    return None


def read_documents(folder: Path) -> Documents | None:
    """Return the sizes of a rollout dataset; None for one that is missing, damaged or larger than `MOST_BYTES`."""
    path = folder / _NAME
    with contextlib.suppress(OSError):
        status = path.stat()
        if status.st_size <= MOST_BYTES:
            return _read(path, status.st_mtime_ns)
    return None


def rollout_checks(spec: RunSpec, documents: Documents, vocabulary: int | None) -> Iterator[Callable[[], Any]]:
    """Yield the checks of a run on a rollout dataset; each raises a SpecError, or nothing."""
    if vocabulary is not None:
        yield lambda: check_vocabulary(spec, documents, vocabulary)
    if spec.data.documents_per_step is None:  # else a run may use some documents only
        if spec.data.micro_batch_tokens is not None:
            yield lambda: check_longest(spec, documents)
        if spec.loss.needs_pairs and documents.groups_N is not None:
            yield lambda: check_pairs(spec, documents)


def check_vocabulary(spec: RunSpec, documents: Documents, vocabulary: int) -> None:
    """Raise if a token is none of the model's."""
    if documents.largest_token >= vocabulary:
        raise SpecError(
            f"data.path = {spec.data.path!r} with model.source = {spec.model.source!r}",
            found=f"token {documents.largest_token}, and a vocabulary of {vocabulary} tokens",
            rule=f"token ids are those of the model's tokenizer, 0 to {vocabulary - 1}",
            fix="name the model that sampled these rollouts, or record rollouts of this one",
        )


def check_longest(spec: RunSpec, documents: Documents) -> None:
    """Raise if a document, or a group that stays together, is longer than a row."""
    layout, tokens = spec.layout, spec.data.micro_batch_tokens or 0
    multiple = check_row_multiple(spec.data, layout, spec.reproducible)
    of_document = multiples(layout, spec.reproducible).document
    lengths_N, what = -(-documents.lengths_N // of_document) * of_document, "document"
    if (spec.data.keep_groups or spec.loss.needs_pairs) and documents.groups_N is not None:
        numbers_N = np.unique(documents.groups_N, return_inverse=True)[1]
        lengths_N, what = np.bincount(numbers_N, weights=lengths_N).astype(int), "group of documents"
    longest, room = int(lengths_N.max(initial=0)), tokens // multiple * multiple
    if longest > room:
        raise SpecError(
            f"data.micro_batch_tokens = {tokens}",
            found=f"the longest {what} has {longest} tokens",
            rule="a row has whole documents, and those that a loss needs together",
            fix=f"allow at least {-(-longest // multiple) * multiple} tokens, or leave it out",
        )


def check_pairs(spec: RunSpec, documents: Documents) -> None:
    """Raise if a loss on preference pairs gets groups of another size."""
    assert documents.groups_N is not None, "the caller has looked"
    sizes = np.unique(documents.groups_N, return_counts=True)[1]
    if other := sorted({*map(int, sizes)} - {2}):
        raise SpecError(
            f"loss.name = {spec.loss.name!r} on data.path = {spec.data.path!r}",
            found=f"groups of {listed(other, 4)} documents",
            rule="a loss on preference pairs compares the two documents of a group: every group is a pair",
            fix="record two completions for each prompt, or select a pair of each group",
        )
