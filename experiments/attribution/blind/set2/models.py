"""Six decoders: two families of mixtures and three dense ones, with seeded weights, three versions and an adapter each.

The head has the successors of every token planted on a noisy background, so that distributions are neither flat nor
certain. ``v5``, ``v6`` and ``v7`` (the trainer's) are a gradient step apart, scaled to move a token by ``STEP`` nats.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Olmo2Config, OlmoeConfig, Phi3Config, Qwen2MoeConfig, StableLmConfig

PAD, BOS, EOS = 0, 1, 2
STEP = 0.15  # nats that a token moves from one version to the next

COMMON = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": 512}
CONFIGS = {
    "pebble": StableLmConfig(
        vocab_size=400, hidden_size=96, intermediate_size=240, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, use_qkv_bias=True, partial_rotary_factor=0.5, **COMMON),
    "gravel": OlmoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, **COMMON),
    "creek": Olmo2Config(
        vocab_size=1000, hidden_size=256, intermediate_size=640, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, **COMMON),
    "delta": Qwen2MoeConfig(
        vocab_size=800, hidden_size=192, intermediate_size=256, moe_intermediate_size=192,
        shared_expert_intermediate_size=256, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, **COMMON),
    "ridge": Phi3Config(
        vocab_size=1600, hidden_size=448, intermediate_size=1216, num_hidden_layers=8, num_attention_heads=7,
        num_key_value_heads=7, **(COMMON | {"original_max_position_embeddings": 512})),
    "massif": OlmoeConfig(
        vocab_size=2000, hidden_size=320, intermediate_size=256, num_hidden_layers=6, num_attention_heads=5,
        num_key_value_heads=5, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True, **COMMON),
}  # fmt: skip
PLANTED = {"pebble": 6.0, "gravel": 5.5, "creek": 10.0, "delta": 9.0, "ridge": 15.0, "massif": 12.0}
ADAPTERS = {
    "pebble": (["q_proj", "v_proj"], 4, 12),
    "gravel": (["q_proj", "o_proj"], 4, 8),
    "creek": (["q_proj", "k_proj", "v_proj", "o_proj"], 8, 16),
    "delta": (["q_proj", "v_proj"], 4, 4),
    "ridge": (["qkv_proj", "o_proj"], 8, 24),
    "massif": (["v_proj", "o_proj"], 8, 16),
}  # modules, rank, alpha


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class Language:
    """The tokens of a model: syllables that start a word, that follow, and whole words; who follows whom."""

    texts: list[str]
    followers: torch.Tensor  # [ids, 8]
    words: dict[str, int]

    def walk(self, length: int, generator: torch.Generator) -> list[int]:
        """Return a text of drawn followers."""
        at = int(torch.randint(3, len(self.texts), (1,), generator=generator))
        ids = [at]
        weights = torch.tensor([2.0**-i for i in range(self.followers.shape[1])])
        while len(ids) < length:
            at = int(self.followers[at, int(torch.multinomial(weights, 1, generator=generator))])
            ids.append(at)
        return ids

    def merged(self, ids: list[int]) -> list[int]:
        """Return the ids of the same text, the longest token first."""
        text, out = "".join(self.texts[i] for i in ids), []
        while text:
            end = next(n for n in range(min(len(text), 8), 0, -1) if text[:n] in self.words)
            out.append(self.words[text[:end]])
            text = text[end:]
        return out

    def split(self, ids: list[int]) -> list[int]:
        """Return the ids of the same text by a tokeniser that lacks a third of the whole words."""
        out: list[int] = []
        for i in ids:
            text = self.texts[i]
            lacks = len(text) == 7 and i % 3 == 0
            out += [self.words[text[:4]], self.words[text[4:]]] if lacks else [i]
        return out


def language(name: str) -> Language:
    vocabulary = CONFIGS[name].vocab_size
    g = torch.Generator().manual_seed(seed_of(f"language {name}"))
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in "lnrs"]
    order = torch.randperm(len(syllables), generator=g).tolist()
    parts = vocabulary // 8
    syllables = [syllables[i] for i in order[:parts]]
    texts = ["<p>", "<b>", "<e>", *[f" {s}" for s in syllables], *syllables]
    first, second = 3, 3 + parts
    followers = torch.empty(vocabulary, 8, dtype=torch.long)
    for s in range(parts):
        followers[first + s] = second + torch.randperm(parts, generator=g)[:8]
    taken = set()
    while len(texts) < vocabulary:  # a third of the words are those of syllables that follow one another
        s = int(torch.randint(parts, (1,), generator=g))
        t = int(torch.randint(parts, (1,), generator=g))
        if len(texts) % 3 == 0:
            t = int(followers[first + s, int(torch.randint(4, (1,), generator=g))]) - second
        if (s, t) not in taken:
            taken.add((s, t))
            texts.append(f" {syllables[s]}{syllables[t]}")
    begins = torch.tensor([*range(first, first + parts), *range(second + parts, vocabulary)])
    starts = begins[:parts]
    for i in [0, 1, 2, *range(second, vocabulary)]:
        many = torch.randperm(len(begins), generator=g)[:8]
        followers[i] = begins[many]
        followers[i, ::2] = starts[torch.randperm(parts, generator=g)[:4]]
    return Language(texts, followers, {text: i for i, text in enumerate(texts)})


@torch.no_grad()
def seeded(name: str) -> torch.nn.Module:
    """Return a model with seeded weights and the followers of its language planted in the head."""
    config = CONFIGS[name]
    torch.manual_seed(seed_of(f"weights {name}"))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    g = torch.Generator().manual_seed(seed_of(f"values {name}"))

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=g) * std

    for key, weight in model.named_parameters():
        if "embed" in key:
            weight.copy_(normal(weight, 1.0))
        elif "lm_head" in key:
            continue
        elif weight.dim() == 1 and key.endswith("bias"):
            weight.copy_(normal(weight, 0.1))
        elif weight.dim() == 1:
            base = 0.35 if name == "creek" and "post_" in key else 1.0
            weight.copy_(base * (1 + normal(weight, 0.1)))
        else:
            gain = 2.0 if key.endswith("mlp.gate.weight") else 1.4 if "q_proj" in key or "qkv" in key else 0.9
            weight.copy_(normal(weight, gain / weight.shape[-1] ** 0.5))
    embedding = model.get_input_embeddings().weight
    width = embedding.shape[1]
    head = normal(embedding, 1.1 / width**0.5)
    unit = embedding / embedding.norm(dim=1, keepdim=True) * (PLANTED[name] / width**0.5)
    lang = language(name)
    for rank in range(8):
        head.index_add_(0, lang.followers[:, rank], unit * (1 - 0.09 * rank))
    model.lm_head.weight.copy_(head)
    return model.eval()


def step(model: torch.nn.Module, texts: torch.Tensor, others: torch.Tensor, generator: torch.Generator) -> None:
    """Take a policy-gradient step on the model's own draws after texts, scaled to move others by ``STEP``."""
    weights = [w for w in model.parameters() if w.requires_grad]
    before = model(input_ids=texts).logits.log_softmax(-1)
    shares = before.detach().exp()
    drawn = torch.multinomial(shares.flatten(0, 1), 1, generator=generator).view(*texts.shape, 1)
    advantages = torch.randn(len(texts), 1, generator=generator)
    gain = (before.gather(-1, drawn)[..., 0] * advantages).mean()
    grads = torch.autograd.grad(gain, weights, allow_unused=True)
    moves = [
        (w, grad / (grad.abs() + grad.abs().mean() + 1e-12) * w.detach().std())
        for grad, w in zip(grads, weights, strict=True)
        if grad is not None
    ]
    scale, applied = 0.01, 0.0
    with torch.no_grad():
        before = model(input_ids=others).logits.log_softmax(-1)
        for _ in range(3):
            for w, move in moves:
                w.add_(move, alpha=scale - applied)
            applied = scale
            after = model(input_ids=others).logits.log_softmax(-1)
            scale = applied * STEP / float((before.exp() * (after - before).abs()).sum(-1).mean())


