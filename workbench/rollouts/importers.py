"""Importers of rollouts: a trainer's padded arrays, or a table with one document per row.

Nothing is guessed, and nothing is dropped unless the caller names it: an unknown key, a list of another length or a
value that is not finite on a trained token is an error, with the file, the line and the key.

A record of a table (JSON lines or parquet) has the keys

    prompt_tokens           vocabulary ids
    completion_tokens       vocabulary ids
    old_logprobs            nats, one per completion token
    advantage | advantages  reward units, one number | one per completion token
    completion_loss_mask    optional: 0 on completion tokens that do not train (tool output)
    sampler_logprobs        optional, like old_logprobs
    ref_logprobs            optional, like old_logprobs
    reward                  optional: one number
    group_id                optional: a whole number, or a string (strings are numbered in order of appearance)

and every record has the same ones; null counts as absent. Real numbers of a table become float32; an array
keeps float64.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import RecordError, ShapeError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.columns import as_tensor

_TRL_KEYS = {
    **{name: name for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")},
    "old_per_token_logps": "old_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "tool_mask": "loss_mask",
    "rewards": "rewards",
    "group_ids": "group_ids",
}
_TRL_UNUSED = ("num_items_in_batch",)
_TRL_NAMES = {ours: trl for trl, ours in _TRL_KEYS.items()}
_OUR_NAMES = re.compile(rf"\b({'|'.join(_TRL_NAMES)})(?:_[TN]\b)?(?![a-z])")

_PER_TOKEN = ("old_logprobs", "sampler_logprobs", "ref_logprobs")
_REQUIRED = ("prompt_tokens", "completion_tokens", "old_logprobs")
_KEYS = {*_REQUIRED, "completion_loss_mask", "advantage", "advantages", *_PER_TOKEN, "reward", "group_id"}


def read_trl(arrays: Mapping[str, Any], *, temperature: float = 1.0, ignore: Sequence[str] = ()) -> RolloutBatch:
    """Build a batch from the padded arrays that TRL's GRPO trainer passes to its loss, under TRL's own names.

    Args:
        arrays: prompt_ids, prompt_mask, completion_ids, completion_mask, advantages, old_per_token_logps and,
            optionally, ref_per_token_logps, sampling_per_token_logps, tool_mask; also rewards and group_ids,
            which TRL does not pass on. num_items_in_batch, TRL's own denominator, is not used: here
            denominators come from the masks. None counts as absent.
        temperature: of the sampling.
        ignore: further keys that may be left out of the batch.

    Raises:
        ShapeError: an unknown or a missing key, or an error of `RolloutBatch.from_padded`.

    Source: the output of ``GRPOTrainer._generate_and_score_completions`` in huggingface/trl.
    """
    return _from_trl("read_trl", arrays, temperature, ignore)


def _from_trl(where: str, arrays: Mapping[str, Any], temperature: float, ignore: Sequence[str]) -> RolloutBatch:
    """`read_trl` with messages that begin with ``where`` and use TRL's names."""
    left_out = {*ignore, *_TRL_UNUSED}
    given = {key: value for key, value in arrays.items() if value is not None and key not in left_out}
    if unknown := sorted(set(given) - set(_TRL_KEYS)):
        raise ShapeError(
            where,
            found=f"unknown keys {', '.join(unknown)}",
            rule=f"keys are {', '.join([*_TRL_KEYS, *_TRL_UNUSED])}",
            fix=f"leave them out, or pass ignore={unknown} if the loss does not need them",
        )
    required = list(_TRL_KEYS)[:6]
    if missing := [key for key in required if key not in given]:
        raise ShapeError(
            where,
            found=f"no {', '.join(missing)}",
            rule=f"{', '.join(required)} are required",
            fix="TRL leaves old_per_token_logps out when the policy is the one that sampled: "
            "pass that policy's own log-probabilities under this name",
        )
    given = {key: as_tensor(f"{where}: {key}", value) for key, value in given.items()}
    if "tool_mask" in given and given["tool_mask"].shape == given["completion_mask"].shape:
        # TRL pads tool_mask with ones.
        given["tool_mask"] = given["tool_mask"] * given["completion_mask"]
    try:
        return RolloutBatch.from_padded(
            **{_TRL_KEYS[key]: value for key, value in given.items()}, temperature=temperature
        )
    except ShapeError as error:
        parts = {part: _OUR_NAMES.sub(lambda name: _TRL_NAMES[name[1]], text) for part, text in error.parts.items()}
        request = re.sub(r"^RolloutBatch(\.from_padded)?", lambda _: where, parts.pop("requested"))
        raise ShapeError(request, **parts) from None


