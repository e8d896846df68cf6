"""Reader of what slime writes of a rollout: train data (format 2, `--save-debug-train-data`), and rollout data.

A document is a rollout: samples with one rollout id, such as the turns of an agent, share a denominator in slime. Two
names are not slime's own, and may be added to rollout_data by a hook: `train_log_probs`, of the policy that the loss is
of, and `grad_log_probs`, the loss's derivative by them. Read from THUDM/slime 624b824a.

Letters: N documents | n tokens of a response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.readers import groups_of_prompts, numbered, numbers_of, packed, refuse_names
from workbench.dumps.step import StepDump
from workbench.rollouts.torch_files import read_restricted

NAMES = {
    "log_probs": "old_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "ref_log_probs": "ref_logprobs",
    "train_log_probs": "policy_logprobs",
    "entropy": "entropies",
    "values": "values",
    "advantages": "advantages",
    "grad_log_probs": "coefficients",
}
"""slime's name of a value of tokens -> that of `StepDump`."""
OF_PROMPTS = "groups are documents of the same prompt tokens"
SEVERAL_STEPS = "the file has {} optimizer steps: advantages are those of all; gradients are left out"
SEGMENTS = "{} documents have several samples (turns): their rewards are left out, because each sample is normalised"


def read_dump(path: Path) -> StepDump:
    """Read the train data or the rollout data of one rollout.

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes, another format, or samples that disagree
            with the shards.
    """
    content = read_restricted(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("samples"), list) or not content["samples"]:
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise refuse_names(path, found, "samples, as save_debug_train_data or save_debug_rollout_data writes them")
    samples = content["samples"]
    for number, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise refuse_names(path, f"sample {number}: a {type(sample).__name__}", "a dict of its values")
    if "dp_shards" not in content:
        return _rollout_data(path, samples)
    if content.get("format_version") != 2:
        found = f"format_version {content.get('format_version')!r}"
        raise refuse_names(path, found, "2, as of 624b824a")
    raw = content.get("raw_reward")
    rewards = _by_position(path, raw, samples) if isinstance(raw, list) else None
    rows = [sample_row(path, number, sample) for number, sample in enumerate(samples)]
    places, layout, steps = _places(path, content["dp_shards"], samples)
    return documents_of(path, samples, rows, rewards, places, layout, steps, system="slime")


def sample_row(path: Path, number: int, sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values of one sample's response, by the names of `StepDump`."""
    where = f"sample {number}"
    mask = numbers_of(path, where, sample, "loss_masks")
    row = {"loss_mask": mask, "token_mask": torch.ones_like(mask)}
    if (ids := sample.get("tokens")) is not None and len(ids) >= len(mask):
        row["token_ids"] = numbers_of(path, where, sample, "tokens")[len(ids) - len(mask) :]
    for name, ours in NAMES.items():
        if sample.get(name) is not None:
            row[ours] = numbers_of(path, where, sample, name)
    return row


def documents_of(
    path: Path,
    samples: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Tensor]],
    rewards: Tensor | None,
    places: Tensor | None,
    layout: Mapping[str, int],
    steps: int,
    *,
    system: str,
    shared: bool = False,
    groups: Tensor | None = None,
) -> StepDump:
    """Put samples together to documents: those of one rollout id are segments of one.

    Args:
        path: of the file, for errors.
        samples: as they were written.
        rows: values of each sample's tokens.
        rewards: raw reward of each sample; None: not known.
        places: micro-batch of each sample, counted over ranks; None: not known.
        layout: sizes of the ranks, for ``places``.
        steps: optimizer steps of the rollout.
        system: slime or miles.
        shared: samples of one rollout share one reward, which is normalised once.
        groups: prompt of each sample; None: by the tokens of the prompts.
    """
    rollouts_N = numbered([sample.get("rollout_ids", number) for number, sample in enumerate(samples)])
    members = [torch.nonzero(rollouts_N == n).squeeze(1).tolist() for n in range(int(rollouts_N.max()) + 1)]
    whole = [_end_to_end(path, [rows[i] for i in own]) for own in members]
    first = torch.as_tensor([own[0] for own in members])
    notes, documents = list[str](), dict[str, Tensor]()
    segmented = sum(len(own) > 1 for own in members)
    if groups is None:
        prompts = [_prompt(path, number, sample, rows[number]) for number, sample in enumerate(samples)]
        groups = groups_of_prompts(prompts)
        notes.append(OF_PROMPTS)
        if not segmented:  # turns of one document have prompts of their own
            own = zip(whole, first.tolist(), strict=True)
            whole = [{**row, "prompt_ids": prompts[at].long()} for row, at in own]
    if segmented and not shared:
        notes.append(SEGMENTS.format(segmented))
    elif rewards is not None:
        documents |= {"group_ids": groups[first], "rewards": rewards[first]}
    if steps > 1:
        notes.append(SEVERAL_STEPS.format(steps))
        whole = [{name: value for name, value in row.items() if name != "coefficients"} for row in whole]
    elif places is not None and (shared or not segmented):
        documents["rows"] = places[first]
    if "policy_logprobs" not in whole[0]:
        notes.append(f"{system} keeps no log-probabilities of the live policy; a hook can add them as train_log_probs")
    layout = layout if "rows" in documents else {}
    return packed(path, whole, documents, system=system, layout=layout, notes=tuple(notes))


