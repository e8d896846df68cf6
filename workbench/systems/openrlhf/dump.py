"""Reader of an optimizer step of OpenRLHF: a file a rank and micro-batch, `rank_R_micro_M.pt`, which a hook writes.

OpenRLHF writes nothing of a step but checkpoints and metrics. The hook overrides `ActorPPOTrainer.training_step` and
saves the tensors of the `Experience` by their names, and `index`, `info`, `policy_loss`, `loss_batch_info` and
`accumulated_gradient`; `log_probs`, of the live policy, and `grad_log_probs`, the derivative by them of the loss that
reaches the optimizer (tests/dumps/openrlhf/write.py). Values stand at the token that is predicted: those of the first
token of a sequence do not exist. Read from OpenRLHF/OpenRLHF 0.11.2.

Letters: B rows of a file | C their padded length, less one | N documents | n tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import completion, count_of, micro_batch_files, numbers_of, packed, refuse_names
from workbench.dumps.step import StepDump
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "action_mask": "loss_mask",
    "log_probs": "policy_logprobs",
    "action_log_probs": "old_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "entropies": "entropies",
    "values": "values",
    "advantages": "advantages",
    "grad_log_probs": "coefficients",
}
"""OpenRLHF's name of a tensor [B, C] -> that of `StepDump`."""
METRICS = {"ppo_clip_ratio": "clip_ratio", "ppo_kl": "ppo_kl", "vllm_kl": "vllm_kl"}
"""Key of `info` -> name of the value that `PolicyLoss` returns; means over the tokens of a micro-batch."""
OF_ONE = "one micro-batch of one rank: denominators, losses and metrics are those of the whole step"
WITHOUT_LIVE = "an Experience has no log-probabilities of the live policy; the hook can add them as log_probs"


