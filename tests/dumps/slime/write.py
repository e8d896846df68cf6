"""Write the dumps in this folder with slime's own code: rewards, advantages, loss, and its two functions that save.

    git clone https://github.com/THUDM/slime; git -C slime checkout 624b824a
    pip install torch==2.13.0 numpy
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=slime:slime/tests python tests/dumps/slime/write.py slime tests/dumps/slime

Four gloo processes, 2 data-parallel x 2 context-parallel ranks, as in slime's tests/test_train_data_utils.py: its own
helper stands in for `megatron.core.mpu`. Six samples of two prompts, with tool tokens; in `segments.pt` two samples are
of one rollout. A hook has added what slime's dump lacks, `train_log_probs` and `grad_log_probs`, to rollout_data.
"""

import sys
from argparse import Namespace
from pathlib import Path

import _cp_dist_helpers as helpers
import torch
from torch import distributed, multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_source import function

PROMPTS = ([7, 8, 9], [4, 5])
RESPONSES = (6, 3, 5, 4, 7, 2)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)
DEALT = ((0, 3, 4), (1, 2, 5))
"""Samples of each data-parallel rank."""


def step(args: Namespace, source: Path) -> dict:
    """Return a rollout as the trainer has it before the loss: tokens, masks, rewards, log-probabilities."""
    generator = torch.Generator().manual_seed(args.seed)
    manager = Namespace(args=args, custom_reward_post_process_func=None)
    post_process = function(source / "slime/ray/rollout.py", "RolloutManager._post_process_rewards", {"torch": torch})
    raw, rewards = post_process(manager, [Namespace(get_reward_value=lambda _, r=r: r) for r in REWARDS])
    masks = [torch.ones(length, dtype=torch.int) for length in RESPONSES]
    masks[0][2:4] = masks[4][1] = 0  # a tool wrote these

    def logprobs(around=None, scale=0.7):
        drawn = [torch.randn(length, generator=generator) for length in RESPONSES]
        if around is None:
            return [-1.5 - (scale * value).abs() for value in drawn]
        return [old + scale * value for old, value in zip(around, drawn, strict=True)]

    old = logprobs()
    tokens = [torch.tensor([*PROMPTS[i // 3], *range(20, 20 + length)]) for i, length in enumerate(RESPONSES)]
    rollout_ids = args.rollout_ids
    sums = [sum(int(m.sum()) for m, r in zip(masks, rollout_ids, strict=True) if r == own) for own in rollout_ids]
    return {
        "tokens": tokens,
        "total_lengths": [len(ids) for ids in tokens],
        "response_lengths": list(RESPONSES),
        "loss_masks": masks,
        "rewards": rewards,
        "truncated": [0] * 6,
        "sample_indices": list(range(6)),
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": torch.tensor(sums, dtype=torch.float32),
        "log_probs": old,
        "rollout_log_probs": logprobs(old, 0.1),
        "train_log_probs": logprobs(old, 0.25),
        "raw_reward": raw,
    }


def rank_of(rank: int, port: int, args: Namespace, source: Path, path: str) -> None:
    """Run one rank: its samples, its part of each sequence, the loss, and the dump."""
    cp_rank, dp_rank = rank % 2, rank // 2
    helpers.stub_megatron_in_worker(cp_size=2, cp_rank=cp_rank)
    helpers.init_worker_process_group(rank, 4, port)
    cp_groups = [distributed.new_group(ranks=[0, 1]), distributed.new_group(ranks=[2, 3])]
    dp_group = distributed.new_group(ranks=[0, 2])
    from megatron.core import mpu

    mpu.get_context_parallel_group = lambda: cp_groups[dp_rank]
    mpu.is_pipeline_last_stage = lambda **_: True
    mpu.get_tensor_model_parallel_rank = lambda: 0
    mpu.get_data_parallel_rank = lambda with_context_parallel=False: dp_rank
    mpu.get_data_parallel_world_size = lambda with_context_parallel=False: 2
    mpu.get_data_parallel_src_rank = lambda with_context_parallel=False: 0
    mpu.get_data_parallel_group_gloo = lambda with_context_parallel=False: dp_group
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, get_sum_of_sample_mean
    from slime.observability.train_data_utils import save_debug_train_data
    from slime.utils.ppo_utils import compute_policy_loss, get_grpo_returns

    whole, own = step(args, source), DEALT[dp_rank]
    data = {name: [value[i] for i in own] for name, value in whole.items() if name != "raw_reward"}
    data["rollout_mask_sums"] = torch.stack(data["rollout_mask_sums"])
    data |= {"raw_reward": whole["raw_reward"], "partition": list(own), "micro_batch_indices": [[[0, 1], [2]]]}
    data |= {"num_microbatches": [2], "global_batch_sizes": [len(set(args.rollout_ids))]}
    for name in ("log_probs", "rollout_log_probs", "train_log_probs"):
        lengths = zip(data[name], data["total_lengths"], data["response_lengths"], strict=True)
        data[name] = [helpers.cp_chunk_response_tensor(value, *length) for value, *length in lengths]
    zeros = [torch.zeros_like(value) for value in data["log_probs"]]
    data["advantages"] = data["returns"] = get_grpo_returns(torch.tensor(data["rewards"]), zeros)
    policy = [value.clone().requires_grad_() for value in data["train_log_probs"]]
    kl = torch.cat(data["log_probs"]) - torch.cat(policy)
    losses, _ = compute_policy_loss(kl, torch.cat(data["advantages"]), args.eps_clip, args.eps_clip_high)
    sum_of_sample_mean = get_sum_of_sample_mean(
        data["total_lengths"], data["response_lengths"], data["loss_masks"], data["rollout_mask_sums"]
    )
    loss = sum_of_sample_mean(losses) / data["global_batch_sizes"][0]
    (loss + 0 * torch.cat(policy).sum()).backward()
    lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))
    # The dump restores the fields of slime's own list; a hook's field has to be whole on every rank.
    for name, values in (("train_log_probs", policy), ("grad_log_probs", [value.grad for value in policy])):
        data[name] = [
            all_gather_with_cp(value.detach(), *length) for value, length in zip(values, lengths, strict=True)
        ]
    save_debug_train_data(Namespace(save_debug_train_data=path), rollout_id=3, rollout_data=data)
    distributed.barrier()
    distributed.destroy_process_group()


def rollout_data(args: Namespace, source: Path, folder: Path) -> None:
    """Write the samples as they are before training."""
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    whole = step(args, source)
    samples = [
        Sample(
            group_index=i // 3,
            index=i,
            tokens=whole["tokens"][i].tolist(),
            response_length=RESPONSES[i],
            reward=REWARDS[i],
            loss_mask=whole["loss_masks"][i].tolist(),
            rollout_log_probs=whole["rollout_log_probs"][i].tolist(),
            status=Sample.Status.COMPLETED,
        )
        for i in range(6)
    ]
    save_debug_rollout_data(str(folder / "rollout.pt"), samples, rollout_id=3, evaluation=False)


def main(source: Path, folder: Path) -> None:
    """Write one step of six rollouts, one in which two samples are segments of one rollout, and rollout data."""
    sizes = {"n_samples_per_prompt": 3, "rollout_batch_size": 2, "eps_clip": 0.2, "eps_clip_high": 0.28}
    rewards = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True}
    for name, rollout_ids in (("train", [0, 1, 2, 3, 4, 5]), ("segments", [0, 1, 2, 3, 4, 4])):
        args = Namespace(**sizes, **rewards, rollout_ids=rollout_ids, seed=len(set(rollout_ids)))
        options = (helpers.free_port(), args, source, str(folder / f"{name}.pt"))
        multiprocessing.spawn(rank_of, args=options, nprocs=4, join=True)
    rollout_data(args, source, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
