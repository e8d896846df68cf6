"""Rollouts as records, one document each: rows of JSON lines, of a parquet table or of a DataFrame, or dicts.

Nothing is guessed, and nothing is dropped unless the caller names it: an unknown key, a list of another length or a
value that is not finite on a trained token is an error, with the record and the key.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.errors import RecordError, ShapeError, did_you_mean, listed
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import with_support

NAMES: dict[str, str] = {
    "prompt_ids": "prompt_ids",
    "prompt_tokens": "prompt_ids",
    "completion_ids": "completion_ids",
    "completion_tokens": "completion_ids",
    "old_logprobs": "old_logprobs",
    "old_per_token_logps": "old_logprobs",
    "advantages": "advantages",
    "advantage": "advantages",
    "loss_mask": "loss_mask",
    "completion_loss_mask": "loss_mask",
    "tool_mask": "loss_mask",
    "sampler_logprobs": "sampler_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
    "ref_logprobs": "ref_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "rewards": "rewards",
    "reward": "rewards",
    "group_ids": "group_ids",
    "group_id": "group_ids",
    "support_ids": "support_ids",
    "support_mass": "support_mass",
}
"""Each accepted key, a trainer's names included -> the argument of `RolloutBatch.from_padded` that it is."""

WHERE_KEYS_ARE = "help(workbench.load_rollouts) and docs/guides/rollouts.md list the keys"
NO_SIGNAL = "give advantages, or rewards and group_ids, from which the run's data.advantages computes them"

_REQUIRED = {"prompt_ids": "prompt_tokens", "completion_ids": "completion_tokens", "old_logprobs": "old_logprobs"}
_SUPPORTS, _MASSES = "_supports", "_masses"
"""Keys of a document between `_document` and the batch."""
_PER_TOKEN = ("old_logprobs", "sampler_logprobs", "ref_logprobs")
_TEXTS = ("prompt", "completion", "text", "messages", "response")
"""Names under which trainers and hubs keep text; here only token ids are read."""