def _end_to_end(path: Path, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    for row in rows:
        if other := set(row) ^ set(rows[0]):
            raise refuse_names(path, f"{', '.join(sorted(other))} in one sample only", "all samples have the same")
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _prompt(path: Path, number: int, sample: Mapping[str, Any], row: Mapping[str, Tensor]) -> Tensor:
    ids = numbers_of(path, f"sample {number}", sample, "tokens")
    return ids[: len(ids) - len(row["loss_mask"])]


def _by_position(path: Path, raw: list[Any], samples: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """[samples] raw rewards, which slime keeps in the order of the rollout."""
    positions = [sample.get("rollout_position") for sample in samples]
    if any(not isinstance(at, int) or not 0 <= at < len(raw) for at in positions):
        return None
    rewards = numbers_of(path, "the file", {"raw_reward": raw}, "raw_reward")
    return rewards[torch.as_tensor(positions)]


def _places(path: Path, shards: Any, samples: Sequence[Mapping[str, Any]]) -> tuple[Tensor | None, dict[str, int], int]:
    """Micro-batch of each sample, the layout, and the number of optimizer steps; shards and samples have to agree."""
    if not isinstance(shards, list) or not all(isinstance(shard, Mapping) for shard in shards) or not shards:
        raise refuse_names(path, "dp_shards that are no list of dicts", "one dict a data-parallel rank")
    own: dict[Any, int] = {}
    for rank, shard in enumerate(shards):
        for position in shard.get("partition") or ():
            if position in own:
                found = f"sample {position} in the shards of ranks {own[position]} and {rank}"
                raise refuse_names(path, found, "each sample is in one shard")
            own[position] = rank
    positions = [sample.get("rollout_position") for sample in samples]
    if not own and not any(position is not None for position in positions):
        return None, {}, 1
    if len(set(positions)) < len(positions):
        twice = next(at for at in positions if positions.count(at) > 1)
        raise refuse_names(path, f"two samples at position {twice}", "each sample is there once")
    if missing := set(own) ^ set(positions):
        found = f"sample {min(missing, key=str)} in the shards or the samples, but not in both"
        raise refuse_names(path, found, "the shards name the samples")
    batches = [shard.get("micro_batch_indices") for shard in shards]
    steps = max((len(shard.get("num_microbatches") or (0,)) for shard in shards), default=1)
    if steps > 1 or not all(isinstance(of_rank, list) and of_rank for of_rank in batches):
        return None, {}, steps
    return _dealt(path, shards, positions)


def _dealt(path: Path, shards: list[Mapping[str, Any]], positions: list[Any]) -> tuple[Tensor, dict[str, int], int]:
    most = max(len(shard["micro_batch_indices"][0]) for shard in shards)
    place: dict[Any, int] = {}
    for rank, shard in enumerate(shards):
        for number, indices in enumerate(shard["micro_batch_indices"][0]):
            for index in indices:
                if not isinstance(index, int) or not 0 <= index < len(shard["partition"]):
                    found = f"micro-batch {number} of rank {rank} with sample {index}, of {len(shard['partition'])}"
                    raise refuse_names(path, found, "micro-batches name samples of their rank")
                if (position := shard["partition"][index]) in place:
                    raise refuse_names(path, f"sample {position} in two micro-batches", "each sample is in one")
                place[position] = rank * most + number
    if missing := set(positions) - set(place):
        raise refuse_names(path, f"sample {min(missing)} in no micro-batch", "each sample is in one")
    rows = torch.as_tensor([place[position] for position in positions])
    return rows, {"dp": len(shards), "micro_batches": most}, 1


def _rollout_data(path: Path, samples: Sequence[Mapping[str, Any]]) -> StepDump:
    """Read samples before training: tokens, masks, rewards, the sampler's log-probabilities; no advantages."""
    rows, rewards = [], []
    for number, sample in enumerate(samples):
        length = sample.get("response_length")
        if not isinstance(length, int) or not isinstance(sample.get("reward"), int | float):
            found = f"sample {number} with response_length {length!r} and reward {sample.get('reward')!r}"
            raise refuse_names(path, found, "two numbers")
        mask = [1] * length if sample.get("loss_mask") is None else sample["loss_mask"]
        rows.append(
            sample_row(path, number, {**sample, "loss_masks": [0] * length if sample.get("remove_sample") else mask})
        )
        rewards.append(float(sample["reward"]))
    groups = [sample.get("group_index") for sample in samples]
    documents = {"rewards": torch.as_tensor(rewards)}
    if all(group is not None for group in groups):
        documents["group_ids"] = numbered(groups)
    note = "rollout data has no advantages: save_debug_train_data has them"
    return packed(path, rows, documents, system="slime", notes=(note,))