def read_npz(path: Path, *, temperature: float = 1.0, ignore: Sequence[str] = ()) -> RolloutBatch:
    """Apply `read_trl` to the arrays of a numpy ``.npz`` file.

    Raises:
        RecordError: the file is missing, damaged, or contains pickled objects, which are never loaded.
        ShapeError: an error of `read_trl`; the message names file and key.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}", "a .npz file of plain numeric arrays") from None
    return _from_trl(str(path), arrays, temperature, ignore)


def read_jsonl(path: Path, *, temperature: float = 1.0) -> RolloutBatch:
    """Build a batch from JSON lines, one document per line; blank lines are skipped.

    Raises:
        RecordError: the file cannot be read, a line is not a JSON object, or a record breaks a rule of this
            module; the message names file, line and key.
    """
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}", "a text file, one JSON object per line") from None
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            records.append((where, json.loads(line)))
        except json.JSONDecodeError as error:
            raise RecordError(
                f"{where}: not JSON",
                found=str(error),
                rule="one JSON object per line",
                fix="fix the line; a cut last line means the writer was stopped",
            ) from None
    return _from_records(path, records, temperature)


def read_parquet(path: Path, *, temperature: float = 1.0) -> RolloutBatch:
    """Build a batch from a parquet table, one document per row (rows count from 0).

    Raises:
        RecordError: the file cannot be read, or a row breaks a rule of this module; the message names file,
            row and key.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            rows = parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}", "a parquet table") from None
    records = [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    return _from_records(path, records, temperature)


def _from_records(path: Path, records: Iterable[tuple[str, Any]], temperature: float) -> RolloutBatch:
    documents: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    first = ""
    for where, record in records:
        if not isinstance(record, Mapping):
            raise _broken(where, "", f"{type(record).__name__}", "a record is an object with keys")
        document = _document(where, {key: value for key, value in record.items() if value is not None})
        if documents and set(document) != set(documents[0]):
            raise _broken(
                where,
                ", ".join(sorted(set(document) ^ set(documents[0]))),
                f"present here or in {first}, but not in both",
                "every record has the same optional keys",
            )
        group = document.get("group_id")
        if documents and isinstance(group, str) != bool(groups):
            raise _broken(where, "group_id", repr(group), "all group ids are strings, or none is")
        if isinstance(group, str):
            document["group_id"] = groups.setdefault(group, len(groups))
        first = first or where
        documents.append(document)
    if not documents:
        raise _unreadable(path, "no record", "one document per record, and at least one")
    try:
        return RolloutBatch.from_documents(documents, temperature=temperature)
    except ShapeError as error:
        raise _unreadable(path, str(error), "records that make a batch") from None


def _document(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one record to a document of `RolloutBatch.from_documents`; prompt tokens get 0."""
    if unknown := sorted(set(record) - _KEYS):
        raise _broken(where, ", ".join(unknown), "unknown", f"the keys are {', '.join(sorted(_KEYS))}")
    missing = [key for key in _REQUIRED if key not in record]
    missing += [] if {"advantage", "advantages"} & set(record) else ["advantage"]
    if missing:
        raise _broken(where, ", ".join(missing), "missing", "tokens, advantage and old_logprobs are required")
    if {"advantage", "advantages"} <= set(record):
        raise _broken(where, "advantage, advantages", "both", "one number, or one per token")
    prompt = _whole_numbers(where, "prompt_tokens", record["prompt_tokens"])
    completion = _whole_numbers(where, "completion_tokens", record["completion_tokens"])
    count = len(completion)
    mask = [1] * count
    if "completion_loss_mask" in record:
        mask = _list(where, "completion_loss_mask", record["completion_loss_mask"])
        mask = [int(m) if isinstance(m, bool) else m for m in mask]
        if len(mask) != count or any(not isinstance(m, int) or m not in (0, 1) for m in mask):
            raise _broken(where, "completion_loss_mask", str(mask)[:80], f"{count} values, each 0 or 1")
    if mask[:1] == [1] and not prompt:
        raise _broken(where, "prompt_tokens", "empty", "a token that trains has one before it")
    if not prompt and not completion:
        raise _broken(where, "prompt_tokens, completion_tokens", "both empty", "a document has a token")

    zeros = [0.0] * len(prompt)
    document: dict[str, Any] = {"tokens": prompt + completion, "loss_mask": [0] * len(prompt) + mask}
    if "advantage" in record:
        document["advantages"] = zeros + [_number(where, "advantage", record["advantage"])] * count
    else:
        document["advantages"] = zeros + _per_token(where, "advantages", record["advantages"], mask)
    for key in _PER_TOKEN:
        if key in record:
            document[key] = zeros + _per_token(where, key, record[key], mask)
    if "reward" in record:
        document["reward"] = _number(where, "reward", record["reward"])
    if "group_id" in record:
        document["group_id"] = record["group_id"]
        if isinstance(record["group_id"], bool) or not isinstance(record["group_id"], int | str):
            raise _broken(where, "group_id", repr(record["group_id"]), "a whole number or a string")
    return document


def _list(where: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _broken(where, key, f"{value!r}"[:80], "a list")
    return value


def _whole_numbers(where: str, key: str, value: Any) -> list[int]:
    for item in _list(where, key, value):
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise _broken(where, key, repr(item), "vocabulary ids, whole numbers from 0")
    return value


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _broken(where, key, repr(value), "a finite number")
    return float(value)


def _per_token(where: str, key: str, values: Any, mask: list[int]) -> list[float]:
    """One number for each completion token; on tokens that do not train, null and NaN become 0."""
    values = _list(where, key, values)
    if len(values) != len(mask):
        raise _broken(where, key, f"{len(values)} values", f"one for each of {len(mask)} completion tokens")
    out: list[float] = []
    for index, (value, trained) in enumerate(zip(values, mask, strict=True)):
        absent = value is None or (isinstance(value, float) and not math.isfinite(value))
        if absent and not trained:
            out.append(0.0)
            continue
        out.append(_number(f"{where}, completion token {index}", key, value))
        if trained and "logprobs" in key and out[-1] > 1e-4:
            raise _broken(f"{where}, completion token {index}", key, repr(value), "log-probabilities are at most 0")
    return out


def _broken(where: str, key: str, found: str, rule: str) -> RecordError:
    return RecordError(
        f"{where}: {key}" if key else where,
        found=found,
        rule=rule,
        fix="the docstring of workbench.rollouts.importers lists the keys and their meaning",
    )


def _unreadable(path: Path, found: str, rule: str) -> RecordError:
    return RecordError(
        f"read rollouts from {path}", found=found, rule=rule, fix="check the path, and the writer of the file"
    )
