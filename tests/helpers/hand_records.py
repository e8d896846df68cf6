"""Synthetic records, for what `diagnose` must detect in them."""

from __future__ import annotations

from dataclasses import replace

import torch

from workbench.diagnose.record import Record, RecordedStep

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
CONTEXT = {"dp": 3, "cp": 2, "tp": 7, "micro_batches": 5, "temperature": 0.8, "precision": "float64"}
COUNTS = {
    "documents": 11.0,
    "masked_documents": 2.0,
    "trained_tokens": 130.0,
    "all_tokens": 170.0,
    "padded_tokens": 210.0,
    "micro_batches": 5.0,
}


def gradients(seed: int = 0) -> dict[str, torch.Tensor]:
    """One gradient a parameter, all of one size."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, generator=generator, dtype=torch.float64) for name in NAMES}


def tokens() -> dict[str, torch.Tensor]:
    """Three documents of six tokens in one row, cut over two ranks; the last four of each train, of the third three."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(18)
    logprobs = -torch.rand(18, generator=generator, dtype=torch.float64)
    return {
        "documents": index // 6,
        "positions": index % 6,
        "trained": (index % 6 > 1) & (index < 17),
        "rows": torch.zeros(18).long(),
        "places": index - 1,
        "shards": (index > 10).long(),
        "policy_logprobs": logprobs,
        "old_logprobs": logprobs + 0.1,
        "entropy_nats": torch.rand(18, generator=generator, dtype=torch.float64),
        "losses": torch.rand(18, generator=generator, dtype=torch.float64),
    }


def make_record(context=None, *, scale=1.0, changes=None, **step) -> Record:
    """A record of one step.

    Args:
        context: over `CONTEXT`.
        scale: of the gradient.
        changes: parameter -> its gradient instead.
        step: fields of the step, instead of the usual ones.
    """
    whole = {name: values * scale for name, values in gradients().items()} | (changes or {})
    fields = {
        "loss": 0.25,
        "metrics": {"loss/policy": 0.2, "loss/kl": 0.05, "ratio/policy_old/mean": 1.0},
        "counts": COUNTS,
        "gradients": whole,
        "tokens": tokens(),
        "gradient_norms": {name: float(values.norm()) for name, values in whole.items()},
    } | step
    return Record(CONTEXT | (context or {}), (RecordedStep(0, **fields),), "made")


def norms_alone(record: Record) -> Record:
    """Return the losses and norms that a trainer without our recorder could report."""
    return replace(record, steps=tuple(replace(step, gradients={}, tokens={}, metrics={}) for step in record.steps))


def changed(names, factor):
    """These parameters' gradients, times a factor."""
    return {name: values * factor for name, values in gradients().items() if any(part in name for part in names)}


def mixed(names):
    """These parameters' gradients, turned elsewhere."""
    other = gradients(9)
    return {name: 0.3 * values + other[name] for name, values in gradients().items() if any(p in name for p in names)}


def values(**by_name):
    """The tokens, with functions applied to their values by name."""
    return tokens() | {name: function(tokens()[name]) for name, function in by_name.items()}


def put(where, number):
    """A function that puts a number at some tokens."""

    def function(values_S):
        out = values_S.clone()
        out[where] = number
        return out

    return function


METRICS = {"loss/policy": 0.2, "loss/kl": 0.05, "ratio/policy_old/mean": 1.0}
ENTROPY = tokens()["policy_logprobs"] + tokens()["entropy_nats"]
