"""Reader of what TRL writes of a step: tensors of `GRPOTrainer._compute_loss` under its names, and logged completions.

TRL saves no tensors by itself; a hook in a subclass does (docs/guides/check-a-step.md). Two of its names are not TRL's:
`per_token_logps`, which the loss is computed from, and `grad_per_token_logps`, the loss's derivative by them; nor is
`gradients`, those of the parameters by name, before they are clipped.

Letters: B rows | C padded length of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import (
    gradients_of,
    numbered,
    padded_ids,
    read_table,
    rectangle,
    refuse_names,
    text_only,
    total_of,
)
from workbench.dumps.step import StepDump
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "completion_ids": "token_ids",
    "per_token_logps": "policy_logprobs",
    "old_per_token_logps": "old_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "entropies": "entropies",
    "importance_sampling_ratio": "correction_weights",
    "grad_per_token_logps": "coefficients",
}
"""TRL's name of a tensor [B, C], or [B, 1], -> that of `StepDump`."""

NORM = "grad_norm"
"""Trainer's name of the gradient's norm, before it is clipped; it is logged after the step, so that a hook adds it."""

TEXT = ("step", "prompt", "completion", "advantage")
"""Columns of logged completions that are no rewards."""


def read_dump(path: Path) -> StepDump:
    """Read a dict of tensors (`.pt`, or a pickle), or logged completions (`.parquet`).

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, or a batch without completion_mask.
    """
    if path.suffix == ".parquet":
        return _completions(path)
    content = read_restricted(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("completion_mask"), Tensor):
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise refuse_names(path, found, "a dict of the tensors of _compute_loss, with completion_mask")
    completion_mask = content["completion_mask"]
    shape = completion_mask.shape
    tokens = {"token_mask": completion_mask, "loss_mask": completion_mask}
    if isinstance(content.get("tool_mask"), Tensor):
        tokens["loss_mask"] = torch.logical_and(completion_mask, content["tool_mask"])
    for name, ours in NAMES.items():
        if isinstance(content.get(name), Tensor) and content[name].dim() == 2:
            tokens[ours] = content[name].expand(shape)
    documents: dict[str, Tensor] = {}
    advantages = content.get("advantages")
    if isinstance(advantages, Tensor):
        (documents if advantages.dim() == 1 else tokens)["advantages"] = advantages
    loss, given = content.get("loss"), content.get("metrics")
    metrics = _numbers(given if isinstance(given, Mapping) else {})
    return rectangle(
        tokens,
        documents,
        system="trl",
        losses={} if loss is None else {"total": float(loss)},
        gradient_norm=metrics.pop(NORM, None),
        metrics=metrics,
        origin=str(path),
        ids=_prompts(path, content),
        gradients=gradients_of(path, content.get("gradients")),
        notes=_notes(content),
    )


def _prompts(path: Path, content: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    ids, mask = content.get("prompt_ids"), content.get("prompt_mask")
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        return {}
    return {"prompt_ids": padded_ids(path, "prompt_ids", ids, mask)}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _notes(content: Mapping[str, Any]) -> tuple[str, ...]:
    notes = ["the tensors have no rewards: TRL computes advantages before it shuffles; its completions have both"]
    if "per_token_logps" not in content:
        notes.append("no per_token_logps: TRL computes them inside _compute_loss, where a hook can keep them")
    return tuple(notes)


def _completions(path: Path) -> StepDump:
    """Read logged completions: texts, one column of rewards for each function, and advantages."""
    table = read_table(path)
    if missing := [name for name in ("prompt", "advantage") if name not in table]:
        raise refuse_names(path, f"columns {', '.join(table)}", f"completions as TRL logs them, with {missing[0]}")
    functions = [name for name, values in table.items() if name not in TEXT and isinstance(values[0], int | float)]
    if not functions:
        raise refuse_names(path, f"columns {', '.join(table)}", "a column of numbers for each reward function")
    dump = text_only(
        total_of([table[name] for name in functions]),
        numbered(table["prompt"]),
        advantages=[float(value) for value in table["advantage"]],
        system="trl",
        origin=str(path),
    )
    return dump.with_note(f"the reward is the sum of {', '.join(functions)} (reward_weights 1)")
