"""Reader of what prime-rl exports of a step: `token_exports/step_N/rank_R.jsonl`, of `trainer.enable_token_export`.

Exported are sequences with a token that trains. Read from PrimeIntellect-ai/prime-rl 559b4477, schema 1.

Letters: n tokens of a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import completion, numbers_of, packed, read_json_lines, refuse_names
from workbench.dumps.step import StepDump

SCHEMA = 1
NAMES = {
    "token_ids": "token_ids",
    "loss_mask": "loss_mask",
    "advantages": "advantages",
    "inference_logprobs": "sampler_logprobs",
    "trainer_logprobs": "policy_logprobs",
    "entropy": "entropies",
    "importance_ratio": "ratios",
    "is_masked": "clipped",
}
"""prime-rl's name of a column -> that of `StepDump`; the last two are empty for some losses."""
WITHOUT_REWARDS = "an export has no rewards or groups: advantages are taken as they are"
RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")


def read_dump(path: Path) -> StepDump:
    """Read the export of a step: its folder, with the files of all ranks, or the file of one rank.

    Raises:
        RecordError: no such file, a damaged one, another schema; a step that is still being written; sequences that are
            missing or there twice.
    """
    paths = _files(path)
    records = [(file, record) for file in paths for record in read_json_lines(file)]
    for file, record in records:
        if record.get("schema_version") != SCHEMA:
            raise refuse_names(file, f"schema_version {record.get('schema_version')!r}", f"{SCHEMA}, as of 559b4477")
    _check_places(path, records)
    rows = [_row(file, record) for file, record in records]
    dropped = [name for name in ("ratios", "clipped") if any(name not in row for row in rows)]
    rows = [{name: value for name, value in row.items() if name not in dropped} for row in rows]
    ranks = sorted({record["rank"] for _, record in records})
    most = 1 + max(record["micro_step"] for _, record in records)
    places = torch.as_tensor([ranks.index(record["rank"]) * most + record["micro_step"] for _, record in records])
    layout = {"dp": len(ranks), "micro_batches": most}
    notes = [WITHOUT_REWARDS]
    if path.is_file():
        notes.append("one rank: numbers of the whole step, such as denominators, need the folder")
    return packed(path, rows, {"rows": places}, system="prime_rl", layout=layout, notes=tuple(notes))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = {int(match[1]): file for file in path.iterdir() if (match := RANK_FILE.fullmatch(file.name))}
    if not files:
        raise refuse_names(path, "no rank_*.jsonl", "the folder step_N of a token export")
    if not (path / "STABLE").exists():
        raise refuse_names(path, "no STABLE", "a step that all ranks have written")
    ranks = sorted(files)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1  # of a context-parallel group, its first rank exports
    if ranks != list(range(0, stride * len(ranks), stride)):
        raise refuse_names(path, f"files of ranks {', '.join(map(str, ranks))}", "equally spaced ranks from 0 on")
    return [files[rank] for rank in ranks]


def _check_places(path: Path, records: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Each sequence is there once, of one step, and numbered from 0 without a gap in its file."""
    seen: dict[tuple[int, int, int], Path] = {}
    count: dict[Path, int] = {}
    for file, record in records:
        place = (record.get("rank", -1), record.get("micro_step", -1), record.get("micro_sequence_idx", -1))
        numbers = (*place, record.get("export_sequence_idx"), record.get("step"))
        if not all(isinstance(value, int) and value >= 0 for value in numbers):
            raise refuse_names(file, f"rank, micro_step, sequences and step {numbers}", "whole numbers")
        if place in seen:
            found = f"sequence {place[2]} of micro-batch {place[1]} of rank {place[0]} twice"
            raise refuse_names(file, found, "each sequence once")
        if record["export_sequence_idx"] != count.get(file, 0):
            found = f"sequence {record['export_sequence_idx']} after {count.get(file, 0)} sequences"
            raise refuse_names(file, found, "sequences from 0 without a gap")
        seen[place] = file
        count[file] = count.get(file, 0) + 1
        if (match := RANK_FILE.fullmatch(file.name)) and int(match[1]) != record["rank"]:
            raise refuse_names(file, f"a sequence of rank {record['rank']}", "those of the file's rank")
    if len(steps := {record["step"] for _, record in records}) > 1:
        raise refuse_names(path, f"steps {', '.join(map(str, sorted(steps)))}", "one step")


def _row(path: Path, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values of the sequence's completion; the component rl, if there are several."""
    where = f"sequence {record['export_sequence_idx']}"
    present = {name: ours for name, ours in NAMES.items() if ours not in ("ratios", "clipped") or _whole(record, name)}
    row = {ours: numbers_of(path, where, record, name) for name, ours in present.items()}
    for name in ("ce_weights", "ref_kl_weights"):
        if any(record.get(name) or ()):
            raise refuse_names(path, f"{where} with {name}", "the component rl alone: the others are not recomputed")
    if _whole(record, "rl_weights"):
        weights = numbers_of(path, where, record, "rl_weights")
        if not {*weights.tolist()} <= {0.0, 1.0}:
            raise refuse_names(path, f"{where} with rl_weights other than 0 and 1", "tokens that train, or do not")
        row["loss_mask"] = torch.logical_and(row["loss_mask"], weights)
    return completion(path, where, row)


def _whole(record: Mapping[str, Any], name: str) -> bool:
    values = record.get(name)
    return isinstance(values, list) and bool(values) and None not in values
