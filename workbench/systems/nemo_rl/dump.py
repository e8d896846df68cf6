"""Reader of what NeMo-RL logs of a step: `train_data_step*.jsonl`, one sample a line, every value in a list of one.

Two names are not NeMo-RL's own, and may be added to log_data by a hook: `curr_logprobs`, of the policy that the loss is
of, and `grad_curr_logprobs`, the loss's derivative by them. Read from NVIDIA-NeMo/RL 7ea279ab.

Letters: n tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import completion, groups_of_prompts, numbers_of, packed, read_json_lines, refuse_names
from workbench.dumps.step import StepDump
from workbench.systems.nemo_rl.settings import GroupSettings
from workbench.systems.registry import parse_settings

NAMES = {
    "token_ids": "token_ids",
    "token_loss_mask": "loss_mask",
    "advantages": "advantages",
    "prev_logprobs": "old_logprobs",
    "generation_logprobs": "sampler_logprobs",
    "curr_logprobs": "policy_logprobs",
    "grad_curr_logprobs": "coefficients",
}
"""NeMo-RL's name of a value of tokens -> that of `StepDump`."""
REQUIRED = ("token_ids", "token_loss_mask", "advantages")


def read_dump(path: Path) -> StepDump:
    """Read the samples of a step.

    Raises:
        RecordError: no such file, a damaged one, a line without a value, or lines that are missing or there twice.
    """
    records = [_of_one(path, number, record) for number, record in enumerate(read_json_lines(path))]
    rows, prompts, rewards = [], [], []
    for number, record in enumerate(records):
        if record.get("idx") != number:
            raise refuse_names(
                path, f"idx {record.get('idx')!r} in line {number + 1}", f"{number}: all lines, in order"
            )
        row, prompt = _row(path, number, record)
        rows.append(row)
        prompts.append(prompt)
        rewards.append(record.get("filtered_rewards", record.get("rewards")))
    documents = {
        "rewards": numbers_of(path, "the file", {"rewards": rewards}, "rewards"),
        "group_ids": groups_of_prompts(prompts),
    }
    notes = ["groups are samples of the same prompt tokens"]
    if "policy_logprobs" not in rows[0]:
        notes.append("NeMo-RL logs no log-probabilities of the live policy; a hook can add them as curr_logprobs")
    rows = [{**row, "prompt_ids": prompt.long()} for row, prompt in zip(rows, prompts, strict=True)]
    return packed(path, rows, documents, system="nemo_rl", notes=tuple(notes))


def _of_one(path: Path, number: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line, taken out of their list of one."""
    taken: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list) and len(value) != 1:
            raise refuse_names(path, f"line {number + 1}: {name} of {len(value)} samples", "one sample a line")
        taken[name] = value[0] if isinstance(value, list) else value
    return taken


def _row(path: Path, number: int, record: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Values of a sample's completion, and its prompt; a sample whose mask is 0 trains nowhere."""
    where, length, kept = f"line {number + 1}", record.get("input_lengths"), record.get("sample_loss_mask")
    if not isinstance(length, int) or kept not in (0, 1):
        raise refuse_names(
            path, f"{where}: input_lengths {length!r}, sample_loss_mask {kept!r}", "a length, and 0 or 1"
        )
    present = [name for name in NAMES if name in REQUIRED or name in record]
    row = {NAMES[name]: numbers_of(path, where, record, name) for name in present}
    if (shortest := min(map(len, row.values()))) < length:
        raise refuse_names(path, f"{where}: {shortest} values, of input_lengths {length}", "one of each a token")
    own = completion(path, where, {name: value[:length] for name, value in row.items()})
    prompt = row["token_ids"][: length - len(own["loss_mask"])]
    if not kept:
        own["loss_mask"] = torch.zeros_like(own["loss_mask"])
    return own, prompt


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options of `GRPOAdvantageEstimator`.

    Masked samples count in their group.

    Raises:
        SpecError: an unknown option.
    """
    settings = parse_settings(GroupSettings, options, where="NeMo-RL")
    one_out = settings.use_leave_one_out_baseline
    scale = "none" if not settings.normalize_rewards else "leave_one_out_std" if one_out else "std"
    baseline = "leave_one_out" if one_out else "mean"
    return "grpo", {"baseline": baseline, "scale": scale, "epsilon": 1e-6, "masked_in_baseline": True}
