"""Write the dumps in this folder with miles' own code: rewards, advantages, loss, and its three functions that save.

    git clone https://github.com/radixark/miles; git -C miles checkout 31f1ca96
    pip install torch==2.13.0 numpy httpx requests ray transformers
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=miles python tests/dumps/miles/write.py miles tests/dumps/miles

2 data-parallel x 2 context-parallel ranks, one after the other: `set_parallel_state` tells functions the rank, no
process group is needed. Six samples of two prompts, with tool tokens; the last two are segments of one rollout. A hook
has added what the train data lacks, `train_log_probs` and `grad_log_probs`, to rollout_data.
"""

import shutil
import sys
from argparse import Namespace
from pathlib import Path

import torch
from miles.backends.training_utils import debug_dump
from miles.backends.training_utils.cp_utils import (
    get_local_response_loss_masks,
    get_sum_of_sample_mean,
    slice_log_prob_with_cp,
)
from miles.backends.training_utils.loss_hub.math_utils import compute_policy_loss
from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state
from miles.ray.rollout.debug_data import save_debug_rollout_data
from miles.ray.rollout.train_data_conversion import (
    _compute_rollout_mask_sums,
    _package_shards,
    _post_process_rewards,
    process_rollout_data_shard,
)
from miles.utils.train_dump_utils import save_debug_train_data_for_rank
from miles.utils.types import Sample

PROMPTS = ([7, 8, 9], [4, 5])
RESPONSES = (6, 3, 5, 4, 7, 2)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)
ROLLOUTS = (10, 11, 12, 13, 14, 14)
DEALT = ((0, 3, 4), (1, 2, 5))
"""Samples of each data-parallel rank."""
ARGS = Namespace(
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=True,
    n_samples_per_prompt=3,
    reward_key=None,
    eps_clip=0.2,
    eps_clip_high=0.28,
    qkv_format="thd",
    save_debug_trajectory_data=None,
)


def parallel(cp_rank: int, cp_size: int) -> None:
    """Tell miles' functions the rank."""
    one = GroupInfo(rank=0, size=1, group=None)
    names = ("intra_dp", "intra_dp_cp", "tp", "pp", "ep", "etp", "indep_dp")
    cp = GroupInfo(rank=cp_rank, size=cp_size, group=None)
    set_parallel_state(ParallelState(cp=cp, **dict.fromkeys(names, one)))


def rollout() -> tuple[list[Sample], dict]:
    """Return the samples, and the data that the trainer gets."""
    generator = torch.Generator().manual_seed(1)

    def drawn(around=None, scale=0.7):
        noise = [torch.randn(length, generator=generator) for length in RESPONSES]
        if around is None:
            return [-1.5 - (scale * value).abs() for value in noise]
        return [old + scale * value for old, value in zip(around, noise, strict=True)]

    old = drawn()
    sampler, policy = drawn(old, 0.1), drawn(old, 0.4)
    masks = [[1] * length for length in RESPONSES]
    masks[0][2:4], masks[4][1] = [0, 0], 0  # a tool wrote these
    samples = [
        Sample(
            group_index=i // 3,
            index=i,
            rollout_id=ROLLOUTS[i],
            tokens=[*PROMPTS[i // 3], *range(20, 20 + length)],
            response_length=length,
            reward=REWARDS[i],
            loss_mask=masks[i],
            rollout_log_probs=sampler[i].tolist(),
            status=Sample.Status.COMPLETED,
        )
        for i, length in enumerate(RESPONSES)
    ]
    raw, rewards = _post_process_rewards(ARGS, samples, None, prompt_group_sizes=[3, 3])
    data = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
        "response_lengths": list(RESPONSES),
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [0] * 6,
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in masks],
        "sample_indices": list(range(6)),
        "rollout_ids": list(ROLLOUTS),
        "rollout_mask_sums": _compute_rollout_mask_sums(list(ROLLOUTS), masks),
        "rollout_log_probs": sampler,
        "old": old,
        "policy": policy,
    }
    return samples, data


