"""GSPO on packed rows with a gate for the sampler; two ranks by turns, whose gradients are averaged by hand."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from common import VOCAB, Doc, Log, Rows, Run, Text, causal, fill, logprobs, padded

CLIP, GATE = 0.05, (0.7, 1.4)


def build(run: Run) -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(run.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.18,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=run.get("attention", "sdpa"),
    )
    model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16) if run.bf16 else model


def pack(run: Run, docs: list[Doc], width: int) -> list[list[tuple[int, Doc]]]:
    """Documents in rows, longest first, each in the first row that has room."""
    lines: list[list[tuple[int, Doc]]] = []
    ends: list[int] = []
    for doc in sorted(docs, key=lambda d: -len(d.ids)):
        if run.has("cut_documents"):
            place = len(ends) - 1 if ends and ends[-1] < width else None
        else:
            place = next((i for i, end in enumerate(ends) if end + len(doc.ids) <= width), None)
        if place is None:
            lines.append([])
            ends.append(0)
            place = len(ends) - 1
        lines[place].append((ends[place], doc))
        ends[place] += len(doc.ids)
    return lines


def call(run: Run, model: LlamaForCausalLM, rows: Rows) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the tokens of packed rows."""
    mask = causal(rows.documents, across=run.has("attention_across"))[:, None]
    if run.get("attention", "sdpa") == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
    logits = model(input_ids=rows.ids, position_ids=rows.positions, attention_mask=mask, use_cache=False).logits
    return logprobs(logits, rows.ids)


@torch.no_grad()
def sample(run: Run, model: LlamaForCausalLM, step: int) -> list[Doc]:
    """Responses as the sampler saw them, with rewards and advantages."""
    text = Text(run.seed * 10 + step)
    docs = [doc for g in range(4) for doc in text.group(3 * g, g, 3, 18)]
    rows = padded(docs)
    logits = model(
        input_ids=rows.ids,
        position_ids=rows.positions,
        attention_mask=causal(rows.documents)[:, None],
        use_cache=False,
    ).logits
    rows.gather("sampler", logprobs(logits, rows.ids)[0])
    for doc in docs:
        doc.values["sampler"] = doc.values["sampler"] + 0.25 * torch.tensor(doc.noise, dtype=torch.float32)
        mean = sum(d.reward for d in docs if d.group == doc.group) / 3
        doc.values.update(reward=doc.reward, advantage=doc.reward - mean)
    return docs


def packed(run: Run):
    """Run three steps; the sampler's weights are one update behind."""
    policy = build(run)
    sampler = copy.deepcopy(policy).requires_grad_(False)
    sampler.config._attn_implementation = "sdpa"
    behind = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3, momentum=0.9, nesterov=not run.has("nesterov_off"))
    ranks, width = run.get("ranks", 2), run.get("width", 44)
    context = {
        "dp": ranks,
        "temperature": 1.0,
        "max_grad_norm": 1.0,
        "clip": CLIP,
        "gate": list(GATE),
        "denominator": "documents",
        "packed_length": width,
        "nesterov": True,
    }
    log = Log(run, policy, optimizer, context)
    for step in range(3):
        docs = run.permuted(sample(run, sampler, step), step)
        lines = pack(run, docs, width)
        if run.has("advantage_order"):
            given = [d.values["advantage"] for d in docs]
            for doc, value in zip([d for line in lines for _, d in line], given, strict=True):
                doc.values["advantage"] = value
        total: dict[str, Tensor] = {}
        for rank in range(ranks):
            mine = lines[len(lines) * rank // ranks : len(lines) * (rank + 1) // ranks]
            for line in mine:
                here = sum(len(x) for x in mine) * ranks if run.has("rank_means") else len(docs)
                row(run, log, policy, behind, fill([line], width), here, ranks)
            for name, p in policy.named_parameters():
                total[name] = total.get(name, 0) + p.grad
            policy.zero_grad()
        for name, p in policy.named_parameters():
            p.grad = total[name] / ranks
        sampler.load_state_dict(policy.state_dict())
        behind.load_state_dict(policy.state_dict())
        log.keep()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return log.done()


def row(
    run: Run, log: Log, policy: LlamaForCausalLM, behind: LlamaForCausalLM, rows: Rows, docs: int, ranks: int
) -> None:
    """Back-propagate one packed row; `docs` is the denominator over all ranks."""
    policy_logs, entropy = call(run, policy, rows)
    with torch.no_grad():
        old, _ = call(run, behind, rows)
    sampler = torch.where(rows.trained, rows.spread("sampler"), old)
    if run.has("mask_unshifted"):
        rows.trained = rows.trained.roll(1, 1) & rows.real
        rows.trained[:, 0] = False
    mask, advantage = rows.trained, rows.spread("advantage")
    ratio, length = torch.ones_like(old), torch.ones_like(old)
    change = policy_logs - old
    for doc in rows.docs:
        own = rows.documents == doc.number
        some = mask if run.has("ratio_row") else own & mask
        count = some.sum().clamp(min=1)
        mean = torch.where(some, change, 0.0).sum() / (1 if run.has("ratio_sum") else count)
        ratio = torch.where(own, mean.exp(), ratio)
        length = torch.where(own, (own & mask).sum().clamp(min=1).float(), length)
    plain, bound = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
    weight = (old - sampler).exp()
    inside = (weight >= GATE[0]) & (weight <= GATE[1])
    weight = weight.clamp(*GATE) if run.has("gate_clamp") else weight * inside
    losses = -torch.min(plain, bound) * weight
    loss = (losses * mask / length).sum() / docs * ranks
    loss.backward()
    places = torch.arange(rows.ids.shape[1]).expand_as(rows.ids)
    log.note(
        loss.detach() / ranks,
        counts=rows.counts(),
        tokens={
            **rows.names(),
            "trained": mask,
            "places": places,
            "policy_logprobs": policy_logs,
            "old_logprobs": old,
            "sampler_logprobs": sampler,
            "entropy_nats": entropy,
            "losses": losses,
            "advantages": advantage,
            "rewards": rows.spread("reward"),
            "ratios": ratio,
            "clipped": bound < plain,
        },
    )
