"""Reader of what PipelineRL's preprocessor writes to its trainers: streams/training_data/I/P/0.jsonl, packed or padded.

A line is a micro-batch, a partition P a trainer. A stream has the lines of all steps; those read are taken for one.
Read from ServiceNow/PipelineRL 58d39345.

Letters: n tokens of a line, or of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import completion, groups_of_prompts, numbers_of, packed, read_json_lines, refuse_names
from workbench.dumps.step import StepDump
from workbench.systems.pipelinerl.settings import AdvantageSettings
from workbench.systems.registry import parse_settings

NAMES = {
    "input_ids": "token_ids",
    "advantages": "advantages",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
}
"""PipelineRL's name of a value of tokens -> that of `StepDump`."""
STREAM = "no log-probabilities of the live policy; a stream has the lines of all steps: those read are taken for one"
TURNS = "some prompts have one completion (turns of an agent?): rewards and groups are left out"


def read_dump(path: Path) -> StepDump:
    """Read the lines of one trainer (a file), or of all (the folder of their partitions).

    Raises:
        RecordError: no such file, a damaged one, a line without a value, a missing partition, or lines that are slices
            of sequences (seq_parallel).
    """
    files = _files(path)
    rows, prompts, rewards, places = [], list[Tensor](), list[Tensor](), list[int]()
    lines = [read_json_lines(file) for file in files]
    most = max(map(len, lines))
    for rank, (file, records) in enumerate(zip(files, lines, strict=True)):
        for number, record in enumerate(records):
            for values in _documents(file, f"line {number + 1}", record):
                reward = values.pop("rewards")
                own = completion(file, f"line {number + 1}", values)
                rows.append(own)
                prompts.append(values["token_ids"][: len(reward) - len(own["loss_mask"])])
                rewards.append(reward[-1:])
                places.append(rank * most + number)
    if not rows:
        raise refuse_names(path, "no document", "a line with documents")
    documents = {"rows": torch.as_tensor(places)}
    notes, groups_N = [STREAM], groups_of_prompts(prompts)
    if int(torch.bincount(groups_N).min()) > 1:
        documents |= {"rewards": torch.cat(rewards), "group_ids": groups_N}
    else:
        notes.append(TURNS)
    layout = {"dp": len(files), "micro_batches": most}
    rows = [{**row, "prompt_ids": prompt.long()} for row, prompt in zip(rows, prompts, strict=True)]
    return packed(path, rows, documents, system="pipelinerl", layout=layout, notes=tuple(notes))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / "0.jsonl").exists():
        return [path / "0.jsonl"]
    numbers = sorted(int(file.parent.name) for file in path.glob("*/0.jsonl") if file.parent.name.isdigit())
    if not numbers or numbers != list(range(len(numbers))):
        found = f"partitions {', '.join(map(str, numbers)) or 'none'}"
        raise refuse_names(path, found, "0.jsonl of partitions 0, 1, ... of one topic and instance")
    return [path / str(number) / "0.jsonl" for number in numbers]


def _documents(path: Path, where: str, record: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield values of the documents of a micro-batch, without padding."""
    if record.get("sentinel"):
        return
    columns = {name: numbers_of(path, where, record, name, dim=2) for name in (*NAMES, "labels", "rewards")}
    if len({tuple(value.shape) for value in columns.values()}) > 1:
        found = ", ".join(f"{name} {list(value.shape)}" for name, value in columns.items())
        raise refuse_names(path, f"{where}: {found}", "one value of each a token")
    if record.get("is_packed"):
        starts = numbers_of(path, where, record, "seq_boundaries").tolist()
        first = numbers_of(path, where, record, "position_ids", dim=2)[0, :1].tolist()
        if first != [0]:
            raise refuse_names(
                path, f"{where}: a slice that begins at position {first}", "whole sequences (seq_parallel 1)"
            )
        if starts[0] != 0 or starts[-1] != columns["labels"].shape[1] or sorted(starts) != starts:
            raise refuse_names(path, f"{where}: seq_boundaries {starts}", "from 0 to the length, in order")
        last = len(starts) - 1 - bool(record.get("padding"))  # the last sequence is then padding
        parts = [(0, slice(starts[number], starts[number + 1])) for number in range(last)]
    else:
        mask = numbers_of(path, where, record, "attention_mask", dim=2)
        lengths = [torch.nonzero(row).squeeze(1).tolist() for row in mask]
        parts = [(row, slice(places[0], places[-1] + 1)) for row, places in enumerate(lengths) if places]
    for row, own in parts:
        values = {ours: columns[name][row, own] for name, ours in NAMES.items()}
        values["loss_mask"] = torch.as_tensor([label != -100 for label in columns["labels"][row, own].tolist()])
        yield {**values, "rewards": columns["rewards"][row, own]}


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by PipelineRL's names.

    Raises:
        SpecError: an unknown option.
    """
    settings = parse_settings(AdvantageSettings, options, where="PipelineRL")
    scale = "std" if settings.divide_advantage_by_std else "none"
    same = {"baseline": "leave_one_out", "epsilon": settings.eps, "masked_in_baseline": True}
    return "grpo", {"scale": scale, **same}
