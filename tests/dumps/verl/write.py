"""Write the dumps in this folder with verl's own code: advantages, loss, metrics, `save_to_disk`, `_write_generations`.

    pip install --no-deps verl==0.9.1; pip install torch==2.13.0 tensordict ray omegaconf hydra-core torchdata peft
    python tests/dumps/verl/write.py tests/dumps/verl

Everything is float32, as in verl's actor. Six sequences of two prompts, of unequal length, with padding that holds
garbage, and a policy that has moved away from the old one.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

PROMPT, RESPONSE = 3, 7
LENGTHS = (7, 4, 5, 2, 6, 3)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)


def rollouts(seed: int) -> DataProto:
    """Return a batch as the trainer has it before advantages: responses, masks, log-probabilities, scores."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(LENGTHS)
    mask = (torch.arange(RESPONSE) < torch.tensor(LENGTHS)[:, None]).long()
    prompts = torch.randint(5, 40, (rows // 3, PROMPT), generator=generator).repeat_interleave(3, 0)
    responses = torch.randint(5, 40, (rows, RESPONSE), generator=generator) * mask

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, RESPONSE, generator=generator)

    old = -1.5 - normal(0.7).abs()
    scores = torch.zeros(rows, RESPONSE)
    scores[torch.arange(rows), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS)
    return DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat([torch.ones_like(prompts), mask], 1),
            "response_mask": mask,
            "old_log_probs": old,
            "rollout_log_probs": old + normal(0.1),
            "ref_log_prob": old + normal(0.2),
            "log_probs": old + normal(0.25),
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
            "uid": np.array([f"prompt-{row // 3}" for row in range(rows)], dtype=object),
        },
        meta_info={"temperature": 1.0, "global_steps": 3},
    )


def train(batch: DataProto, agg: str, use_kl_loss: bool) -> DataProto:
    """Add advantages, importance weights and the metrics of the update, by verl's functions."""
    correction = SimpleNamespace(
        get=lambda name, default=None: {"rollout_is": "token", "rollout_is_threshold": 1.1}.get(name, default)
    )
    batch, metrics = compute_rollout_correction_and_add_to_batch(batch, correction)
    batch = compute_advantage(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=True)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=3,
        ppo_mini_batch_size=6,
        ppo_micro_batch_size_per_gpu=6,
        loss_agg_mode=agg,
        policy_loss=PolicyLossConfig(loss_mode="vanilla"),
    )
    log_probs = batch.batch["log_probs"].clone().requires_grad_()
    mask = batch.batch["response_mask"].bool()
    loss, of_policy = get_policy_loss_fn("vanilla")(
        old_log_prob=batch.batch["old_log_probs"],
        log_prob=log_probs,
        advantages=batch.batch["advantages"],
        response_mask=mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=batch.batch["rollout_is_weights"],
    )
    metrics = {**metrics, **of_policy, "actor/pg_loss": loss.item()}
    if use_kl_loss:
        of_tokens = kl_penalty(log_probs, batch.batch["ref_log_prob"], "low_var_kl")
        kl = agg_loss(loss_mat=of_tokens, loss_mask=mask, loss_agg_mode=agg)
        loss = loss + 0.05 * kl
        metrics["actor/kl_loss"] = kl.item()
    loss.backward()
    batch.batch["grad_log_probs"] = log_probs.grad
    batch.meta_info["metrics"] = metrics
    return batch


def main(folder: Path) -> None:
    """Write two `DataProto` files, one in each of verl's serializations, and one step of generations."""
    batch = train(rollouts(0), "token-mean", use_kl_loss=False)
    batch.save_to_disk(folder / "token_mean.pkl")
    os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
    train(rollouts(1), "seq-mean-token-mean", use_kl_loss=True).save_to_disk(folder / "sequence_mean_numpy.pkl")
    RayPPOTrainer._write_generations(
        [f"prompt {row // 3}" for row in range(6)],
        [f"response {row}" for row in range(6)],
        [None] * 6,
        batch.batch["token_level_scores"].sum(-1).tolist(),
        {},
        str(folder / "generations"),
        3,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
