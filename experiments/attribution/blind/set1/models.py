"""Checkpoints: seeded decoders of four families in three sizes, trained for a few steps on text of a Markov chain."""

from __future__ import annotations

import itertools
import json
import math
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine import Shape
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD, BOS, EOS = 0, 1, 2
FIRST = 4  # the first id that is text
RANK, ALPHA = 8, 16


@dataclass
class Plan:
    """How a model is made."""

    family: str
    letters: int
    vocabulary: int
    spread: float  # of the logits at the start
    lr: float
    keep: tuple[str, ...]  # older checkpoints that are written
    config: dict[str, Any]
    adapter: float  # standard deviation of the adapter's B; 0: none
    seed: int


_COMMON = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "max_position_embeddings": 512}
PLANS = {
    "llama-s": Plan(
        "llama", 7, 508, 2.2, 1e-3, ("step_1", "step_2", "step_3"),
        {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32},
        0.02, 11,
    ),
    "moe-s": Plan(
        "qwen3_moe", 8, 600, 3.0, 5e-4, ("step_1", "step_2", "step_3"),
        {"hidden_size": 96, "intermediate_size": 192, "moe_intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 8,
         "num_experts_per_tok": 3, "norm_topk_prob": True},
        0.02, 12,
    ),
    "qwen-m": Plan(
        "qwen3", 11, 1468, 3.9, 2.5e-4, ("step_1", "step_2", "step_3"),
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False},
        0.012, 13,
    ),
    "mix-m": Plan(
        "mixtral", 10, 1120, 3.0, 5e-4, (),
        {"hidden_size": 192, "intermediate_size": 288, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3,
         "sliding_window": None},
        0.012, 14,
    ),
    "llama-l": Plan(
        "llama", 14, 2960, 3.4, 1.5e-4, ("step_2", "step_3"),
        {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 7, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64},
        0.008, 15,
    ),
    "moe-l": Plan(
        "qwen3_moe", 12, 1888, 2.8, 2e-4, ("step_2", "step_3"),
        {"hidden_size": 384, "intermediate_size": 768, "moe_intermediate_size": 304, "num_hidden_layers": 6,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
         "num_experts_per_tok": 3, "norm_topk_prob": True},
        0.0, 16,
    ),
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}


@dataclass
class Model:
    """A model's checkpoints in memory, and what the sampler needs of them."""

    name: str
    folder: Path
    plan: Plan
    shape: Shape
    weights: dict[str, dict[str, Tensor]]  # by step; "now" is the trainer's
    texts: list[str]
    adapter: tuple[dict[str, tuple[Tensor, Tensor]], float, int] | None


def vocabulary(letters: int, size: int) -> list[str]:
    """Return the text of each id: all strings of one to three letters, then some of four."""
    alphabet = string.ascii_lowercase[:letters]
    texts = ["<pad>", "<s>", "</s>", "<unk>"]
    texts += [
        "".join(one) for n in (1, 2, 3, 4) for one in itertools.islice(itertools.product(alphabet, repeat=n), size)
    ]
    return texts[:size]


def _seeded(plan: Plan) -> Any:
    """Return a model with seeded weights whose logits have the plan's spread."""
    config_of, model_of = FAMILIES[plan.family]
    torch.manual_seed(plan.seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = config_of(vocab_size=plan.vocabulary, rope_parameters=rope, **_COMMON, **plan.config)
    model = model_of(config)
    generator = torch.Generator().manual_seed(plan.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
                continue
            gain = 1.0
            if "lm_head" in name:
                gain = plan.spread
            elif "q_proj" in name or "k_proj" in name:
                gain = 1.3
            elif name.endswith("mlp.gate.weight"):
                gain = 1.5
            width = 1.0 if "embed" in name else math.sqrt(parameter.shape[-1])
            parameter.copy_(gain / width * torch.randn(parameter.shape, generator=generator))
    return model


def _text(plan: Plan, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Return documents of a chain in which each id has eight successors."""
    chain = torch.Generator().manual_seed(plan.seed + 1000)
    after = torch.randint(FIRST, plan.vocabulary, (plan.vocabulary, 8), generator=chain)
    ids = [torch.full((rows,), BOS)]
    for _ in range(length - 1):
        ids.append(after[ids[-1], torch.randint(8, (rows,), generator=generator)])
    return torch.stack(ids, 1)


def build(name: str, out: Path) -> Model:
    """Make a model, train it, and write its checkpoints, its vocabulary and its adapter."""
    plan = PLANS[name]
    model = _seeded(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(plan.seed + 2000)
    large = name.endswith("l")
    steps: dict[str, dict[str, Tensor]] = {}
    for step in ("step_1", "step_2", "step_3", "now"):
        for _ in range(1 if large else 3):
            ids = _text(plan, 4 if large else 8, 32, generator)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        if step in plan.keep:
            model.save_pretrained(out / f"{name}-{step}")
        if step in plan.keep or step == "now" or plan.family == "mixtral":
            steps[step] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    model.save_pretrained(out / name)
    texts = vocabulary(plan.letters, plan.vocabulary)
    (out / f"{name}-vocabulary.json").write_text(json.dumps(texts))
    config = model.config
    shape = Shape(
        config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
        plan.config["head_dim"], 10000.0, config.rms_norm_eps,
        plan.config.get("num_experts", plan.config.get("num_local_experts", 0)),
        plan.config.get("num_experts_per_tok", 0), True, plan.family == "mixtral",
    )  # fmt: skip
    return Model(name, out, plan, shape, steps, texts, _adapter(model, plan, out / f"{name}-adapter"))


def _adapter(model: Any, plan: Plan, out: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float, int] | None:
    """Write a seeded LoRA and return its factors by the name of the weight."""
    if not plan.adapter:
        return None
    targets = ["q_proj", "v_proj", "o_proj"]
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(plan.seed + 3000)
    pairs = {}
    with torch.no_grad():
        for key, module in peft.named_modules():
            if key.endswith(("q_proj", "v_proj", "o_proj")) and hasattr(module, "lora_A"):
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                a.copy_(torch.randn(a.shape, generator=generator) / math.sqrt(a.shape[1]))
                b.copy_(torch.randn(b.shape, generator=generator) * plan.adapter)
                pairs[key.removeprefix("base_model.model.") + ".weight"] = (a.clone(), b.clone())
    peft.save_pretrained(out)
    return pairs, ALPHA, RANK
