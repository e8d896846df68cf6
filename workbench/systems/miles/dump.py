"""Reader of what miles writes of a step: train data, one file a rank, and `policy_loss_debug`, one file a micro-batch.

A rank's file has the responses of its samples, and of log-probabilities and advantages its context-parallel part: the
files of one rollout are put together. Rewards and prompts are those of rollout_data, next to train_data, by the index
of the sample. Two names are not miles' own, and may be added to rollout_data by a hook: `train_log_probs`, of the
policy that the loss is of, and `grad_log_probs`, the loss's derivative by them. Read from radixark/miles 31f1ca96.

Letters: T tokens of a rank | n tokens of a response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.dumps.derived import clipped_of, ratios_of, same_content
from workbench.dumps.readers import numbered, numbers_of, packed, refuse_names
from workbench.dumps.shards import Shard, join
from workbench.dumps.step import StepDump
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.miles.translate import LOG_CLAMP
from workbench.systems.slime.dump import NAMES, documents_of

RANK_FILE = re.compile(r"(?P<rollout>.+)_(?P<rank>\d+)\.pt")
OF_ONE = "one micro-batch of one rank: advantages, denominators and metrics are those of the whole step"
WITHOUT_ROLLOUT = "no rollout_data/{}.pt next to the folder: rewards and prompts are not known"


def read_dump(path: Path) -> StepDump:
    """Read the train data of a rollout (its folder, or the file of any rank), or one file of `policy_loss_debug`.

    Raises:
        RecordError: no such file, a damaged one, one with unknown classes; ranks that overlap or leave a gap; files of
            several rollouts in a folder.
    """
    paths = _files(path)
    contents = [read_restricted(file) for file in paths]
    for file, content in zip(paths, contents, strict=True):
        if not isinstance(content, Mapping):
            raise refuse_names(file, f"a {type(content).__name__}", "a dict, as miles saves it")
    if "call" in contents[0] and len(contents) == 1:
        return _policy_loss(path, contents[0])
    ranks = [_rank(file, content) for file, content in zip(paths, contents, strict=True)]
    return _put_together(path, paths, ranks)


def _files(path: Path) -> list[Path]:
    """Files of all ranks of the rollout that a folder, or a file, is of."""
    if path.is_dir():
        files = sorted(path.glob("*.pt"))
        named = {match["rollout"] for file in files if (match := RANK_FILE.fullmatch(file.name))}
        if len(named) != 1:
            found = f"files of rollouts {', '.join(sorted(named)) or 'none'}"
            raise refuse_names(path, found, "<rollout>_<rank>.pt of one rollout; name the file of one rank")
        rollout = named.pop()
    elif match := RANK_FILE.fullmatch(path.name):
        rollout = match["rollout"]
        if rollout.startswith("rank_"):  # rank_0_call_3.pt
            return [path]
        files = sorted(path.parent.glob("*.pt")) if path.exists() else [path]
    else:
        return [path]
    own = [file for file in files if (match := RANK_FILE.fullmatch(file.name)) and match["rollout"] == rollout]
    return sorted(own, key=lambda file: int(file.stem.rpartition("_")[2]))


def _rank(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank's file, checked: rollout_data with one entry a sample in every list that is used."""
    data = content.get("rollout_data")
    if not isinstance(data, Mapping) or not isinstance(data.get("loss_masks"), list):
        found = ", ".join(map(str, data if isinstance(data, Mapping) else content))
        raise refuse_names(path, found, "rollout_data with loss_masks, as save_debug_train_data writes it")
    number = len(data["loss_masks"])
    for name in ("tokens", "total_lengths", "response_lengths", "sample_indices", *NAMES):
        value = data.get(name)
        needed = name in ("tokens", "total_lengths", "response_lengths", "sample_indices")
        if (value is None and needed) or (value is not None and (not isinstance(value, list) or len(value) != number)):
            raise refuse_names(path, f"{name} without {number} entries", "one a sample, as loss_masks")
    return content


