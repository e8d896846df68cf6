"""The record: prompts, completions and the log-probabilities that were recorded for them, document by document.

Letters: P prompt tokens | C completion tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.importers import load_rollouts
from workbench.untrusted import parse_json

REQUIRED = ("prompt_ids", "completion_ids", "sampler_logprobs")
OPTIONAL = ("trainer_logprobs", "old_logprobs", "loss_mask", "sampler_ids", "sampler_routes")
"""``old_logprobs`` are the trainer's, if it recorded no ``trainer_logprobs``."""
IGNORED = ("rewards", "reward", "advantages", "advantage", "group_id", "group_ids", "ref_logprobs")
"""Keys of rollouts that say nothing about the gap."""


@dataclass(frozen=True, eq=False)
class Document:
    """One prompt with one completion.

    Attributes:
        prompt: vocabulary ids.
        completion: vocabulary ids, as the trainer reads them.
        counted_C: [C] bool, tokens that are compared.
        sampler_C: [C] float64 nats, as the sampler recorded them.
        trainer_C: [C] float64 nats, as the trainer recorded them; None: they are computed.
        sampler_ids: the engine's own ids of the completion, if they were recorded.
        routes: [P + C - 1 or more, L, k] experts that the sampler chose at each token, if they were recorded.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    counted_C: Tensor
    sampler_C: Tensor
    trainer_C: Tensor | None = None
    sampler_ids: tuple[int, ...] | None = None
    routes: Tensor | None = None


def read_documents(source: Any) -> list[Document]:
    """Read documents from ``.jsonl``, from dicts, or from anything that `load_rollouts` reads.

    Raises:
        RecordError: a missing key, a list of another length, a number that is not finite; or no sampler's
            log-probabilities.
    """
    if isinstance(source, str | Path) and Path(source).suffix == ".jsonl":
        return _records(_lines(Path(source)))
    if isinstance(source, Sequence) and not isinstance(source, str) and all(isinstance(s, Mapping) for s in source):
        return _records((f"record {number}", record) for number, record in enumerate(source))
    if isinstance(source, Sequence) and not isinstance(source, str) and all(isinstance(s, Document) for s in source):
        return list(source)
    batch = source if isinstance(source, RolloutBatch) else load_rollouts(source)
    return _of_batch(batch)


def _lines(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeError) as error:
        raise _broken(str(path), "", f"{type(error).__name__}: {error}", "a readable file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path.name}, line {number}", parse_json(line)
            except ValueError as error:
                raise _broken(f"{path.name}, line {number}", "", str(error), "one JSON object a line") from None


def _records(records: Iterable[tuple[str, Any]]) -> list[Document]:
    documents = [_document(where, record) for where, record in records]
    if not documents:
        raise _broken("the rollouts", "", "no record", "one document a record")
    for name in ("trainer_C", "sampler_ids", "routes"):
        if len({getattr(document, name) is None for document in documents}) > 1:
            raise _broken("the rollouts", name, "present in some records only", "every record has the same keys")
    return documents


def _document(where: str, record: Any) -> Document:
    if not isinstance(record, Mapping):
        raise _broken(where, "", type(record).__name__, "a record is an object")
    known = (*REQUIRED, *OPTIONAL, *IGNORED)
    if unknown := sorted(set(record) - set(known)):
        raise _broken(where, ", ".join(unknown), "a key that is not read", f"keys: {', '.join(known)}")
    if missing := [name for name in REQUIRED if record.get(name) is None]:
        raise _broken(where, ", ".join(missing), "missing", f"required keys: {', '.join(REQUIRED)}")
    prompt, completion = _ids(where, record, "prompt_ids"), _ids(where, record, "completion_ids")
    if not prompt or not completion:
        raise _broken(where, "prompt_ids, completion_ids", "no token", "at least one token each")
    count = len(completion)
    counted_C = torch.tensor(record.get("loss_mask") or [1] * count, dtype=torch.bool)
    if len(counted_C) != count:
        raise _broken(where, "loss_mask", f"{len(counted_C)} values", f"{count}, one a completion token")
    trainer = record.get("trainer_logprobs", record.get("old_logprobs"))
    ids = None if record.get("sampler_ids") is None else _ids(where, record, "sampler_ids")
    routes = None
    if record.get("sampler_routes") is not None:
        try:
            routes = torch.tensor(record["sampler_routes"], dtype=torch.int64)
        except (TypeError, ValueError) as error:
            raise _broken(where, "sampler_routes", str(error), "[tokens][mixtures][experts of a token]") from None
        if routes.dim() != 3 or len(routes) < len(prompt) + count - 1:
            rule = f"[tokens, mixtures, experts of a token] of the prompt's {len(prompt)} and the completion's tokens"
            raise _broken(where, "sampler_routes", f"shape {list(routes.shape)}", rule)
    return Document(
        prompt,
        completion,
        counted_C,
        _nats(where, "sampler_logprobs", record["sampler_logprobs"], counted_C),
        None if trainer is None else _nats(where, "trainer_logprobs", trainer, counted_C),
        ids,
        routes,
    )


def _ids(where: str, record: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = record[key]
    if not isinstance(value, list | tuple) or not all(isinstance(v, int) and v >= 0 for v in value):
        raise _broken(where, key, repr(value)[:80], "a list of vocabulary ids")
    return tuple(value)


def _nats(where: str, key: str, value: Any, counted_C: Tensor) -> Tensor:
    try:
        nats_C = torch.tensor([float("nan") if v is None else v for v in value], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise _broken(where, key, str(error), "a list of numbers") from None
    if nats_C.shape != counted_C.shape:
        raise _broken(where, key, f"{len(nats_C)} values", f"{len(counted_C)}, one a completion token")
    if not nats_C[counted_C].isfinite().all() or (nats_C[counted_C] > 1e-4).any():
        raise _broken(where, key, "a value that is no finite log-probability", "nats, at most 0, on counted tokens")
    return nats_C


def _of_batch(batch: RolloutBatch) -> list[Document]:
    if batch.sampler_logprobs_T is None:
        raise _broken("the rollouts", "sampler_logprobs", "missing", "the sampler's own log-probabilities")
    documents = []
    for number in range(batch.num_documents):
        at = torch.nonzero(batch.document_ids_T == number)[:, 0]
        tokens, mask_T = batch.tokens_T[at].tolist(), batch.loss_mask_T[at].bool()
        if not mask_T.any():
            continue
        first = int(torch.nonzero(mask_T)[0])
        rest = at[first:]
        documents.append(
            Document(
                tuple(tokens[:first]),
                tuple(tokens[first:]),
                mask_T[first:],
                batch.sampler_logprobs_T[rest].double(),
                batch.old_logprobs_T[rest].double(),
            )
        )
    if not documents:
        raise _broken("the rollouts", "loss_mask", "no token that counts", "completions that were sampled")
    return documents


def _broken(where: str, key: str, found: str, rule: str) -> RecordError:
    return RecordError(
        f"read {where}" + (f": {key}" if key else ""),
        found=found,
        rule=rule,
        fix="docs/guides/trainer-and-sampler.md has the format",
    )
