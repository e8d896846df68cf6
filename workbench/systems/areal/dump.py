"""Readers of AReaL: trajectories that it writes (`rollout.dump_to_file`), and a step's loss inputs, which a hook saves.

Trajectories are rollout/<version>/<task>.jsonl, text and rewards; the samples of a task are a group. Read from
inclusionAI/AReaL 4aef98d8. AReaL writes no tensors of a step. The hook wraps `grpo_loss_fn` (trainer/ppo/actor.py,
1.0.4) and saves its packed ``input_data``, a file a rank and micro-batch, `rank_R_micro_M.pt`; with `live_logprobs`, of
the policy that the loss is of, and `grad_live_logprobs`, the derivative by them of the loss that reaches the optimizer
(tests/dumps/areal/write.py). Values stand at the position that predicts a token.

Letters: T packed positions of a file | n positions of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import (
    completion,
    count_of,
    micro_batch_files,
    numbered,
    numbers_of,
    packed,
    read_json_lines,
    refuse_names,
    text_only,
)
from workbench.dumps.step import StepDump
from workbench.rollouts.torch_files import read_restricted

LEFT_OUT = "AReaL writes no sample without a completion: groups may have had more samples (task {})"
NAMES = {
    "loss_mask": "loss_mask",
    "live_logprobs": "policy_logprobs",
    "prox_logp": "old_logprobs",
    "logprobs": "sampler_logprobs",
    "ref_logp": "ref_logprobs",
    "entropy": "entropies",
    "advantages": "advantages",
    "grad_live_logprobs": "coefficients",
}
"""AReaL's name of a value [T] -> that of `StepDump`; its old policy is the one that sampled."""
ONE_POLICY = "no prox_logp: the ratio is against the policy that sampled"
OF_ONE = "one micro-batch of one rank: denominators and losses are those of the whole step"


def read_dump(path: Path) -> StepDump:
    """Read one task (a file), all tasks of a folder, or a step's loss inputs (a folder of .pt, or one of its files).

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, a line without a reward, a sample that is
            there twice, a rank or micro-batch that is missing, values that disagree in length.
    """
    if path.suffix == ".pt" or (path.is_dir() and any(path.glob("*.pt"))):
        return _loss_inputs(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise refuse_names(path, "no *.jsonl", "the folder of a version, with a file a task")
    rewards, tasks, places = list[float](), list[Any](), dict[tuple[int, int], Path]()
    for file in files:
        for number, record in enumerate(read_json_lines(file)):
            task, sample, reward = (record.get(name) for name in ("task_id", "sample_idx", "reward"))
            if not isinstance(task, int) or not isinstance(sample, int) or not isinstance(reward, int | float):
                found = f"line {number + 1}: task_id {task!r}, sample_idx {sample!r}, reward {reward!r}"
                raise refuse_names(file, found, "three numbers")
            if (task, sample) in places:
                raise refuse_names(file, f"sample {sample} of task {task} twice", "each sample once")
            places[task, sample] = file
            rewards.append(float(reward))
            tasks.append(task)
    counts = {task: tasks.count(task) for task in dict.fromkeys(tasks)}
    most = 1 + max(sample for _, sample in places)
    dump = text_only(rewards, numbered(tasks), system="areal", origin=str(path))
    short = [task for task, count in counts.items() if count < most]
    return dump.with_note(LEFT_OUT.format(short[0])) if short else dump


def _loss_inputs(path: Path) -> StepDump:
    places = micro_batch_files(path)
    rows, files, losses, notes = list[dict[str, Tensor]](), list[int](), list[tuple[float, float]](), list[str]()
    for number, file in enumerate(places.values()):
        content = read_restricted(file)
        if not isinstance(content, Mapping):
            raise refuse_names(file, f"a {type(content).__name__}", "a dict of the input_data of grpo_loss_fn")
        own = _sequences(file, content)
        rows += own
        files += [number] * len(own)
        trained = sum(count_of(row["loss_mask"]) for row in own)
        if content.get("loss") is not None:
            losses.append((float(content["loss"]), trained))
    if "old_logprobs" not in rows[0]:
        notes.append(ONE_POLICY)
        rows = [{**row, "old_logprobs": row["sampler_logprobs"]} for row in rows]
    if not path.is_dir():
        rows = [{name: value for name, value in row.items() if name != "coefficients"} for row in rows]
        return packed(path, rows, {}, system="areal", notes=(*notes, OF_ONE))
    ranks, micro = (1 + max(place[axis] for place in places) for axis in (0, 1))
    total = sum(trained for _, trained in losses)
    recorded = (
        {"total": sum(loss * trained for loss, trained in losses) / total}
        if total and len(losses) == len(places)
        else {}
    )
    return packed(
        path,
        rows,
        {"rows": torch.as_tensor(files)},
        system="areal",
        layout={"dp": ranks, "micro_batches": micro},
        losses=recorded,
        notes=tuple(notes),
    )


def _sequences(file: Path, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Values of each sequence's completion: a position's are those of the token behind it, and the last has none."""
    if missing := [name for name in ("input_ids", "cu_seqlens", "loss_mask", "logprobs") if content.get(name) is None]:
        found = f"no {', '.join(missing)} in {', '.join(map(str, content))}"
        raise refuse_names(file, found, "the packed input_data of grpo_loss_fn")
    present = {name: ours for name, ours in NAMES.items() if content.get(name) is not None}
    values = {ours: numbers_of(file, "the file", content, name) for name, ours in present.items()}
    ids, bounds = (numbers_of(file, "the file", content, name) for name in ("input_ids", "cu_seqlens"))
    ends = [int(end) for end in bounds.tolist()]
    if len(ends) < 2 or ends[0] != 0 or sorted(set(ends)) != ends:
        raise refuse_names(file, f"cu_seqlens {ends[:8]}", "ends of sequences from 0 on, each longer than 0")
    lengths = {name: len(value) for name, value in {**values, "input_ids": ids}.items() if len(value) != ends[-1]}
    if lengths:
        found = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise refuse_names(file, f"{found}, of {ends[-1]} packed positions", "one value a position")
    rows = []
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        row = {name: value[start : end - 1] for name, value in values.items()}
        row["token_ids"] = ids[start + 1 : end]
        rows.append(completion(file, f"sequence {number}", row))
    return rows