def read_records(
    what: str,
    records: Iterable[tuple[str, Any]],
    *,
    temperature: float = 1.0,
    ignore: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> RolloutBatch:
    """Build a batch of records, each with the words that name it in errors; ``what`` names all of them.

    Raises:
        RecordError: a record breaks a rule of `workbench.rollouts.importers.load_rollouts`.
    """
    documents: list[dict[str, Any]] = []
    groups: dict[str, int] = {}
    first = ""
    for where, record in records:
        if not isinstance(record, Mapping):
            raise broken(where, "", f"{type(record).__name__}", "a record is an object with keys")
        present = {key: _plain(value) for key, value in record.items() if key not in ignore}
        document = _document(where, {key: value for key, value in present.items() if value is not None})
        if documents and set(document) != set(documents[0]):
            raise broken(
                where,
                ", ".join(sorted(set(document) ^ set(documents[0]))),
                f"present here or in {first}, but not in both",
                "every record has the same optional keys",
            )
        group = document.get("group_id")
        if documents and isinstance(group, str) != bool(groups):
            raise broken(where, "group_id", repr(group), "all group ids are strings, or none is")
        if isinstance(group, str):
            document["group_id"] = groups.setdefault(group, len(groups))
        first = first or where
        documents.append(document)
    if not documents:
        raise unreadable(what, "no record", "one document per record, and at least one")
    for document in documents:
        document.setdefault("advantages", 0.0)  # to be computed by the run, which refuses to take these for recorded
    supports, masses = ([document.pop(name, None) for document in documents] for name in (_SUPPORTS, _MASSES))
    try:
        batch = replace(
            RolloutBatch.from_documents(documents, temperature=temperature), sampling=sampling or Sampling()
        )
        if supports[0] is None:
            return batch
        of_tokens = [ids for of_document in supports for ids in of_document]
        if masses[0] is None:
            return with_support(batch, of_tokens)
        mass_T = torch.tensor([mass for of_document in masses for mass in of_document], dtype=torch.float64)
        return with_support(batch, of_tokens, mass_T=mass_T)
    except ShapeError as error:
        raise unreadable(what, str(error), "records that make a batch") from None


def _plain(value: Any) -> Any:
    """Return arrays, tensors and numbers of numpy as Python has them, and a missing value of pandas as None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _document(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one record to a document of `RolloutBatch.from_documents`; prompt tokens get 0."""
    if unknown := [key for key in record if key not in NAMES]:
        raise _unknown(where, unknown)
    names: dict[str, str] = {}
    for key in record:
        if (other := names.setdefault(NAMES[key], key)) != key:
            raise broken(where, ", ".join(sorted((key, other))), "both", "each value is given under one name")
    values = {field: record[key] for field, key in names.items()}
    if missing := [key for field, key in _REQUIRED.items() if field not in values]:
        raise broken(where, ", ".join(missing), "missing", "tokens and old_logprobs are required")
    if "advantages" not in values and not {"rewards", "group_ids"} <= set(values):
        found = "reward without group_id" if "rewards" in values else "missing, and so is reward"
        raise broken(where, "advantage", found, NO_SIGNAL)
    prompt = _whole_numbers(where, names["prompt_ids"], values["prompt_ids"])
    completion = _whole_numbers(where, names["completion_ids"], values["completion_ids"])
    count = len(completion)
    mask = [1] * count
    if "loss_mask" in values:
        mask = _list(where, names["loss_mask"], values["loss_mask"])
        mask = [int(m) if isinstance(m, bool) else m for m in mask]
        if len(mask) != count or any(not isinstance(m, int) or m not in (0, 1) for m in mask):
            raise broken(where, names["loss_mask"], str(mask)[:80], f"{count} values, each 0 or 1")
    if mask[:1] == [1] and not prompt:
        raise broken(where, names["prompt_ids"], "empty", "a token that trains has one before it")
    if not prompt and not completion:
        raise broken(where, f"{names['prompt_ids']}, {names['completion_ids']}", "both empty", "a document has a token")

    zeros = [0.0] * len(prompt)
    document: dict[str, Any] = {"tokens": prompt + completion, "loss_mask": [0] * len(prompt) + mask}
    if isinstance(values.get("advantages"), list):
        document["advantages"] = zeros + _per_token(where, names["advantages"], values["advantages"], mask)
    elif "advantages" in values:
        document["advantages"] = zeros + [_number(where, names["advantages"], values["advantages"])] * count
    for field in _PER_TOKEN:
        if field in values:
            document[field] = zeros + _per_token(where, names[field], values[field], mask)
    if "support_ids" in values:
        document[_SUPPORTS] = [[]] * len(prompt) + _supports(where, values["support_ids"], count)
    if "support_mass" in values:
        if "support_ids" not in values:
            raise broken(where, "support_mass", "without support_ids", "a mass is that of a support")
        masses = _per_token(where, "support_mass", values["support_mass"], mask)
        document[_MASSES] = [1.0] * len(prompt) + [
            m if trained else 1.0 for m, trained in zip(masses, mask, strict=True)
        ]
    if "rewards" in values:
        document["reward"] = _number(where, names["rewards"], values["rewards"])
    if "group_ids" in values:
        document["group_id"] = group = values["group_ids"]
        if isinstance(group, bool) or not isinstance(group, int | str):
            raise broken(where, names["group_ids"], repr(group), "a whole number or a string")
    return document


def _supports(where: str, value: Any, count: int) -> list[list[int]]:
    """One list of ids for each completion token; null and an empty list: the whole vocabulary."""
    supports = _list(where, "support_ids", value)
    if len(supports) != count:
        raise broken(where, "support_ids", f"{len(supports)} lists", f"one for each of {count} completion tokens")
    return [
        [] if ids is None else _whole_numbers(f"{where}, completion token {at}", "support_ids", _plain(ids))
        for at, ids in enumerate(supports)
    ]


def _unknown(where: str, unknown: Sequence[str]) -> RecordError:
    if texts := [key for key in unknown if key in _TEXTS]:
        fix = (
            f"tokenize the text with the tokenizer that sampled it (tokenizer(text, add_special_tokens=False)"
            f".input_ids), give the ids as prompt_tokens and completion_tokens, and pass ignore={texts} (--ignore)"
        )
        rule = "rollouts are token ids: text does not tell how it was split"
        return broken(where, ", ".join(texts), "text", rule, fix)
    hints = [f"for {key!r}, {hint}" for key in unknown if (hint := did_you_mean(key, NAMES))]
    fix = f"{'; '.join([*hints[:4], ''])}pass ignore={list(unknown)} (--ignore) to leave out what no loss needs"
    return broken(where, listed(unknown), "unknown", f"the keys are {', '.join(NAMES)}", fix)


def _list(where: str, key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise broken(where, key, f"{value!r}"[:80], "a list")
    return list(value)


def _whole_numbers(where: str, key: str, value: Any) -> list[int]:
    numbers = _list(where, key, value)
    for item in numbers:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise broken(where, key, repr(item), "vocabulary ids, whole numbers from 0")
    return numbers


def _number(where: str, key: str, value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # an integer that no float holds
            if math.isfinite(number := float(value)):
                return number
    raise broken(where, key, repr(value)[:80], "a finite number")


def _per_token(where: str, key: str, values: Any, mask: list[int]) -> list[float]:
    """One number for each completion token; on tokens that do not train, null and NaN become 0."""
    values = _list(where, key, values)
    if len(values) != len(mask):
        raise broken(where, key, f"{len(values)} values", f"one for each of {len(mask)} completion tokens")
    out: list[float] = []
    for index, (value, trained) in enumerate(zip(values, mask, strict=True)):
        absent = value is None or (isinstance(value, float) and not math.isfinite(value))
        if absent and not trained:
            out.append(0.0)
            continue
        out.append(_number(f"{where}, completion token {index}", key, value))
        if trained and "log" in key and out[-1] > 1e-4:
            raise broken(f"{where}, completion token {index}", key, repr(value), "log-probabilities are at most 0")
    return out


def broken(where: str, key: str, found: str, rule: str, fix: str = "") -> RecordError:
    """The error about one record."""
    return RecordError(f"{where}: {key}" if key else where, found=found, rule=rule, fix=fix or WHERE_KEYS_ARE)


def unreadable(what: str, found: str, rule: str) -> RecordError:
    """The error about all records, or their file."""
    return RecordError(
        f"read rollouts from {what}", found=found, rule=rule, fix="check the path, and the writer of the file"
    )
