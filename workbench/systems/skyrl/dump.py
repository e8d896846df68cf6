"""Reader of the batch that SkyRL writes of a rollout: `trainer.dump_data_batch`, `dumped_data/global_step_N_....pkl`.

SkyRL writes it before the update, without rewards and prompts' ids. Names that are not SkyRL's own, and that a hook may
add (tests/dumps/skyrl/write.py): `token_level_rewards`, and in the metadata `prompt_uids`, `status` (what
`train_critic_and_policy` returns), `dp_size` and `micro_train_batch_size_per_gpu`; `log_probs`, of the policy that the
loss is of, and `grad_log_probs`, the loss's derivative by them. Responses end at the right edge of their tensors. Read
from NovaSky-AI/SkyRL 0.3.0.

Letters: B rows | C padded length of responses | n tokens of a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import numbered, packed, refuse_names, sums_of_rows
from workbench.dumps.step import StepDump
from workbench.dumps.tensordicts import SKYRL, TrainingInputBatch
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "loss_mask": "loss_mask",
    "response_mask": "token_mask",
    "log_probs": "policy_logprobs",
    "action_log_probs": "old_logprobs",
    "rollout_logprobs": "sampler_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "entropies": "entropies",
    "values": "values",
    "advantages": "advantages",
    "grad_log_probs": "coefficients",
}
"""SkyRL's name of a tensor [B, C] -> that of `StepDump`."""
LOSSES = {"policy_loss": "policy", "final_loss": "total", "policy_kl": "kl_without_coefficient"}
"""SkyRL's name of a part of the loss, summed over micro-batches and ranks, or their mean -> that of `StepDump`."""
NORM = "grad_norm"
"""SkyRL's name of the gradient's norm, before it is clipped; of several mini-batches it is the mean."""
WITHOUT_LIVE = "SkyRL keeps no log-probabilities of the live policy; a hook can add them as log_probs"
WITHOUT_REWARDS = "SkyRL takes rewards out before it dumps: advantages are taken as they are"
SEVERAL_STEPS = "the file has {} mini-batches, each an optimizer step: advantages are of all; gradients are left out"
PADDED = (
    "{} rows pad the batch to the ranks, and count in the means of SkyRL's penalties: gradients and losses are left out"
)
STEP_WISE = "rows are steps of trajectories, whose last one has the advantage of all: rewards are left out"
WITHOUT_SPLIT = (
    "metrics are means over micro-batches: they are left out without dp_size and micro_train_batch_size_per_gpu"
)


def read_dump(path: Path) -> StepDump:
    """Read a `TrainingInputBatch`.

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, or a batch without its masks.
    """
    batch = read_restricted(path, known=SKYRL)
    if not isinstance(batch, TrainingInputBatch):
        raise refuse_names(path, f"a {type(batch).__name__}", "a TrainingInputBatch, as dump_data writes it")
    tensors = {name: value for name, value in batch.tensors.items() if isinstance(value, Tensor)}
    if missing := [name for name in ("sequences", "response_mask", "loss_mask") if name not in tensors]:
        raise refuse_names(path, f"no {', '.join(missing)} in {', '.join(tensors) or 'it'}", "tensors of dump_data")
    real = _without_padding(path, tensors, batch.metadata)
    mask_BC = real["response_mask"].bool()
    known = {name: value for name, value in real.items() if name in NAMES}
    shapes = {name: list(value.shape) for name, value in known.items() if value.shape != mask_BC.shape}
    sequences, needed = list(real["sequences"].shape), list(mask_BC.shape)
    if shapes or len(sequences) != 2 or len(needed) != 2 or sequences[1] < needed[1]:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or f"sequences {sequences}"
        raise refuse_names(path, found, f"the shape {needed} of response_mask, at the end of sequences")
    ids_BC = real["sequences"][:, sequences[1] - needed[1] :]
    rows = [
        {**{NAMES[name]: value[n][own_C] for name, value in known.items()}, "token_ids": ids_BC[n][own_C]}
        for n, own_C in enumerate(mask_BC)
    ]
    meta, notes = batch.metadata, [] if "log_probs" in known else [WITHOUT_LIVE]
    documents, layout = _documents(path, real, mask_BC, meta), dict[str, int]()
    losses, metrics, norm = _status(meta.get("status"))
    steps, pad = len(meta.get("policy_mini_batch_boundaries") or (0,)), len(tensors["sequences"]) - len(mask_BC)
    if steps > 1 or pad:
        notes.append(SEVERAL_STEPS.format(steps) if steps > 1 else PADDED.format(pad))
        rows = [{name: value for name, value in row.items() if name != "coefficients"} for row in rows]
        losses, metrics, norm = {}, {}, None
    elif (split := _split(path, meta, len(rows))) is not None:
        documents["rows"], layout = split
    elif metrics:
        notes.append(WITHOUT_SPLIT)
        metrics = {}
    if "rewards" in documents and not all(meta.get("is_last_step") or (True,)):
        notes.append(STEP_WISE)
        del documents["rewards"]
    elif "rewards" not in documents:
        notes.append(WITHOUT_REWARDS)
    more = {"layout": layout, "losses": losses, "metrics": metrics, "gradient_norm": norm, "notes": tuple(notes)}
    return packed(path, rows, documents, system="skyrl", **more)


