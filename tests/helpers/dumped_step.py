"""A step as a trainer dumps it, with its loss computed here in plain arithmetic, right or with one mistake.

PPO's clip, one correction by min(old / sampler, 1.2), a k3 penalty, GRPO's advantages; float64.
"""

import torch

from workbench.dumps.step import StepDump

LENGTHS = (6, 3, 5, 4, 6, 2, 4, 5)
REWARDS = (1.0, 0.0, 0.25, 1.0, 0.0, 0.5, 1.0, 0.0)
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
ROWS, WIDTH, CLIP, KL, CAP = 8, 7, 0.2, 0.1, 1.2
SETTINGS = {
    "name": "ppo",
    "denominator": "token",
    "surrogate": {"clip_low": CLIP, "clip_high": CLIP},
    "correction": {"ratio": "token", "ratio_high": CAP},
    "kl": {"coefficient": KL, "estimator": "k3"},
}
ADVANTAGES = {"name": "grpo", "epsilon": 1e-4}


def inputs(seed=0):
    """Return the inputs of the step, [B, C], by the names of `StepDump`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    tokens = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    mask = tokens.clone()
    mask[2, 1:3] = False  # a tool wrote them
    old = -2 - normal(0.5).abs()
    return {
        "loss_mask": mask,
        "token_mask": tokens,
        "old_logprobs": old,
        "policy_logprobs": old + normal(0.2),
        "sampler_logprobs": old + normal(0.15),
        "ref_logprobs": old + normal(0.15),
    }


def advantages():
    """Return [B] advantages of the rewards."""
    rewards, groups = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS)
    out = torch.zeros_like(rewards)
    for group in (0, 1):
        own = rewards[groups == group]
        out[groups == group] = (own - own.mean()) / (own.std() + ADVANTAGES["epsilon"])
    return out


def loss(values, advantages_B, weights=None):
    """Return (loss, its terms) of a trainer that takes these values and token weights."""
    mask = values["loss_mask"]
    weights = mask.double() / mask.sum() if weights is None else weights.double()
    ratio = (values["policy_logprobs"] - values["old_logprobs"]).exp()
    advantage = advantages_B[:, None] if advantages_B.dim() == 1 else advantages_B
    surrogate = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    correction = (values["old_logprobs"] - values["sampler_logprobs"]).exp().clamp(max=CAP)
    gap = values["ref_logprobs"] - values["policy_logprobs"]
    policy = (weights * correction * surrogate)[mask].sum()
    kl = KL * (weights * (gap.exp() - 1 - gap))[mask].sum()
    return policy + kl, {"policy": policy, "kl": kl}


def dump(made=None, *, recorded=None, advantages_B=None, weights=None, only=(), factor=1.0, settings=None, **more):
    """Return the dump of a trainer whose loss took ``made`` values in place of the dumped ones."""
    values = {**inputs(), **(recorded or {})}
    taken = {**values, **(made or {})}
    leaf = taken["policy_logprobs"].clone().requires_grad_()
    given = advantages() if advantages_B is None else advantages_B
    total, terms = loss({**taken, "policy_logprobs": leaf}, given, weights)
    (factor * total).backward()
    losses = {name: float(value.detach()) * factor for name, value in {"total": total, **terms}.items()}
    tokens = {**values, "coefficients": leaf.grad}
    if only == ("losses",):
        del tokens["coefficients"]
    rewards, groups = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS)
    return StepDump.from_rectangle(
        tokens,
        {"rewards": rewards, "group_ids": groups, "advantages": given.detach(), **more.pop("documents", {})},
        settings=settings or SETTINGS,
        advantages=ADVANTAGES,
        losses=losses,
        **{"dtype": "float64", **more},
    )