def read_dump(path: Path) -> StepDump:
    """Read an optimizer step (a folder), or one micro-batch of it (a file).

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes; a rank or a micro-batch that is missing;
            tensors of different shapes; samples that are there twice.
    """
    places = micro_batch_files(path)
    contents = {place: _content(file) for place, file in places.items()}
    rows, files, rewards, indices = list[dict[str, Tensor]](), list[int](), list[float](), list[Any]()
    for number, (place, file) in enumerate(places.items()):
        own = _rows(file, contents[place])
        rows += own
        files += [number] * len(own)
        rewards += _column(file, contents[place], "rewards", len(own))
        indices += _column(file, contents[place], "index", len(own))
    whole, notes = path.is_dir(), [] if "policy_logprobs" in rows[0] else [WITHOUT_LIVE]
    documents: dict[str, Tensor] = {}
    if rewards and len(rewards) == len(rows):
        documents["rewards"] = torch.as_tensor(rewards)
    if indices and len(indices) == len(rows):
        if len(set(indices)) < len(indices):
            raise refuse_names(path, f"sample {_twice(indices)} twice", "each sample once")
        if (size := _group_size(path, contents.values())) is not None:
            documents["group_ids"] = torch.as_tensor([index // size for index in indices])
    ranks, micro = (1 + max(place[axis] for place in places) for axis in (0, 1))
    if not whole:
        rows = [{name: value for name, value in row.items() if name != "coefficients"} for row in rows]
        return packed(path, rows, documents, system="openrlhf", notes=(*notes, OF_ONE))
    documents["rows"] = torch.as_tensor(files)
    losses, metrics = _of_step(list(contents.values()))
    return packed(
        path,
        rows,
        documents,
        system="openrlhf",
        layout={"dp": ranks, "micro_batches": micro},
        losses=losses,
        counts=_counts(path, list(contents.values())),
        metrics=metrics,
        notes=tuple(notes),
    )


def _content(file: Path) -> Mapping[str, Any]:
    content = read_restricted(file)
    if not isinstance(content, Mapping):
        raise refuse_names(file, f"a {type(content).__name__}", "a dict of the tensors of an Experience")
    return content


def _rows(file: Path, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Values of the completions of a micro-batch: from the first token that trains to the end of the sequence."""
    if missing := [name for name in ("sequences", "attention_mask", "action_mask") if content.get(name) is None]:
        raise refuse_names(
            file, f"no {', '.join(missing)} in {', '.join(map(str, content))}", "an Experience's tensors"
        )
    present = {name: ours for name, ours in NAMES.items() if content.get(name) is not None}
    tensors = {ours: numbers_of(file, "the file", content, name, dim=2) for name, ours in present.items()}
    real, ids = (numbers_of(file, "the file", content, name, dim=2) for name in ("attention_mask", "sequences"))
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    needed = [len(ids), ids.shape[1] - 1]
    if real.shape != ids.shape or any(shape != needed for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items() if shape != needed)
        found = found or f"attention_mask {list(real.shape)}"
        raise refuse_names(file, f"{found} for sequences {list(ids.shape)}", f"{needed}: a value a predicted token")
    tensors["token_ids"], rows = ids[:, 1:], []
    for number, own_C in enumerate(real[:, 1:].bool()):
        row = {name: value[number][own_C] for name, value in tensors.items()}
        own = completion(file, f"row {number}", row)
        whole = ids[number][real[number].bool()].long()
        rows.append({**own, "prompt_ids": whole[: len(whole) - len(own["loss_mask"])]})
    return rows


def _column(file: Path, content: Mapping[str, Any], name: str, number: int) -> list[Any]:
    """One value a row, or []."""
    value = content.get(name)
    if value is None:
        return []
    values = numbers_of(file, "the file", content, name).tolist()
    if len(values) != number:
        raise refuse_names(file, f"{len(values)} {name} of {number} rows", "one a row")
    return values


def _twice(values: Sequence[Any]) -> Any:
    return next(value for value in values if values.count(value) > 1)


def _group_size(path: Path, contents: Any) -> int | None:
    """Samples of a prompt, `rollout.n_samples_per_prompt`, whose `index` follow each other; None if it is not known."""
    sizes = {content.get("n_samples_per_prompt") for content in contents}
    if sizes == {None}:
        return None
    size = sizes.pop()
    if sizes or not isinstance(size, int) or size < 1:
        raise refuse_names(path, f"n_samples_per_prompt {size!r} and {sizes or 'no other'}", "one whole number")
    return size


def _counts(path: Path, contents: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens and rows of the step; the trainer divides its numbers by micro-batches, as DeepSpeed divides the loss."""
    infos = [info for content in contents if isinstance(info := content.get("loss_batch_info"), Mapping)]
    if len(infos) < len(contents):
        return {}
    names = ("batch_num_tokens", "global_batch_size")
    numbers = [tuple(float(info[name]) for name in names if name in info) for info in infos]
    if len(set(numbers)) > 1 or len(numbers[0]) < 2:
        raise refuse_names(path, f"loss_batch_info {', '.join(map(str, dict.fromkeys(numbers)))}", "one of the step")
    parts = {int(content.get("accumulated_gradient", 0)) for content in contents}
    if len(parts) > 1 or min(parts) < 1:
        raise refuse_names(path, f"accumulated_gradient {sorted(parts)}", "the micro-batches of a step, in every file")
    gas = parts.pop()
    return {"tokens": numbers[0][0] * gas, "documents": numbers[0][1] * gas}


def _of_step(contents: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Losses of the step, means over files; and metrics, means over files weighed by their tokens."""
    weights = [count_of(content["action_mask"]) for content in contents]
    infos = [_numbers(content.get("info")) for content in contents]
    losses: dict[str, float] = {}
    if all(content.get("policy_loss") is not None for content in contents):
        losses["policy"] = sum(float(content["policy_loss"]) for content in contents) / len(contents)
    if all("kl" in info for info in infos):
        losses["kl_without_coefficient"] = sum(info["kl"] for info in infos) / len(contents)
    metrics: dict[str, float] = {}
    for name, ours in METRICS.items():
        if all(name in info for info in infos):
            total = sum(info[name] * weight for info, weight in zip(infos, weights, strict=True))
            metrics[ours] = total / max(sum(weights), 1.0)
    return losses, metrics


def _numbers(info: Any) -> dict[str, float]:
    given = info if isinstance(info, Mapping) else {}
    return {str(name): float(value) for name, value in given.items() if isinstance(value, Tensor | int | float)}