def _split(path: Path, metadata: Mapping[str, Any], number: int) -> tuple[Tensor, dict[str, int]] | None:
    """[B] micro-batch of each row, counted over ranks, and their sizes; None if they are not known.

    A rank has as many rows in sequence as any other, and cuts them in order.
    """
    ranks, size = (metadata.get(name) for name in ("dp_size", "micro_train_batch_size_per_gpu"))
    if ranks is None or size is None:
        return None
    if not isinstance(ranks, int) or not isinstance(size, int) or min(ranks, size) < 1 or number % ranks:
        found = f"dp_size {ranks!r}, micro_train_batch_size_per_gpu {size!r} for {number} rows"
        raise refuse_names(path, found, "whole numbers, and as many rows on every rank")
    own = number // ranks
    most = -(-own // size)
    places = [place // own * most + place % own // size for place in range(number)]
    return torch.as_tensor(places), {"dp": ranks, "micro_batches": most}


def _without_padding(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> dict[str, Tensor]:
    """Drop rows at the end that pad the batch to the ranks, and tensors that are not of its rows."""
    number, pad = len(tensors["sequences"]), metadata.get("pad_size", 0)
    if not isinstance(pad, int) or not 0 <= pad < number:
        raise refuse_names(path, f"pad_size {pad!r} of {number} rows", "fewer rows of padding than rows")
    if other := [name for name, value in tensors.items() if not value.dim() or len(value) != number]:
        raise refuse_names(path, f"{other[0]} without {number} rows", "one row a sequence in every tensor")
    return {name: value[: number - pad] for name, value in tensors.items()}


def _status(status: Any) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Losses, statistics of the loss by SkyRL's names, and the gradient's norm, of what the update returned."""
    given = status if isinstance(status, Mapping) else {}
    numbers = {name: float(value) for name, value in given.items() if isinstance(value, int | float)}
    losses = {ours: numbers.pop(name) for name, ours in LOSSES.items() if name in numbers}
    metrics = {f"policy/{name}": value for name, value in numbers.items() if name.startswith("loss_metrics/")}
    if "kl_without_coefficient" in losses:
        metrics["policy/policy_kl"] = losses["kl_without_coefficient"]
    return losses, metrics, numbers.get(NORM)


def _documents(
    path: Path, real: Mapping[str, Tensor], mask_BC: Tensor, metadata: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Prompts, from their ids or from the boundaries between them, and rewards, which a hook keeps."""
    number, documents = len(mask_BC), {}
    uids = metadata.get("prompt_uids", metadata.get("uids"))
    bounds = metadata.get("policy_prompt_boundaries")
    if uids is not None:
        if not isinstance(uids, list | tuple) or len(uids) < number:
            raise refuse_names(path, f"prompt_uids that are not {number}", "one a row")
        documents["group_ids"] = numbered(list(uids)[:number])
    elif bounds is not None:
        documents["group_ids"] = _groups(path, bounds, number)
    name = next((name for name in ("token_level_rewards", "rewards") if name in real), None)
    if name is not None:
        documents["rewards"] = sums_of_rows(real[name], mask_BC)
    return documents


def _groups(path: Path, bounds: Any, number: int) -> Tensor:
    """[B] prompt of each row, from (start, end) of each prompt's rows; they follow each other."""
    rule = f"(start, end) of each prompt's rows, without gap or overlap, up to {number}"
    groups, end = list[int](), 0
    for prompt, pair in enumerate(bounds if isinstance(bounds, list | tuple) else (bounds,)):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(at, int) for at in pair):
            raise refuse_names(path, f"policy_prompt_boundaries with {pair!r}", rule)
        if pair[0] != end or pair[1] <= pair[0]:
            raise refuse_names(path, f"prompt {prompt} with rows {pair[0]} to {pair[1]}, after row {end}", rule)
        groups += [prompt] * (pair[1] - pair[0])
        end = pair[1]
    if end != number:
        raise refuse_names(path, f"prompts up to row {end}", rule)
    return torch.as_tensor(groups)
