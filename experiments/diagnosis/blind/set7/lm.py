"""Language modelling with a small Llama of transformers on two simulated data-parallel ranks, with z-loss."""

from __future__ import annotations

import torch
from common import EOS, PAD, VOCAB, Run, chunks, counts_of, dealt, in_order, initialise, padded, where_of, write_docs
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, DOCS, RANKS, MICRO, Z = 3, 12, 2, 3, 0.02


def build(run: Run) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0 if run.bug("rope_base") else 500.0},
        tie_word_embeddings=True,
        attn_implementation=run.get("kernel", "sdpa"),
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    initialise(model, run.seed)
    if run.bug("head_untied"):
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return run.weights(model)


def groups_of(run: Run, model: nn.Module) -> list[dict[str, object]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    if run.bug("norms_decayed"):
        return [{"params": decay + rest, "weight_decay": 0.1}]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def losses_of(run: Run, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-probability and z-loss of each token."""
    logits = logits[:, :-1]
    if run.bug("softmax_in_half"):
        logits = logits.bfloat16()
        logp = logits.log_softmax(-1).float()
    else:
        logits = logits.float()
        logp = logits.log_softmax(-1)
    z = logits.logsumexp(-1).float()
    nll = -logp.gather(-1, ids[:, 1:, None])[..., 0]
    if run.get("logprobs", "log_softmax") == "logsumexp":
        nll = z - logits.gather(-1, ids[:, 1:, None])[..., 0]
    penalty = z if run.bug("z_loss_not_squared") else z**2
    return nn.functional.pad(nll, (1, 0)), nn.functional.pad(Z * penalty, (1, 0))


def train(run: Run) -> None:
    ranks, micro = run.get("ranks", RANKS), run.get("micro", MICRO)
    model = build(run)
    optimizer = torch.optim.AdamW(
        groups_of(run, model), lr=8e-3, betas=(0.9, 0.98), eps=1e-6, foreach=run.get("foreach", True)
    )
    recorder = run.recorder(
        model,
        optimizer,
        dp=ranks,
        micro_batches=-(-DOCS // ranks // micro),
        max_grad_norm=1.0,
        denominator="tokens of the step",
        z_loss=Z,
    )
    for step in range(STEPS):
        index = 0 if run.bug("resumed_at_first_batch") and step == 2 else step
        docs = in_order(run, write_docs(run.seed, index, DOCS, prompt=(1, 1), answer=(8, 16)))
        shards = dealt(docs, ranks)
        if run.bug("same_shard"):
            shards = [shards[0]] * ranks
        tokens = sum(len(d) - 1 for shard in shards for d in shard)
        optimizer.zero_grad()
        sums = {"nll": 0.0, "z": 0.0}
        for shard in shards:
            for docs_here in chunks(shard, micro):
                batch = padded(docs_here, multiple=run.get("multiple", 1))
                trained = batch.real & (batch.places > 0)
                logits = model(input_ids=batch.ids, attention_mask=batch.real.long()).logits
                nll, penalty = losses_of(run, logits, batch.ids)
                # as under DDP: gradients of ranks are averaged, so each multiplies its share by the ranks
                loss = run.add((nll + penalty) * trained) / tokens * ranks
                loss.backward()
                sums["nll"] += run.add(nll * trained).item() / tokens
                sums["z"] += run.add(penalty * trained).item() / tokens
                if run.rich:
                    noted = where_of(batch) | {
                        "policy_logprobs": -nll,
                        "losses": nll + penalty,
                        "trained": trained,
                    }
                    recorder.note(loss / ranks, counts=counts_of(batch, trained), tokens=noted)
                else:
                    recorder.note(loss / ranks)
        if not run.bug("summed_over_ranks"):
            for p in model.parameters():
                p.grad.div_(ranks)
        run.seen(model, sums["nll"] + sums["z"])
        if run.rich:
            recorder.note(metrics={"loss/nll": sums["nll"], "loss/z": sums["z"]})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    recorder.close()
