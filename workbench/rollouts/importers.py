"""Rollouts of another trainer as a batch: padded arrays, a DataFrame, records, or a file of these.

`load_rollouts` is the one entry; `workbench rollouts import` and the public `workbench.load_rollouts` call it.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import RecordError, ShapeError, SpecError, check_kind, did_you_mean
from workbench.rollouts import files
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.columns import as_tensor
from workbench.rollouts.engine_responses import records_of_responses
from workbench.rollouts.records import NAMES, NO_SIGNAL, read_records, unreadable
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import NO_ID, with_support
from workbench.untrusted import parse_json

_MASKS = ("prompt_mask", "completion_mask")
_ARRAYS = {**NAMES, **dict(zip(_MASKS, _MASKS, strict=True))}
"""Key of an array -> the argument of `RolloutBatch.from_padded` that it is."""
_UNUSED = ("num_items_in_batch",)
_REQUIRED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "old_logprobs")
_ARGUMENT = re.compile(rf"\b({'|'.join(dict.fromkeys(_ARRAYS.values()))})(?:_[TN]\b)?(?![a-z])")


def load_rollouts(
    source: Any,
    *,
    temperature: float | None = None,
    ignore: Sequence[str] = (),
    sampling: Sampling | None = None,
) -> RolloutBatch:
    """Load a batch from a rollout dataset, a file, a DataFrame, records or padded arrays.

    `RolloutBatch.save` makes a rollout dataset of it, whose folder is `data.path` of a run.

    Keys (each also under the names that follow it, such as TRL's), of a record or a row of a table, which is one
    document, and of padded arrays of B documents, [B, P] of prompts padded on the left and [B, C] of completions
    padded on the right:

        prompt_ids | prompt_tokens           vocabulary ids
        completion_ids | completion_tokens   vocabulary ids
        prompt_mask, completion_mask         padded arrays only, which need them: 1 on tokens
        old_logprobs | old_per_token_logps   nats, one for each completion token
        advantages | advantage               one number for a document, or one for each completion token. Without
                                             them rewards and group_ids are needed, from which a run computes them
                                             (its setting data.advantages, which is then required)
        rewards | reward                     optional: one number for a document
        group_ids | group_id                 optional: prompt of a document, a whole number (in records also a string,
                                             numbered in order of appearance)
        loss_mask | completion_loss_mask | tool_mask
                                             optional: 0 on completion tokens that do not train; without it all train
        sampler_logprobs | sampling_per_token_logps
                                             optional, like old_logprobs, as the sampler reported them
        ref_logprobs | ref_per_token_logps   optional, like old_logprobs, of the frozen reference
        support_ids                          optional: for each completion token, the ids that top-k, top-p and min-p of
                                             the sampler kept; [] or null: all. In padded arrays [B, C, K], filled with
                                             -1
        support_mass                         optional: for each completion token, the sampler's probability of these
                                             ids after the temperature

    A line of JSON may also have ``prompt_ids``, ``response`` (what an inference engine returned, see
    `workbench.rollouts.engine_responses`) and the keys of a reward.

    Every record has the same keys; null counts as absent. Real numbers of a table become float32; an array keeps
    float64.

    Args:
        source: the folder of a rollout dataset; a file .jsonl or .parquet (one document a record) or .npz (padded
            arrays); a DataFrame; dicts, one a document; a dict of padded tensors, arrays or nested lists.
        temperature: divisor of the logits when the tokens were sampled; None takes 1, or that of a rollout dataset.
        ignore: further keys that may be left out of the batch.
        sampling: truncation of the sampler, and what the log-probabilities are of (`workbench.rollouts.sampling`);
            None: not truncated, and log-probabilities after the temperature over the whole vocabulary.

    Raises:
        SpecError: a source of another kind, or an argument that a rollout dataset does not use.
        RecordError: a file is missing or damaged, or a record breaks a rule: the message names file, line and key.
        ShapeError: padded arrays that break a rule.

    Example:
        >>> batch = load_rollouts([
        ...     {"prompt_ids": [5], "completion_ids": [7, 2], "old_logprobs": [-1, -2], "reward": 1, "group_id": "a"},
        ...     {"prompt_ids": [5], "completion_ids": [9], "old_logprobs": [-1], "reward": 0, "group_id": "a"}])
        >>> batch.tokens_T.tolist(), batch.rewards_N.tolist()
        ([5, 7, 2, 5, 9], [1.0, 0.0])
    """
    check_kind("load rollouts: ignore", ignore, (list, tuple), "pass a list of keys")
    sampled_at = 1.0 if temperature is None else temperature
    if isinstance(source, str | Path):
        path = Path(source)
        _refuse_no_path(path)
        if path.suffix in _READERS and not path.is_dir():
            return _READERS[path.suffix](path, sampled_at, ignore, sampling)
        if path.is_file():
            raise SpecError(
                f"load rollouts from {path}",
                found=f"suffix {path.suffix!r}",
                rule=f"a folder with manifest.json, or a file {', '.join(_READERS)}",
                fix="rename the file to match its content",
            )
        named = {"temperature": temperature, "ignore": ignore, "sampling": sampling}
        if given := [name for name, value in named.items() if value]:
            raise SpecError(
                f"load the rollout dataset {path} with {', '.join(given)}",
                rule="a rollout dataset has its own temperature and sampling, and no other keys",
                fix="leave it out",
            )
        return files.load(path)
    if isinstance(source, Mapping):
        return _from_arrays("load_rollouts", source, sampled_at, ignore, sampling)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return read_records("a DataFrame", _rows(source), temperature=sampled_at, ignore=ignore, sampling=sampling)
    check_kind(
        "load rollouts",
        source,
        (str, Path, Mapping, Iterable),
        "pass a path, a DataFrame, a list of dicts (one a document), or a dict of padded arrays",
    )
    records = ((f"record {number}", record) for number, record in enumerate(source))
    return read_records("records", records, temperature=sampled_at, ignore=ignore, sampling=sampling)


def _refuse_no_path(path: Path) -> None:
    """Raise for a text that no file can have as its name; one that is only missing has a better error later."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {getattr(error, 'strerror', '') or error}"
        raise unreadable(f"{str(path)[:60]!r}", found, "a path of a file or folder") from None


def _from_arrays(
    where: str,
    arrays: Mapping[str, Any],
    temperature: float,
    ignore: Sequence[str],
    sampling: Sampling | None,
) -> RolloutBatch:
    """Build a batch of padded arrays; messages begin with ``where`` and have the names that were given."""
    left_out = {*ignore, *_UNUSED}
    given = {key: value for key, value in arrays.items() if value is not None and key not in left_out}
    if unknown := sorted(set(given) - set(_ARRAYS)):
        hints = [f"for {key!r}, {hint}" for key in unknown if (hint := did_you_mean(key, _ARRAYS))]
        raise ShapeError(
            where,
            found=f"unknown keys {', '.join(unknown)}",
            rule=f"keys are {', '.join([*_ARRAYS, *_UNUSED])}",
            fix="; ".join([*hints, f"leave them out, or pass ignore={unknown} if the loss does not need them"]),
        )
    names: dict[str, str] = {}
    for key in given:
        if (other := names.setdefault(_ARRAYS[key], key)) != key:
            raise ShapeError(where, found=f"both {other} and {key}", rule="one name", fix="leave one of them out")
    if missing := [name for name in _REQUIRED if name not in names]:
        if set(missing) & set(_MASKS):
            fix = "pass the masks, 1 on tokens; for lists of documents of any length pass a list of dicts, one each"
        else:
            fix = (
                "TRL leaves them out when the policy is the one that sampled: pass that policy's own "
                "log-probabilities under this name"
            )
        shown = ["old_logprobs (TRL's old_per_token_logps)" if name == "old_logprobs" else name for name in missing]
        raise ShapeError(where, found=f"no {', '.join(shown)}", rule=f"{', '.join(_REQUIRED)} are required", fix=fix)
    values = {_ARRAYS[key]: as_tensor(f"{where}: {key}", value) for key, value in given.items()}
    if "advantages" not in values:
        if not {"rewards", "group_ids"} <= set(values):
            raise ShapeError(
                where,
                found="no advantages, and " + ("rewards without group_ids" if "rewards" in values else "no rewards"),
                rule="a loss needs advantages",
                fix=NO_SIGNAL,
            )
        # to be computed by the run, which refuses to take these for recorded ones
        values["advantages"] = values["completion_ids"].new_zeros(values["completion_ids"].shape[:1]).float()
    if "tool_mask" in given and values["loss_mask"].shape == values["completion_mask"].shape:
        # TRL pads tool_mask with ones.
        values["loss_mask"] = values["loss_mask"] * values["completion_mask"]
    support_BCK, mass_BC = (values.pop(name, None) for name in ("support_ids", "support_mass"))
    try:
        batch = replace(RolloutBatch.from_padded(**values, temperature=temperature), sampling=sampling or Sampling())
        return batch if support_BCK is None else _with_padded_support(batch, where, values, support_BCK, mass_BC)
    except ShapeError as error:
        parts = {
            part: _ARGUMENT.sub(lambda name: names.get(name[1], name[1]), text) for part, text in error.parts.items()
        }
        request = re.sub(r"^RolloutBatch(\.from_padded)?", lambda _: where, parts.pop("requested"))
        raise ShapeError(request, **parts) from None


def _with_padded_support(
    batch: RolloutBatch, where: str, values: Mapping[str, Tensor], support_BCK: Tensor, mass_BC: Tensor | None
) -> RolloutBatch:
    """Return a batch with supports [B, C, K] of completions, in the order of its tokens."""
    masks = [values[name].bool() for name in _MASKS]
    shape = masks[1].shape
    if support_BCK.dim() != 3 or support_BCK.shape[:2] != shape or (mass_BC is not None and mass_BC.shape != shape):
        raise ShapeError(
            f"{where}: support_ids",
            found=f"shape {list(support_BCK.shape)}"
            + ("" if mass_BC is None else f", support_mass {list(mass_BC.shape)}"),
            rule="[B, C, K] ids of each completion token, and [B, C] masses, like completion_ids",
            fix=f"fill up supports with {NO_ID}, and masses with 1",
        )
    real = torch.cat(masks, dim=1)
    prompt_BPK = support_BCK.new_full((*masks[0].shape, support_BCK.shape[2]), NO_ID)
    mass_T = None
    if mass_BC is not None:
        mass_BC = torch.where(masks[1], mass_BC.double(), 1.0)
        mass_T = torch.cat([mass_BC.new_ones(masks[0].shape), mass_BC], dim=1)[real]
    return with_support(batch, torch.cat([prompt_BPK, support_BCK], dim=1)[real], mass_T=mass_T)


def _rows(table: Any) -> Iterator[tuple[str, Any]]:
    """Rows of a DataFrame; NaN in a column of single values is a missing one, as pandas has it."""
    for number, row in enumerate(table.to_dict("records")):
        missing = {key for key, value in row.items() if isinstance(value, float) and value != value}
        yield f"row {number}", {key: None if key in missing else value for key, value in row.items()}


# an array's header may declare any type and size; numpy raises what comes of it
_DAMAGED_ARRAYS = (
    OSError,
    ValueError,
    EOFError,
    AttributeError,
    TypeError,
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
)


def _read_npz(path: Path, temperature: float, ignore: Sequence[str], sampling: Sampling | None) -> RolloutBatch:
    try:
        with np.load(path, allow_pickle=False) as archive:  # pickled objects are never loaded
            arrays = {name: archive[name] for name in archive.files}
    except _DAMAGED_ARRAYS as error:
        raise unreadable(str(path), f"{type(error).__name__}: {error}", "a .npz file of plain numeric arrays") from None
    return _from_arrays(str(path), arrays, temperature, ignore, sampling)


def _read_jsonl(path: Path, temperature: float, ignore: Sequence[str], sampling: Sampling | None) -> RolloutBatch:
    """Read JSON lines, one document per line; blank lines are skipped."""
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        rule = "a text file, one JSON object per line"
        raise unreadable(str(path), f"{type(error).__name__}: {error}", rule) from None
    records: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            records.append((where, parse_json(line)))
        except ValueError as error:
            raise RecordError(
                f"{where}: not JSON",
                found=str(error),
                rule="one JSON object per line",
                fix="fix the line; a cut last line means the writer was stopped",
            ) from None
    if records and all(
        isinstance(record, Mapping) and isinstance(record.get("response"), Mapping) for _, record in records
    ):
        records = list(records_of_responses(records))
    return read_records(str(path), records, temperature=temperature, ignore=ignore, sampling=sampling)


def _read_parquet(path: Path, temperature: float, ignore: Sequence[str], sampling: Sampling | None) -> RolloutBatch:
    """Read a parquet table, one document per row; rows count from 0."""
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as file:
            rows = parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(str(path), f"{type(error).__name__}: {error}", "a parquet table") from None
    records = [(f"{path}, row {number}", row) for number, row in enumerate(rows)]
    return read_records(str(path), records, temperature=temperature, ignore=ignore, sampling=sampling)


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".npz": _read_npz}
"""Suffix of a file -> its reader."""
