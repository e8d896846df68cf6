"""Six right loops whose runs differ by rounding alone: how they divide, pad, order and precompute their batches.

What is computed outside the training forward (old, reference, sampler, critic, teacher) has batches of its own: with
other ones its numbers are rounded otherwise although the policy's agree bit for bit.

Settings of a layout: ``micro`` documents a call, ``extra`` columns of padding, ``left`` or right padding, ``order`` of
the documents, ``ranks`` by turns, ``scored`` documents a call outside training and ``scored_extra`` columns there,
``attention`` (fused or by hand), ``chunks`` of the head, ``parts`` (terms of the loss noted for each call), ``sampler``
(its precision), ``noted`` (dtype of noted values).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.diagnosis.blind.set5.common import Doc, Log, Rows, Run, Text, Tiny, batches, causal, fill, padded
from experiments.diagnosis.blind.set5.common import logprobs as logprobs_of

CLIP, KL, GAMMA, LAMBDA, VALUE, BONUS, BETA, Z = 0.2, 0.05, 0.99, 0.95, 0.3, 0.01, 0.3, 1e-3
STEPS = 2


class Model(nn.Module):
    """A small transformer with a value head, whose attention and head can be computed in other ways."""

    def __init__(self, run: Run, width: int = 32) -> None:
        super().__init__()
        self.body, self.value = Tiny(width=width), nn.Linear(width, 1)
        self.by_hand, self.chunks = run.get("attention", "fused") == "by hand", run.get("chunks", 1)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the token that follows each, and values."""
        if self.by_hand:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return self._heads(self._hidden(ids, positions, mask))
        return self._heads(self._hidden(ids, positions, mask))

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        body, x = self.body, self.body.embed(ids)
        for at, (mixer, wide) in enumerate(zip(body.mixers, body.wides, strict=True)):
            x = x + mixer(body.norms[2 * at](x), positions, mask)
            x = x + wide(body.norms[2 * at + 1](x))
        return body.norms[-1](x)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.cat([self.body.head(part) for part in hidden.chunk(self.chunks, 1)], 1)
        return logits, self.value(hidden).squeeze(-1)