def save_rank(rank: int, whole: dict, folder: Path) -> None:
    """Compute the loss of one rank's tokens, and save its train data."""
    dp_rank, cp_rank = divmod(rank, 2)
    parallel(cp_rank, 2)
    data = process_rollout_data_shard(ARGS, _package_shards(ARGS, whole, DEALT)[dp_rank])
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))

    def local(values):
        return [slice_log_prob_with_cp(value, *length) for value, length in zip(values, lengths, strict=True)]

    data["rollout_log_probs"] = local(data["rollout_log_probs"])
    data["log_probs"] = local([whole["old"][i] for i in DEALT[dp_rank]])
    policy = [value.requires_grad_() for value in local([whole["policy"][i] for i in DEALT[dp_rank]])]
    data["advantages"] = [
        torch.full_like(value, reward) for value, reward in zip(data["log_probs"], data["rewards"], strict=True)
    ]
    kl, advantages = torch.cat(data["log_probs"]) - torch.cat(policy), torch.cat(data["advantages"])
    losses, _ = compute_policy_loss(kl, advantages, ARGS.eps_clip, ARGS.eps_clip_high)
    sums = torch.tensor(data["rollout_mask_sums"], dtype=torch.float32)
    reduce = get_sum_of_sample_mean(
        data["total_lengths"], data["response_lengths"], data["loss_masks"], denominators=sums
    )
    (reduce(losses) / len(set(ROLLOUTS)) + 0 * torch.cat(policy).sum()).backward()
    data["train_log_probs"] = [value.detach().clone() for value in policy]
    data["grad_log_probs"] = [value.grad.clone() for value in policy]
    args = Namespace(**vars(ARGS), save_debug_train_data=str(folder / "train_data/{rollout_id}_{rank}.pt"))
    save_debug_train_data_for_rank(args, rollout_id=3, rollout_data=data, rank=rank, cp_rank=cp_rank, cp_size=2)


def save_policy_loss(whole: dict, folder: Path) -> None:
    """Save one micro-batch of whole responses as the loss took it."""
    parallel(0, 1)
    own = DEALT[0]
    batch = {name: [whole[name][i] for i in own] for name in ("total_lengths", "response_lengths", "loss_masks")}
    old, policy, sampler = ([whole[name][i] for i in own] for name in ("old", "policy", "rollout_log_probs"))
    advantages = [torch.full_like(old[n], whole["rewards"][i]) for n, i in enumerate(own)]
    masks = get_local_response_loss_masks(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], "thd")
    kl = torch.where(torch.cat(masks).bool(), torch.cat(old) - torch.cat(policy), 0.0)
    losses, _ = compute_policy_loss(kl, torch.cat(advantages), ARGS.eps_clip, ARGS.eps_clip_high)
    debug_dump.maybe_dump_policy_loss_debug(
        args=Namespace(dump_details=str(folder)),
        batch=batch,
        train_log_probs=policy,
        old_log_probs=old,
        rollout_log_probs=sampler,
        advantages=advantages,
        local_loss_masks=masks,
        ppo_kl=kl,
        pg_loss=losses,
    )


def main(folder: Path) -> None:
    """Write what `--dump-details` writes of one rollout."""
    for name in ("train_data", "rollout_data", "policy_loss_debug"):
        shutil.rmtree(folder / name, ignore_errors=True)
    samples, whole = rollout()
    args = Namespace(**vars(ARGS), save_debug_rollout_data=str(folder / "rollout_data/{rollout_id}.pt"))
    save_debug_rollout_data(args, samples, rollout_id=3, evaluation=False)
    for rank in range(4):
        save_rank(rank, whole, folder)
    save_policy_loss(whole, folder)


if __name__ == "__main__":
    main(Path(sys.argv[2]))
