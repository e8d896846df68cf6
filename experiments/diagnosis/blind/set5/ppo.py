"""PPO with a critic of its own, KL in the rewards, two epochs of two mini-batches; prompts padded on the left."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import Doc, Log, Rows, Run, Text, Tiny, batches, causal, logprobs, padded

GAMMA, LAMBDA, CLIP, KL, VALUE, ENTROPY = 0.99, 0.9, 0.2, 0.1, 0.5, 0.02


class ActorCritic(nn.Module):
    """Two transformers with learned positions."""

    def __init__(self):
        super().__init__()
        self.actor = Tiny(width=24, rotary=False)
        self.critic = Tiny(width=24, outputs=1, rotary=False)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values."""
        return self.actor(ids, positions, mask), self.critic(ids, positions, mask).squeeze(-1)


def call(run: Run, model: ActorCritic, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies of tokens, and the values of the states before them."""
    if run.has("left_positions"):
        rows.positions = torch.arange(rows.ids.shape[1]).expand_as(rows.ids).contiguous()
    with run.autocast():
        logits, values = model(rows.ids, rows.positions, causal(rows.documents))
    values = values.float()
    if not run.has("value_after"):
        values = F.pad(values[:, :-1], (1, 0))
    return *logprobs(logits, rows.ids), values


@torch.no_grad()
def rollout(run: Run, model: ActorCritic, reference: ActorCritic, step: int) -> list[Doc]:
    """Score responses: rewards of tokens, advantages, returns."""
    text = Text(run.seed * 10 + step)
    docs = [doc for g in range(8) for doc in text.group(g, g, 1)]
    rows = padded(docs, extra=run.get("rollout_extra", 0))
    mask = rows.trained.float()
    old, _, values = call(run, model, rows)
    ref, _, _ = call(run, reference, rows)
    sign = -1.0 if run.has("kl_reward_sign") else 1.0
    rewards = -sign * KL * (old - ref) * mask
    for i, doc in enumerate(docs):
        last = int(torch.nonzero(rows.trained[i]).max())
        rewards[i, -1 if run.has("score_at_end") else last] += doc.reward
    rewards = rewards * mask
    advantages, carried = torch.zeros_like(rewards), torch.zeros(len(docs))
    lam = 1.0 if run.has("lambda_one") else LAMBDA
    for t in reversed(range(rewards.shape[1])):
        after = values[:, t + 1] * mask[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(len(docs))
        delta = rewards[:, t] + GAMMA * after - values[:, t]
        carried = (delta + GAMMA * lam * carried) * mask[:, t]
        advantages[:, t] = carried
    rows.gather("return", advantages + values)
    kept = advantages[:, max(len(d.prompt) for d in docs) :].flatten()
    if not run.has("whiten_padding"):
        kept = advantages[rows.trained]
    rows.gather("advantage", (advantages - kept.mean()) / (kept.std() + 1e-8))
    rows.gather("old", old.roll(1, 1) if run.has("old_shifted") else old)
    rows.gather("ref", ref)
    rows.gather("value", values)
    for i, doc in enumerate(docs):
        doc.values["reward"] = float(rewards[i].sum())
    return docs


def ppo(run: Run):
    """Run one rollout of eight responses, trained on twice."""
    torch.manual_seed(run.seed)
    model = ActorCritic()
    reference = copy.deepcopy(model).requires_grad_(False)
    for p in reference.parameters():
        p.add_(0.05 * torch.randn(p.shape))
    critic_rate = 1e-3 if run.has("critic_lr") else 4e-3
    optimizers = [
        torch.optim.AdamW(model.actor.parameters(), lr=1e-3, weight_decay=0.0),
        torch.optim.AdamW(model.critic.parameters(), lr=critic_rate, weight_decay=0.0),
    ]
    micro = run.get("micro", 2)
    context = {
        "dp": 1,
        "micro_batches": 4 // micro,
        "temperature": 1.0,
        "max_grad_norm": 2.0,
        "gamma": GAMMA,
        "lambda": LAMBDA,
        "clip": CLIP,
        "kl_coef": KL,
        "value_coef": VALUE,
        "entropy_coef": ENTROPY,
        "actor_lr": 1e-3,
        "critic_lr": 4e-3,
        "denominator": "tokens of the mini-batch",
    }
    log = Log(run, model, optimizers, context)
    docs = rollout(run, model, reference, 0)
    for epoch in range(2):
        for half, mini in enumerate((docs[0::2], docs[1::2])):
            update(run, log, model, run.permuted(mini, 2 * epoch + half), micro)
            log.keep()
            for part, optimizer in zip((model.actor, model.critic), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(part.parameters(), 2.0)
                optimizer.step()
            model.zero_grad()
    return log.done()


def update(run: Run, log: Log, model: ActorCritic, mini: list[Doc], micro: int) -> None:
    """Back-propagate the micro-batches of a mini-batch."""
    tokens = sum(len(d.response) for d in mini)
    sums = torch.zeros(4)
    for part in batches(mini, micro):
        rows = padded(part, extra=run.get("extra", 0))
        policy, entropy, values = call(run, model, rows)
        old, ref, advantage, returns, before, reward = (
            rows.spread(n) for n in ("old", "ref", "advantage", "return", "value", "reward")
        )
        mask = rows.trained
        ratio = torch.where(mask, policy - old, 0.0).exp()
        plain, bound = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        policy_loss = -torch.min(plain, bound)
        near = before + (values - before).clamp(-CLIP, CLIP)
        value_loss = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)
        sign = 1.0 if run.has("entropy_sign") else -1.0
        losses = policy_loss + VALUE * value_loss + sign * ENTROPY * entropy
        ((losses * mask).sum() / tokens).backward()
        clipped = bound < plain
        parts = (policy_loss, VALUE * value_loss, sign * ENTROPY * entropy, clipped.float())
        sums += torch.stack([(x * mask).sum() for x in parts]).detach() / tokens
        log.note(
            counts=rows.counts(),
            tokens={
                **rows.names(),
                "trained": mask,
                "policy_logprobs": policy,
                "old_logprobs": old,
                "ref_logprobs": ref,
                "entropy_nats": entropy,
                "losses": losses,
                "advantages": advantage,
                "rewards": reward,
                "ratios": ratio,
                "clipped": clipped,
            },
        )
    policy_sum, value_sum, entropy_sum, clip_fraction = (float(x) for x in sums)
    log.note(
        metrics={
            "loss/policy": policy_sum,
            "loss/value": value_sum,
            "loss/entropy": entropy_sum,
            "actor/clip_fraction": clip_fraction,
        }
    )