def _put_together(path: Path, paths: Sequence[Path], ranks: Sequence[Mapping[str, Any]]) -> StepDump:
    kept, notes = _without_replicas(paths, ranks)
    own = [content["rollout_data"] for _, content in kept]
    indices = list(dict.fromkeys(index for data in own for index in data["sample_indices"]))
    place = {index: number for number, index in enumerate(sorted(indices, key=str if None in indices else None))}
    shards = [_shard(file, content, place) for file, content in kept]
    ids_T, tokens, _ = join(shards, str(path))
    lengths = torch.bincount(ids_T).tolist()
    columns = {name: value_T.split(lengths) for name, value_T in tokens.items()}
    rows = [{name: values[n] for name, values in columns.items()} for n in range(len(place))]
    samples: list[dict[str, Any]] = [{} for _ in place]
    shares = {index: str(data["sample_indices"]) for data in own for index in data["sample_indices"]}
    names = ("tokens", "sample_indices", "rollout_ids")
    for data in own:
        for number, index in enumerate(data["sample_indices"]):
            length = data["response_lengths"][number]
            if length != len(rows[place[index]]["loss_mask"]):
                found = f"{len(rows[place[index]]['loss_mask'])} tokens of sample {index}, of {length}"
                raise refuse_names(path, found, "the files of all context-parallel ranks")
            samples[place[index]] = {name: data[name][number] for name in names if name in data}
    whole = own[0].get("raw_reward")
    if isinstance(whole, list) and len(whole) != len(samples):
        found = f"{len(samples)} samples in {len(paths)} files, of {len(whole)}"
        raise refuse_names(path, found, "the files of all data-parallel ranks, each once")
    rewards, groups, missing = _rollout(paths[0], list(place))
    steps = max(len(data.get("num_microbatches") or (0,)) for data in own)
    parts = numbered([shares[index] for index in place])
    dump = documents_of(
        path,
        samples,
        rows,
        rewards,
        parts,
        {"dp": int(parts.max()) + 1, "micro_batches": 1},
        steps,
        system="miles",
        shared=True,
        groups=groups,
    )
    for note in (*notes, *missing):
        dump = dump.with_note(note)
    return dump


def _without_replicas(
    paths: Sequence[Path], ranks: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[Path, Mapping[str, Any]]], list[str]]:
    """Leave out ranks of earlier pipeline stages, which compute nothing, and equal files of tensor-parallel ranks."""
    kept: list[tuple[Path, Mapping[str, Any]]] = []
    notes = list[str]()
    last_stage = any(content["rollout_data"].get("advantages") is not None for content in ranks)
    for path, content in zip(paths, ranks, strict=True):
        if last_stage and content["rollout_data"].get("advantages") is None:
            notes.append(f"{path.name} has no advantages (an earlier pipeline stage) and is left out")
        elif any(same_content(other["rollout_data"], content["rollout_data"]) for _, other in kept):
            notes.append(f"{path.name} is the same as another rank's (tensor parallel) and is left out")
        else:
            kept.append((path, content))
    return kept, notes


def _shard(path: Path, content: Mapping[str, Any], place: Mapping[Any, int]) -> Shard:
    """The tokens of a rank: of each sample the positions that it has, and their values."""
    data, parts = content["rollout_data"], dict[str, list[Tensor]]()
    ids, positions = [], []
    for number, index in enumerate(data["sample_indices"]):
        where = f"sample {index}"
        mask = numbers_of(path, where, {"loss_masks": data["loss_masks"][number]}, "loss_masks")
        own = _positions(path, content, number)
        if len(mask) != data["response_lengths"][number]:
            raise refuse_names(path, f"{where}: {len(mask)} loss_masks", f"{data['response_lengths'][number]}")
        response = numbers_of(path, where, {"tokens": data["tokens"][number]}, "tokens")[-len(mask) :]
        row = {"loss_mask": mask[own], "token_mask": torch.ones_like(mask[own]), "token_ids": response[own]}
        for name, ours in NAMES.items():
            if data.get(name) is not None:
                value = numbers_of(path, where, {name: data[name][number]}, name)
                if len(value) != len(own):
                    found = f"{where}: {len(value)} {name}, of {len(own)} tokens of rank {content.get('rank')}"
                    raise refuse_names(path, found, "a zigzag part of the response on each context-parallel rank")
                row[ours] = value
        for name, value in row.items():
            parts.setdefault(name, []).append(value)
        ids.append(torch.full_like(own, place[index]))
        positions.append(own)
    none = torch.arange(0)
    tokens = {name: torch.cat(values) for name, values in parts.items()}
    return Shard(path.name, torch.cat([none, *ids]), torch.cat([none, *positions]), tokens, none, {})


