"""Reader of trajectories that AReaL writes (`rollout.dump_to_file`): rollout/<version>/<task>.jsonl, text and rewards.

The samples of a task are a group. Read from inclusionAI/AReaL 4aef98d8.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.dumps.readers import numbered, read_json_lines, refuse_names, text_only
from workbench.dumps.step import StepDump

LEFT_OUT = "AReaL writes no sample without a completion: groups may have had more samples (task {})"


def read_dump(path: Path) -> StepDump:
    """Read one task (a file), or all tasks of a folder.

    Raises:
        RecordError: no such file, a damaged one, a line without a reward, or a sample that is there twice.
    """
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
