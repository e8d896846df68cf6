"""A custom step: rows of packed documents through an exact policy, with all results by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.policy.model import load_policy
from workbench.reproducible import Resolution, install, whole_row
from workbench.sharding.attention import AttentionShard
from workbench.sharding.gradients import full_gradients
from workbench.sharding.mesh import Mesh
from workbench.sharding.plan import ShardPlan

TOKENS, BLOCK = 32, 4
DOCUMENTS = (
    torch.zeros(TOKENS, dtype=torch.long),
    torch.tensor([0] * 10 + [1] * 3 + [2] * 15 + [-1] * 4),
    torch.tensor([0] * 17 + [1] * 15),
    torch.tensor([0] * 30 + [-1] * 2),
)


def own_step(
    mesh: Mesh,
    plan_of: Callable[[int], ShardPlan],
    resolution: Resolution,
    *,
    source: str = "tiny-qwen3",
    exact: bool = True,
    backwards: bool = False,
    spoil: Callable[[Any], None] = lambda policy: None,
    shares: Sequence[int] = (),
    **load: Any,
) -> dict[str, torch.Tensor]:
    """Log-probabilities and entropies row by row, whole gradients and norms of one step.

    Args:
        mesh: the axes; dp divides the four rows.
        plan_of: how a row lies over cp.
        resolution: of the exact computation.
        source: of the policy.
        exact: False: the ordinary computation, for comparison.
        backwards: take the rows in the other order.
        spoil: what is done to the policy before the step.
        shares: rows of each dp rank; empty: equally many.
        load: more of `load_policy`.
    """
    policy = load_policy(source, mesh=mesh, **load)
    spoil(policy)
    done = install(policy, resolution) if exact else None
    dp, cp = mesh["dp"], mesh["cp"]
    result: dict[str, torch.Tensor] = {}
    shares = shares or (len(DOCUMENTS) // dp.size,) * dp.size
    local = range(sum(shares[: dp.rank]), sum(shares[: dp.rank + 1]))
    for number in reversed(local) if backwards else local:
        documents_T, plan = DOCUMENTS[number], plan_of(cp.size)
        draw = torch.Generator().manual_seed(number)
        tokens_T = torch.randint(policy.vocabulary_size, (TOKENS,), generator=draw)
        weights_T = torch.rand(TOKENS, generator=draw) - 0.3
        shard = AttentionShard.make(plan, documents_T, cp)

        def own(values_T, plan=plan):
            return plan.split(values_T, cp.rank)

        first_T = torch.searchsorted(shard.documents_T, shard.documents_T)
        targets_T = tokens_T.roll(-1).masked_fill(documents_T < 0, -100)
        hidden = policy.hidden_states(own(tokens_T), own(torch.arange(TOKENS) - first_T), shard)
        output = policy.token_logprobs(hidden, own(targets_T), outputs=("entropy",))
        logprobs_T, entropy_T = (whole_row(part, plan, cp) for part in (output.logprobs_T, output.entropy_T))
        (logprobs_T * weights_T + 0.1 * entropy_T).sum().backward()
        result |= {f"logprobs {number}": logprobs_T.detach(), f"entropy {number}": entropy_T.detach()}
    if done is not None:
        done.reduce()
        result |= {f"norm of {name}": torch.tensor(value, dtype=torch.float64) for name, value in done.norms().items()}
    else:
        from workbench.sharding.gradients import sum_gradients

        sum_gradients(policy.model, policy.shards, mesh)
    return result | full_gradients(policy.model, policy.shards, mesh)


def in_order(order: str) -> Callable[[int], ShardPlan]:
    """Plans of an order that does not go by documents."""
    return lambda cp: ShardPlan.make(order if cp > 1 else "contiguous", num_tokens=TOKENS, cp=cp)


def at_random(seed: int) -> Callable[[int], ShardPlan]:
    """Plans that deal whole blocks to any rank, in any order."""

    def plan_of(cp: int) -> ShardPlan:
        blocks = torch.randperm(TOKENS // BLOCK, generator=torch.Generator().manual_seed(seed))
        permutation_T = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        return ShardPlan("at random", cp, permutation_T, permutation_T.argsort())

    return plan_of