def write_models(folder: Path, names: list[str] | None = None) -> None:
    """Write each model's versions, adapter and vocabulary."""
    for name in names or CONFIGS:
        at = folder / name
        model, lang = seeded(name), language(name)
        g = torch.Generator().manual_seed(seed_of(f"texts {name}"))
        texts = torch.tensor([lang.walk(24, g) for _ in range(16)])
        model.save_pretrained(at / "v5")
        for version in ("v6", "v7"):
            step(model, texts[:10], texts[10:], g)
            model.save_pretrained(at / version)
        write_adapter(name, model, at / "adapter")
        (at / "vocabulary.json").write_text(json.dumps(lang.texts))


def write_adapter(name: str, model: torch.nn.Module, folder: Path) -> None:
    """Write a LoRA adapter with seeded A and B, as PEFT saves it."""
    from peft import LoraConfig, get_peft_model

    modules, rank, alpha = ADAPTERS[name]
    wrapped = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM"))
    g = torch.Generator().manual_seed(seed_of(f"adapter {name}"))
    with torch.no_grad():
        for key, weight in wrapped.named_parameters():
            if "lora_A" in key:
                weight.copy_(torch.randn(weight.shape, generator=g) / weight.shape[1] ** 0.5)
            elif "lora_B" in key:
                weight.copy_(torch.randn(weight.shape, generator=g) * 0.05)
    wrapped.save_pretrained(folder)
