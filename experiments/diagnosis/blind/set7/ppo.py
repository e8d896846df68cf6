"""PPO with a critic on its trunk: GAE, KL in the reward, whitening, clipped values, entropy bonus, its own clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import (
    Batch,
    Decoder,
    Run,
    by_document,
    chunks,
    counts_of,
    entropy_of,
    in_order,
    initialise,
    neighbour,
    padded,
    said,
    where_of,
    write_docs,
)
from torch import Tensor, nn
from torch.nn.functional import pad

DOCS, MICRO, EPOCHS = 10, 5, 2
LAMBDA, EPSILON, VALUE_EPSILON, VALUE_COEFFICIENT, ENTROPY, KL, BOUND = 0.9, 0.2, 0.3, 0.5, 0.05, 0.1, 0.5


class ActorCritic(Decoder):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.value = nn.Linear(self.head.in_features, 1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        hidden = self.hidden(input_ids, attention_mask, position_ids)
        return self.head(hidden), self.value(hidden)[..., 0]


def forward(run: Run, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens, logits, and at each token the value of the state before it."""
    with run.autocast():
        logits, values = model(batch.ids, attention_mask=batch.real, position_ids=batch.positions)
    values = values.float()
    return said(run, logits, batch.ids), logits, values


def before(values: Tensor) -> Tensor:
    return pad(values[:, :-1], (1, 0))


def estimate(run: Run, batch: Batch, rewards: Tensor, values: Tensor) -> Tensor:
    """GAE over each row's answer, backwards; ``values`` are of states, ``rewards`` of tokens."""
    lam = 1.0 if run.bug("lambda_one") else LAMBDA
    state = before(values)
    out = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        places = batch.answer[row].nonzero()[:, 0].tolist()
        carried = torch.tensor(0.0)
        following = values[row, places[-1]] if run.bug("bootstrap_after_end") else torch.tensor(0.0)
        for t in reversed(places):
            delta = rewards[row, t] + following - state[row, t]
            carried = delta + lam * carried
            out[row, t] = carried
            following = state[row, t]
    return out


def clip(run: Run, model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if run.bug("clipped_by_parameter"):
        for g in grads:
            g.mul_(min(1.0, BOUND / (g.norm().item() + 1e-6)))
        return
    norm = torch.stack([g.float().norm() for g in grads]).norm().item()
    for g in grads:
        g.mul_(min(1.0, BOUND / (norm + 1e-6)))


def train(run: Run) -> None:
    micro = run.get("micro", MICRO)
    model = initialise(ActorCritic(kernel=run.get("kernel", "sdpa")), run.seed)
    reference = neighbour(model, run.seed)
    trained = list(model.parameters())
    if run.bug("value_head_left_out"):
        trained = [p for n, p in model.named_parameters() if not n.startswith("value.")]
    optimizer = torch.optim.AdamW(
        trained, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=run.get("foreach", True)
    )
    recorder = run.recorder(
        model, optimizer, micro_batches=-(-DOCS // micro), max_grad_norm=BOUND, temperature=1.0, gae_lambda=LAMBDA,
        clip=EPSILON, value_clip=VALUE_EPSILON, value_coefficient=VALUE_COEFFICIENT, entropy_coefficient=ENTROPY,
        kl_coefficient=KL, denominator="tokens of the step",
    )  # fmt: skip
    for rollout in range(2):
        docs = in_order(run, write_docs(run.seed, rollout, DOCS))
        scores = dict(enumerate(np.random.default_rng([run.seed, 90 + rollout]).normal(0.5, 1.0, DOCS)))
        batches = [padded(d, multiple=run.get("multiple", 1)) for d in chunks(docs, micro)]
        memory = [collected(run, model, reference, b, scores) for b in batches]
        tokens = sum(int(b.answer.sum()) for b in batches)
        if not run.bug("not_whitened"):
            everything = torch.cat([m["advantages"][b.answer] for m, b in zip(memory, batches, strict=True)])
            mean, std = everything.double().mean().float(), everything.double().std().float()
            for m in memory:
                m["advantages"] = (m["advantages"] - mean) / (std + 1e-8)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            sums = dict.fromkeys(("policy", "value", "entropy", "all"), 0.0)
            for batch, kept in zip(batches, memory, strict=True):
                terms = losses_of(run, model, batch, kept, recorder)
                for name, term in terms.items():
                    sums[name] += term.item() / tokens
                loss = terms["all"] / tokens
                loss.backward()
            run.seen(model, sums["all"])
            if run.rich:
                recorder.note(
                    metrics={
                        "loss/policy": sums["policy"],
                        "loss/value": VALUE_COEFFICIENT * sums["value"],
                        "loss/entropy": -ENTROPY * sums["entropy"],
                        "reward/mean": float(np.mean(list(scores.values()))),
                    }
                )
            recorder.take_gradients(max_norm=BOUND)
            clip(run, model)
            optimizer.step()
            model.zero_grad()
    recorder.close()


@torch.no_grad()
def collected(
    run: Run, model: nn.Module, reference: nn.Module, batch: Batch, scores: dict[int, float]
) -> dict[str, Tensor]:
    logp, _, values = forward(run, model, batch)
    ref, _, _ = forward(run, reference, batch)
    rewards = -KL * (logp - ref) * batch.answer
    last = (batch.real.int() * torch.arange(batch.ids.shape[1])).argmax(1)
    rewards[torch.arange(len(last)), last] += by_document(batch, scores)[torch.arange(len(last)), last]
    advantages = estimate(run, batch, rewards, values)
    return {
        "old": logp,
        "ref": ref,
        "values": before(values),
        "advantages": advantages,
        "returns": advantages + before(values),
        "whole": rewards.sum(1, keepdim=True).expand_as(rewards),
    }


def losses_of(run: Run, model: nn.Module, batch: Batch, kept: dict[str, Tensor], recorder: Any) -> dict[str, Tensor]:
    mask = batch.answer
    logp, logits, values = forward(run, model, batch)
    state = values if run.bug("values_of_next_state") else before(values)
    ratio = (logp - kept["old"]).exp()
    advantage = kept["advantages"]
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    near = kept["values"] + (state - kept["values"]).clamp(-VALUE_EPSILON, VALUE_EPSILON)
    value = 0.5 * torch.maximum((state - kept["returns"]) ** 2, (near - kept["returns"]) ** 2)
    entropy = entropy_of(logits)
    coefficient = VALUE_COEFFICIENT**2 if run.bug("value_coefficient") else VALUE_COEFFICIENT
    bonus = ENTROPY if run.bug("entropy_added") else -ENTROPY
    per_token = policy + coefficient * value + bonus * entropy
    if run.rich:
        clipped = ((advantage > 0) & (ratio > 1 + EPSILON)) | ((advantage < 0) & (ratio < 1 - EPSILON))
        noted = where_of(batch) | {
            "policy_logprobs": logp, "old_logprobs": kept["old"], "ref_logprobs": kept["ref"], "entropy_nats": entropy,
            "trained": mask, "losses": per_token, "advantages": advantage, "rewards": kept["whole"], "ratios": ratio,
            "clipped": clipped & mask,
        }  # fmt: skip
        recorder.note(counts=counts_of(batch, mask), tokens=noted)
    return {
        "policy": run.add(policy * mask),
        "value": run.add(value * mask),
        "entropy": run.add(entropy * mask),
        "all": run.add(per_token * mask),
    }