class Setup:
    """Models, optimizer, recorder and batches of one run."""

    def __init__(self, run: Run, weights: bool, **context: Any) -> None:
        torch.manual_seed(run.seed)
        self.run = run
        self.policy = Model(run)
        self.other = copy.deepcopy(self.policy).requires_grad_(False)
        for p in self.other.parameters():
            p.add_(0.04 * torch.randn(p.shape))
        if weights and run.bf16:
            self.policy, self.other = self.policy.bfloat16(), self.other.bfloat16()
        self.autocast = not weights
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3)
        self.ranks, self.micro = run.get("ranks", 1), run.get("micro", 4)
        self.log = Log(run, self.policy, self.optimizer, {"dp": self.ranks, "max_grad_norm": 1.0, **context})
        self.sums: dict[str, float] = {}

    def docs(self, step: int, group: int = 4) -> list[Doc]:
        """Eight responses."""
        text = Text(self.run.seed * 10 + step)
        return [doc for at in range(8 // group) for doc in text.group(group * at, at, group)]

    def call(self, model: Model, rows: Rows, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values of tokens, and the logits."""
        with self.run.autocast() if self.autocast else torch.autocast("cpu", enabled=False):
            logits, values = model(rows.ids, rows.positions, causal(rows.documents))
        token, entropy = logprobs_of(logits, rows.ids, temperature)
        return token, entropy, F.pad(values[:, :-1].float(), (1, 0)), logits

    @torch.no_grad()
    def score(self, docs: list[Doc], model: Model, name: str, value: str = "") -> None:
        """Give documents log-probabilities, and values, from batches outside training."""
        for part in batches(docs, self.run.get("scored", 4)):
            rows = self.rows(part, self.run.get("scored_extra", 0))
            token, _, values, _ = self.call(model, rows)
            rows.gather(name, token)
            if value:
                rows.gather(value, values)

    def rows(self, docs: list[Doc], extra: int) -> Rows:
        """A padded batch."""
        return padded(docs, left=self.run.get("left", True), extra=extra)

    def parts(self, docs: list[Doc], step: int) -> list[tuple[int, Rows]]:
        """The calls of a step with their ranks."""
        order = self.run.permuted(docs, step)
        dealt = [order[rank :: self.ranks] for rank in range(self.ranks)]
        extra = self.run.get("extra", 0)
        return [
            (rank, self.rows(part, extra)) for rank in range(self.ranks) for part in batches(dealt[rank], self.micro)
        ]

    def term(self, **terms: Tensor) -> dict[str, float]:
        """Terms of one call: noted with it, or added up for the step."""
        values = {f"loss/{name}": float(value.detach()) for name, value in terms.items()}
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        return values if self.run.get("parts", False) else {}

    def note(self, rows: Rows, metrics: dict[str, float], **values: Tensor) -> None:
        """Note one call."""
        dtype = self.run.get("noted", "")
        if dtype:
            values = {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in values.items()}
        tokens = {**rows.names(), "trained": rows.trained, **values}
        self.log.note(counts=rows.counts(), tokens=tokens, **({"metrics": metrics} if metrics else {}))

    def update(self) -> None:
        """Finish a step."""
        if not self.run.get("parts", False) and self.sums:
            self.log.note(metrics=self.sums)
        self.sums = {}
        self.log.keep()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def grpo(run: Run) -> Any:
    """Two mini-batches of a rollout, a penalty to a reference, and a correction for a sampler; bf16 by autocast."""
    setup = Setup(run, weights=False, denominator="tokens", kl_coef=KL, clip=CLIP)
    docs = setup.docs(0)
    setup.score(docs, setup.policy, "old")
    setup.score(docs, setup.other, "ref")
    sampler = copy.deepcopy(setup.policy)
    if run.get("sampler", "") == "weights":
        sampler = sampler.bfloat16().float() if run.bf16 else sampler  # of float32 it is another sampler
    setup.score(docs, sampler, "sampler")
    for doc in docs:
        rewards = torch.tensor([d.reward for d in docs if d.group == doc.group])
        doc.values |= {"advantage": float((doc.reward - rewards.mean()) / (rewards.std() + 1e-6)), "reward": doc.reward}
    for step, mini in enumerate((docs[0::2], docs[1::2])):
        tokens = sum(len(d.response) for d in mini)
        for _, rows in setup.parts(mini, step):
            policy, entropy, _, _ = setup.call(setup.policy, rows)
            old, ref, drawn, advantage, reward = (
                rows.spread(name) for name in ("old", "ref", "sampler", "advantage", "reward")
            )
            mask = rows.trained
            ratio = torch.where(mask, policy - old, 0.0).exp()
            plain, bound = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
            d = torch.where(mask, ref - policy, 0.0)
            kl = d.exp() - d - 1
            weight = torch.where(mask, old - drawn, 0.0).exp().clamp(max=2.0)
            losses = -torch.min(plain, bound) * weight + KL * kl
            ((losses * mask).sum() / tokens).backward()
            metrics = setup.term(kl=(KL * kl * mask).sum() / tokens)
            noted = {"old_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": drawn, "ratios": ratio}
            noted |= {"losses": losses, "advantages": advantage, "rewards": reward, "clipped": bound < plain}
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, **noted)
        setup.update()
    return setup.log.done()


def critic(run: Run) -> Any:
    """PPO with a critic on the policy's trunk: advantages of tokens, clipped values and an entropy bonus."""
    setup = Setup(run, weights=False, denominator="tokens", gamma=GAMMA, value_coef=VALUE, entropy_coef=BONUS)
    docs = setup.docs(0, group=1)
    setup.score(docs, setup.policy, "old", "before")
    for doc in docs:
        values = doc.values["before"].float()
        rewards = torch.zeros(len(values))
        rewards[-1] = doc.reward
        carried, advantages = torch.zeros(()), torch.zeros(len(values))
        for t in reversed(range(len(values))):
            after = values[t + 1] if t + 1 < len(values) else torch.zeros(())
            carried = rewards[t] + GAMMA * after - values[t] + GAMMA * LAMBDA * carried
            advantages[t] = carried
        doc.values |= {"advantage": advantages, "return": advantages + values}
    every = torch.cat([doc.values["advantage"] for doc in docs])
    for doc in docs:
        doc.values["advantage"] = (doc.values["advantage"] - every.mean()) / every.std()
    for step in range(STEPS):
        tokens = sum(len(d.response) for d in docs)
        for _, rows in setup.parts(docs, step):
            policy, entropy, values, _ = setup.call(setup.policy, rows)
            old, advantage, returns, before = (rows.spread(n) for n in ("old", "advantage", "return", "before"))
            mask = rows.trained
            ratio = torch.where(mask, policy - old, 0.0).exp()
            plain, bound = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
            near = before + (values - before).clamp(-CLIP, CLIP)
            value = VALUE * torch.max((values - returns) ** 2, (near - returns) ** 2)
            losses = -torch.min(plain, bound) + value - BONUS * entropy
            ((losses * mask).sum() / tokens).backward()
            terms = {"policy": -torch.min(plain, bound), "value": value, "entropy": -BONUS * entropy}
            metrics = setup.term(**{name: (each * mask).sum() / tokens for name, each in terms.items()})
            noted = {"losses": losses, "advantages": advantage, "ratios": ratio, "clipped": bound < plain}
            if run.get("note_old", True):
                noted["old_logprobs"] = old
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, **noted)
        setup.update()
    return setup.log.done()


def pairs(run: Run) -> Any:
    """DPO: a reference's log-probabilities are computed before; weights in bfloat16."""
    setup = Setup(run, weights=True, denominator="pairs", beta=BETA)
    for step in range(STEPS):
        docs = setup.docs(step, group=2)
        setup.score(docs, setup.other, "ref")
        twos = run.permuted(batches(docs, 2), step)
        for two in batches(twos, max(1, setup.micro // 2)):
            rows = setup.rows([doc for pair in two for doc in pair], run.get("extra", 0))
            policy, entropy, _, _ = setup.call(setup.policy, rows)
            ref, mask = rows.spread("ref"), rows.trained
            margin = ((policy - ref) * mask).sum(1)
            preference = -F.logsigmoid(BETA * (margin[0::2] - margin[1::2])).sum() / len(twos)
            likelihood = -0.1 * (policy * mask).sum(1)[0::2].sum() / sum(len(p[0].response) for p in twos)
            (preference + likelihood).backward()
            metrics = setup.term(preference=preference, likelihood=likelihood)
            noted = {"ref_logprobs": ref} if run.get("note_ref", True) else {}
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, **noted)
        setup.update()
    return setup.log.done()


def likelihood(run: Run) -> Any:
    """Fine-tuning with a z-loss of the router's kind on logits, in packed or padded rows; bf16 by autocast."""
    setup = Setup(run, weights=False, denominator="tokens", z_coef=Z)
    for step in range(STEPS):
        docs = setup.docs(step)
        tokens, calls = sum(len(d.response) for d in docs), setup.parts(docs, step)
        if run.get("packed", 0):
            order, calls = run.permuted(docs, step), []
            for part in batches(order, setup.micro):
                starts = [sum(len(d.ids) for d in part[:at]) for at in range(len(part))]
                width = sum(len(d.ids) for d in part) + run.get("extra", 0)
                calls.append((0, fill([list(zip(starts, part, strict=True))], width)))
        for _, rows in calls:
            policy, entropy, _, logits = setup.call(setup.policy, rows)
            if run.get("packed", 0):
                policy, entropy = (torch.where(rows.positions == 0, 0.0, each) for each in (policy, entropy))
            mask = rows.trained
            z = Z * F.pad(logits[:, :-1].float().logsumexp(-1).square(), (1, 0))
            (((z - policy) * mask).sum() / tokens).backward()
            metrics = setup.term(likelihood=(-policy * mask).sum() / tokens, z=(z * mask).sum() / tokens)
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, losses=z - policy)
        setup.update()
    return setup.log.done()


def sequences(run: Run) -> Any:
    """Ratios of sequences to a policy two updates old, means over documents, ranks by turns; weights in bfloat16."""
    setup = Setup(run, weights=True, denominator="documents", clip=0.05)
    docs = setup.docs(0)
    setup.score(docs, setup.other, "old")
    for doc in docs:
        rewards = torch.tensor([d.reward for d in docs if d.group == doc.group])
        doc.values |= {"advantage": float(doc.reward - rewards.mean()), "reward": doc.reward}
    for step in range(STEPS):
        for _, rows in setup.parts(docs, step):
            policy, entropy, _, _ = setup.call(setup.policy, rows)
            old, advantage, reward = (rows.spread(n) for n in ("old", "advantage", "reward"))
            mask, lengths = rows.trained, rows.trained.sum(1, keepdim=True)
            ratio = ((policy - old) * mask).sum(1, keepdim=True).div(lengths).exp().expand_as(policy)
            plain, bound = ratio * advantage, ratio.clamp(0.8, 1.25) * advantage
            losses = -torch.min(plain, bound)
            loss = (losses * mask / lengths).sum() / len(docs)
            loss.backward()
            metrics = setup.term(policy=loss)
            noted = {"losses": losses, "advantages": advantage, "rewards": reward, "clipped": bound < plain}
            noted |= {"old_logprobs": old} if run.get("note_old", True) else {}
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, ratios=ratio, **noted)
        setup.update()
    return setup.log.done()


def distillation(run: Run) -> Any:
    """A teacher's whole distribution at the student's tokens, and a share of likelihood; bf16 by autocast."""
    setup = Setup(run, weights=False, denominator="tokens", objective="distillation")
    for step in range(STEPS):
        docs = setup.docs(step)
        setup.score(docs, setup.other, "ref")
        tokens = sum(len(d.response) for d in docs)
        for _, rows in setup.parts(docs, step):
            policy, entropy, _, logits = setup.call(setup.policy, rows)
            with torch.no_grad():
                wider = self_padded(rows, run.get("scored_extra", 0))
                teacher = setup.call(setup.other, wider)[3][:, : rows.ids.shape[1] - 1].float().log_softmax(-1)
            student, mask = logits[:, :-1].float().log_softmax(-1), rows.trained
            kl = F.pad((student.exp() * (student - teacher)).sum(-1), (1, 0))
            losses = kl - 0.1 * policy
            ((losses * mask).sum() / tokens).backward()
            metrics = setup.term(kl=(kl * mask).sum() / tokens)
            noted = {"losses": losses, "ref_logprobs": rows.spread("ref")}
            setup.note(rows, metrics, policy_logprobs=policy, entropy_nats=entropy, **noted)
        setup.update()
    return setup.log.done()


def self_padded(rows: Rows, extra: int) -> Rows:
    """The same rows with more padding on the right."""
    if not extra:
        return rows
    wide = {name: F.pad(getattr(rows, name), (0, extra), value=pad) for name, pad in (("ids", 0), ("documents", -1))}
    wide |= {"positions": F.pad(rows.positions, (0, extra)), "source": F.pad(rows.source, (0, extra), value=-1)}
    return Rows(**wide, trained=F.pad(rows.trained, (0, extra)), docs=rows.docs)


LOOPS = {each.__name__: each for each in (grpo, critic, pairs, likelihood, sequences, distillation)}
