"""Rectangular batches of random documents, for tests that compare two losses."""

from __future__ import annotations

import torch

from workbench.policy.logprobs import TokenLogprobs
from workbench.reduction.evaluate import CORRECTION_WEIGHTS
from workbench.rollouts.targets import TrainingRow


def rectangle(
    seed: int, *, rows: int = 7, width: int = 9, spread: float = 1.0, per_row: bool = False
) -> tuple[TrainingRow, TokenLogprobs]:
    """Return rows of one width as documents, the last without a trained token, and every field that a loss may read."""
    draw = torch.Generator().manual_seed(10_000 + seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64)

    def near(values: torch.Tensor, by: float) -> torch.Tensor:
        return torch.minimum(
            values + by * torch.randn(rows, width, generator=draw, dtype=torch.float64),
            torch.tensor(-1e-3, dtype=torch.float64),
        )

    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=draw) < 0.85)
    mask[0, 0], mask[-1] = True, False
    policy = uniform(-3.0, -0.05, rows, width)
    advantages = uniform(-2, 2, rows, 1).expand(rows, width) if per_row else uniform(-2, 2, rows, width)
    old = near(policy, spread)
    ids = torch.arange(rows)[:, None].expand(rows, width)
    counted = mask.sum(1, keepdim=True).clamp_min(1).double().expand(rows, width)
    rewards = (uniform(-1, 1, rows, 1) > 0).double().expand(rows, width)
    row = TrainingRow(
        tokens_T=ids.flatten() * 0,
        positions_T=ids.flatten() * 0,
        document_ids_T=ids.flatten(),
        targets_T=ids.flatten() * 0,
        loss_mask_T=mask.flatten(),
        advantages_T=advantages.flatten(),
        old_logprobs_T=old.flatten(),
        sampler_logprobs_T=near(old, 0.4 * spread).flatten(),
        ref_logprobs_T=near(policy, spread).flatten(),
        source_T=torch.arange(rows * width),
        lengths_T=counted.flatten(),
        rewards_T=rewards.flatten(),
        group_ids_T=(ids // 2).flatten(),
        rollout_ids_T=ids.flatten(),
        extensions={
            CORRECTION_WEIGHTS: uniform(0.3, 2.5, rows * width),
            "truncated": (ids.flatten() == 3).double(),
            "group_tokens": uniform(10, 40, rows, 1).expand(rows, width).flatten(),
        },
    )
    output = TokenLogprobs(
        policy.flatten(), uniform(0.2, 3.0, rows * width), uniform(-2, 4, rows * width), uniform(0, 3, rows * width)
    )
    return row, output