def _positions(path: Path, content: Mapping[str, Any], number: int) -> Tensor:
    """[n] positions in the response whose values a rank has: two chunks of the sequence, first and last pair outermost.

    Source: `get_logits_and_tokens_offset_with_cp` (miles/backends/training_utils/cp_utils.py, 31f1ca96).
    """
    data = content["rollout_data"]
    total, length = int(data["total_lengths"][number]), int(data["response_lengths"][number])
    size, rank = int(content.get("cp_size", 1)), int(content.get("cp_rank", 0))
    places = torch.arange(length)
    if size == 1:
        return places
    padded = total
    if content.get("qkv_format", "thd") != "thd":
        if data.get("max_seq_lens") is None:
            found = f"qkv_format {content['qkv_format']!r} with cp_size {size}, and no max_seq_lens"
            raise refuse_names(path, found, "thd, or the padded lengths by which sequences are cut")
        padded = int(data["max_seq_lens"][number])
    chunk = -(-padded // (2 * size))
    # A value is that of the position before its token: logits at t predict token t + 1.
    logits = places + (total - length - 1)
    of_rank = logits // chunk
    return places[(of_rank == rank) | (of_rank == 2 * size - 1 - rank)]


def _rollout(path: Path, indices: Sequence[Any]) -> tuple[Tensor | None, Tensor | None, list[str]]:
    """Rewards and prompts of samples by their index, from rollout_data; None if there is no such file."""
    match = RANK_FILE.fullmatch(path.name)
    rollout = "" if match is None else match["rollout"]
    file = path.parent.parent / "rollout_data" / f"{rollout}.pt"
    if not file.exists():
        return None, None, [WITHOUT_ROLLOUT.format(rollout)]
    content = read_restricted(file)
    samples = content.get("samples") if isinstance(content, Mapping) else None
    if not isinstance(samples, list) or not all(isinstance(sample, Mapping) for sample in samples):
        raise refuse_names(file, "no samples", "samples, as save_debug_rollout_data writes them")
    of_index = {sample.get("index"): sample for sample in samples}
    if missing := [index for index in indices if index not in of_index]:
        raise refuse_names(file, f"no sample {missing[0]}, which is in {path.name}", "the same rollout as train_data")
    if left := [index for index in of_index if index not in set(indices)]:
        note = f"{len(left)} samples of the rollout do not train (first: {left[0]}); they may count in their group"
        return None, numbered([of_index[index].get("group_index") for index in indices]), [note]
    own = [of_index[index] for index in indices]
    rewards = numbers_of(file, "the file", {"reward": [sample.get("reward") for sample in own]}, "reward")
    return rewards, numbered([sample.get("group_index") for sample in own]), []


def _policy_loss(path: Path, content: Mapping[str, Any]) -> StepDump:
    """Read one micro-batch as the loss took it: log-probabilities, advantages, ratios, and where the clip acted."""
    samples = content.get("samples")
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, Mapping) for sample in samples):
        raise refuse_names(path, "no samples", "samples, as maybe_dump_policy_loss_debug writes them")
    names = {
        "local_loss_mask": "loss_mask",
        "train_log_probs": "policy_logprobs",
        "old_log_probs": "old_logprobs",
        "advantages": "advantages",
        "rollout_log_probs": "sampler_logprobs",
    }
    rows = []
    for number, sample in enumerate(samples):
        used = {name: ours for name, ours in names.items() if name in sample or name != "rollout_log_probs"}
        row = {ours: numbers_of(path, f"sample {number}", sample, name) for name, ours in used.items()}
        if len(row["loss_mask"]) != sample.get("response_length"):
            found = f"sample {number}: {len(row['loss_mask'])} tokens, of a response of {sample.get('response_length')}"
            raise refuse_names(path, found, "whole responses: with context parallelism, check train_data")
        rows.append(row)
    log_T = -numbers_of(path, "the file", content, "ppo_kl")
    loss_T = numbers_of(path, "the file", content, "pg_loss")
    total = sum(len(row["loss_mask"]) for row in rows)
    if not len(log_T) == len(loss_T) == total:
        raise refuse_names(path, f"{len(log_T)} ppo_kl and {len(loss_T)} pg_loss, of {total} tokens", "one a token")
    ratios_T = ratios_of(log_T, bound=LOG_CLAMP)
    advantages_T = torch.cat([row["advantages"] for row in rows])
    clipped_T = clipped_of(loss_T, ratios_T, advantages_T)
    lengths = [len(row["loss_mask"]) for row in rows]
    for row, own_T, acted_T in zip(rows, ratios_T.split(lengths), clipped_T.split(lengths), strict=True):
        row |= {"ratios": own_T, "clipped": acted_T}
    return packed(path, rows, {}, system="miles", notes=(OF_ONE,))
