"""Random batches in verl's layout, and the shared parts of its cases."""

import numpy as np

from tests.helpers.system_batches import rectangle

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
WHOLE = {"dp_size": 4, "batch_num_tokens": 211, "global_batch_size": 24, "loss_scale_factor": 128}
SPREADS = (0.2, 1.5, 12.0)


def function(mode):
    return f'compute_policy_loss_{mode} (registry "{mode}")'


def batch_of(seed, spread, *, given=False, per_token=False):
    """The rectangle of a seed; with advantages a token, and with ready-made weights of which some are 0."""
    batch, rng = rectangle(seed, rows=6, width=8, spread=spread), np.random.default_rng(seed + 77)
    if per_token:
        batch["advantages"] = rng.standard_normal(batch["mask"].shape)
    if given:
        batch["is_weights"] = rng.uniform(0.2, 2.0, batch["mask"].shape) * (rng.random(batch["mask"].shape) < 0.8)
    return batch


def graded(seed, *, binary, holes, groups=3):
    """Return token rewards of ten completions of a few prompts, each with at least two completions and an empty one."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, 10)
    mask = (np.arange(6) < lengths[:, None]).astype(np.float64)
    if holes:
        mask *= rng.random((10, 6)) < 0.7
        mask[4] = 0
    rewards = rng.integers(0, 2, 10) if binary else rng.integers(-900, 900, 10) / 512
    token_rewards = np.zeros((10, 6))
    token_rewards[np.arange(10), lengths - 1] = rewards
    return {
        "token_rewards": token_rewards,
        "rewards": token_rewards.sum(1),
        "group_ids": np.concatenate([np.arange(2 * groups) % groups, rng.integers(0, groups, 10 - 2 * groups)]),
        "mask": mask,
    }
