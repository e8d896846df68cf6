"""Reader of what verl writes of a step: `DataProto.save_to_disk`, tensors under its names, and generations (.jsonl).

Of a `DataProto` the responses are read, and prompts for a check with the model. Two names are not verl's own, and may
be added by a hook in the actor: `log_probs`, of the policy that the loss is of, and `grad_log_probs`, the loss's
derivative by them.

Letters: B sequences | C padded length of responses | N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.dumps.readers import numbered, padded_ids, read_json_lines, rectangle, refuse_names, text_only
from workbench.dumps.step import StepDump
from workbench.dumps.tensordicts import KNOWN, DataProto
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "response_mask": "loss_mask",
    "responses": "token_ids",
    "log_probs": "policy_logprobs",
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "ref_log_prob": "ref_logprobs",
    "entropys": "entropies",
    "token_level_rewards": "token_rewards",
    "values": "values",
    "advantages": "advantages",
    "rollout_is_weights": "correction_weights",
    "grad_log_probs": "coefficients",
}
"""verl's name of a tensor [B, C] -> that of `StepDump`."""

LOSSES = {"actor/pg_loss": "policy", "actor/kl_loss": "kl_without_coefficient", "kl_loss": "kl_without_coefficient"}
"""verl's name of a part of the loss -> that of `StepDump`; both names of the penalty are in use."""

NORM = "actor/grad_norm"
"""verl's name of the gradient's norm, before it is clipped (`optimizer_step` of its engines, 0.9.1)."""


def read_dump(path: Path) -> StepDump:
    """Read a `DataProto` (any suffix), a TensorDict or dict of its tensors, or generations (.jsonl).

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, or a batch without response_mask.
    """
    if path.suffix == ".jsonl":
        return _generations(path)
    content = read_restricted(path, known=KNOWN)
    if isinstance(content, Mapping):
        content = DataProto(dict(content), {}, {})
    if not isinstance(content, DataProto):
        raise refuse_names(path, f"a {type(content).__name__}", "a DataProto, or a dict of its tensors")
    batch = {name: value for name, value in content.batch.items() if isinstance(value, Tensor)}
    if "response_mask" not in batch:
        raise refuse_names(path, f"tensors {', '.join(batch)}", "response_mask, which compute_response_mask adds")
    shape = batch["response_mask"].shape
    known = {name: value for name, value in batch.items() if name in NAMES and value.shape == shape}
    tokens = {NAMES[name]: value for name, value in known.items()}
    if "attention_mask" in batch:
        tokens["token_mask"] = batch["attention_mask"][:, -shape[1] :]
    uids = content.non_tensors.get("uid", batch.get("uid"))
    documents = {} if uids is None else {"group_ids": numbered(list(uids))}
    metrics = _numbers(content.meta.get("metrics"))
    losses = {ours: metrics.pop(name) for name, ours in LOSSES.items() if name in metrics}
    metrics.pop("actor/entropy", None)  # of the old policy, and by loss_agg_mode
    return rectangle(
        tokens,
        documents,
        system="verl",
        losses=losses,
        gradient_norm=metrics.pop(NORM, None),
        metrics=metrics,
        temperature=float(content.meta.get("temperature", 1.0)),
        origin=str(path),
        ids=_prompts(path, batch),
        notes=_notes(batch, known),
    )


def _prompts(path: Path, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Prompts, which verl pads on the left; attention_mask covers prompts and responses."""
    prompts = batch.get("prompts")
    if prompts is None or "attention_mask" not in batch:
        return {}
    return {"prompt_ids": padded_ids(path, "prompts", prompts, batch["attention_mask"][:, : prompts.shape[-1]])}


def _numbers(metrics: Any) -> dict[str, float]:
    given = metrics if isinstance(metrics, Mapping) else {}
    return {name: float(value) for name, value in given.items() if isinstance(value, int | float)}


def _notes(batch: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> tuple[str, ...]:
    notes = []
    if "log_probs" not in known:
        notes.append("a DataProto has no log-probabilities of the live policy; a hook can add them as log_probs")
    if "token_level_scores" in batch and "token_level_rewards" not in known:
        notes.append("token_level_scores without token_level_rewards: a KL penalty in the reward cannot be checked")
    return tuple(notes)


def _generations(path: Path) -> StepDump:
    """Read `_write_generations`: text, so that only rewards and groups are known."""
    records = read_json_lines(path)
    for number, record in enumerate(records):
        if not {"input", "score"} <= set(record):
            raise RecordError(
                f"read verl's generations {path}",
                found=f"record {number} with {', '.join(record)}",
                rule="input, output, score, step and further scores",
                fix="check the file",
            )
    rewards = [float(record["score"]) for record in records]
    groups = numbered([record["input"] for record in records])
    return text_only(rewards, groups, system="verl", origin=str(path))
