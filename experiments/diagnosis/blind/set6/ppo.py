"""PPO: policy and value head share a trunk, KL in the loss, GAE, whitened advantages; two mini-batches of a rollout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from common import VOCAB, Decoder, Gradients, Log, Run, chunks, counts, disturb, entropies, grids, groups, late, logprobs
from common import padded, per_token

ROLLOUTS, PROMPTS, SIZE, MINI = 2, 8, 2, 2
GAMMA, LAMBDA, CLIP, VALUE_CLIP, VALUE, KL, ENTROPY, BOUND = 1.0, 0.95, 0.2, 0.2, 0.1, 0.1, 0.3, 0.25


class ActorCritic(Decoder):
    """A decoder with a value head on the same hidden states; `values` are left on it by `forward`."""

    def __init__(self, run: Run):
        super().__init__(run.seed, rotary=False, kernel=run.get("attention", "sdpa"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed + 1)
            self.value = nn.Linear(32, 1)
            nn.init.normal_(self.value.weight, 0, 0.15)
        self.detached = run.has("value_detached")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None):
        h = self.hidden(input_ids, attention_mask, position_ids)
        self.values = self.value(h.detach() if self.detached else h)[..., 0]
        return self.head(h)


def ppo(run: Run) -> Gradients:
    model = ActorCritic(run)
    ref = Decoder(run.seed, rotary=False, kernel=run.get("attention", "sdpa")).requires_grad_(False)
    disturb(model, run.seed, 0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    context = {"max_grad_norm": BOUND, "denominator": "trained tokens of the mini-batch", "gamma": GAMMA, "lambda": LAMBDA}
    log = Log(run, model, optimizer, context | {"vf_coef": VALUE, "kl_coef": KL, "entropy_coef": ENTROPY, "clip": CLIP})
    micro, extra, kernel = run.get("micro", 4), run.get("extra", 0), run.get("loss", "gather")

    def forward(net: nn.Module, b: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with run.autocast():
            logits = net(b["ids"], attention_mask=b["mask"], position_ids=b["positions"])
        values = getattr(net, "values", None)
        if values is not None:
            values = values.float()
            values = values if run.has("values_late") else late(values[:, :-1])
        return logits.float(), values

    for rollout in range(ROLLOUTS):
        rng = np.random.default_rng([run.seed, rollout])
        docs = groups(rng, PROMPTS, SIZE, 4, 13)
        store: dict[str, dict[int, Tensor]] = {"old": {}, "ref": {}, "value": {}, "raw": {}}
        for part in chunks(run.ordered(docs, rollout), micro):
            b = padded(part, "right", extra or 1)  # there is a position after every response
            with torch.no_grad():
                logits, values = forward(model, b)
                x = late(logprobs(logits[:, :-1], b["ids"][:, 1:], kernel))
                y = late(logprobs(forward(ref, b)[0][:, :-1], b["ids"][:, 1:], kernel))
            for i, d in enumerate(part):
                own = b["mask"][i]
                store["old"][d.number], store["ref"][d.number] = x[i][own], y[i][own]
                store["value"][d.number] = values[i][own]
                gamma = 0.8 if run.has("gamma") else GAMMA
                first, n = len(d) - sum(d.response), len(d)
                # the value after the end is that of the state in which all of the response has been read
                after = float(values[i, n]) if run.has("bootstrap_after_end") else 0.0
                advantage, raw = 0.0, torch.zeros(n)
                for t in reversed(range(first, n)):
                    reward = d.values["reward"] if t == n - 1 else 0.0
                    delta = reward + gamma * after - float(values[i, t])
                    advantage = delta + gamma * LAMBDA * advantage
                    raw[t], after = advantage, float(values[i, t])
                store["raw"][d.number] = raw
        flat = torch.cat([store["raw"][d.number][torch.tensor(d.response)] for d in docs]).double()
        mean, std = float(flat.mean()), float(flat.std())
        store["advantage"] = {n: (v - mean) / (std + 1e-8) for n, v in store["raw"].items()}
        target = "advantage" if run.has("returns_whitened") else "raw"
        store["return"] = {n: store[target][n] + store["value"][n] for n in store["raw"]}
        for n, mini in enumerate(chunks([docs[i] for i in rng.permutation(len(docs))], len(docs) // MINI)):
            total, width = sum(sum(d.response) for d in mini), max(map(len, mini)) + (extra or 1)
            terms = dict.fromkeys(("policy", "value", "kl", "entropy"), 0.0)
            fraction = 0.0
            for part in chunks(run.ordered(mini, 10 * rollout + n), micro):
                b = padded(part, "right", width - max(map(len, part)))
                grid = {k: torch.zeros(b["ids"].shape) for k in ("old", "ref", "value", "advantage", "return")}
                for name, g in grid.items():
                    for i, d in enumerate(part):
                        g[i, b["mask"][i]] = store[name][d.number]
                logits, values = forward(model, b)
                logp = late(logprobs(logits[:, :-1], b["ids"][:, 1:], kernel))
                entropy = late(entropies(logits[:, :-1]))
                m, a = b["trained"], grid["advantage"]
                ratio = (logp - grid["old"]).exp()
                policy = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
                clipped = ((ratio > 1 + CLIP) & (a > 0)) | ((ratio < 1 - CLIP) & (a < 0))
                near = grid["value"] + (values - grid["value"]).clamp(-VALUE_CLIP, VALUE_CLIP)
                value = 0.5 * torch.maximum((values - grid["return"]) ** 2, (near - grid["return"]) ** 2)
                kl = 0.5 * (logp - grid["ref"]) ** 2
                weight = 1.0 if run.has("value_coefficient") else VALUE
                losses = (policy + weight * value + KL * kl) * m
                if run.has("entropy_everywhere"):
                    bonus = entropy.sum() / (len(mini) * width)
                else:
                    losses = losses - ENTROPY * entropy * m
                    bonus = (entropy * m).sum() / total
                loss = losses.sum() / total
                if run.has("entropy_everywhere"):
                    loss = loss - ENTROPY * bonus
                loss.backward()
                for name, term in (("policy", policy), ("value", weight * value), ("kl", KL * kl)):
                    terms[name] += float((term * m).sum()) / total
                terms["entropy"] -= ENTROPY * float(bonus)
                fraction += float((clipped & m).sum()) / total
                tokens = {
                    "policy_logprobs": logp,
                    "old_logprobs": grid["old"],
                    "ref_logprobs": grid["ref"],
                    "entropy_nats": entropy,
                    "losses": losses,
                    "advantages": a,
                    "rewards": per_token(b, part, "reward"),
                    "ratios": ratio,
                    "clipped": clipped & m,
                }
                log.note(counts=counts(b), tokens=grids(b) | tokens)
            log.note(metrics={f"loss/{k}": v for k, v in terms.items()} | {"ppo/clip_fraction": fraction})
            log.take()
            if run.has("clip_by_value"):
                if log.recorder is not None:
                    log.recorder.take_gradients()
                torch.nn.utils.clip_grad_value_(model.parameters(), BOUND)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            optimizer.step()
            optimizer.zero_grad()
    return log.close()
