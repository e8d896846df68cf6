"""Cases of the experiment: a trainer's decoder, a sampler of its own code, and causes planted between the two.

The sampler draws with a cache, in left-padded batches, and records what it computes there; or it scores its completions
again in one pass, in right-padded batches under a mask. Neither shares code with `workbench.mismatch`.

Letters: N completions | C tokens of one | V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {"small": (64, 2), "medium": (128, 3), "large": (256, 4)}
"""Name -> hidden size and layers: 0.1, 0.8 and 4 million parameters of a dense decoder."""
VOCABULARY = 61
PROMPTS = (4, 12)
E4M3 = torch.float8_e4m3fn


def decoder(kind: str, size: str, seed: int) -> Any:
    """Return a decoder with weights drawn from a seed: qwen3, llama or moe."""
    hidden, layers = SIZES[size]
    torch.manual_seed(seed)
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.6 / hidden**0.5,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shared)).eval()
    if kind == "moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=hidden // 4, **more, **shared)).eval()
    return Qwen3ForCausalLM(Qwen3Config(head_dim=hidden // 4, **shared)).eval()


def moved(model: Any, seed: int, amount: float = 0.02) -> Any:
    """Return another checkpoint: each matrix moved by a share of its own spread."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * amount)
    return other


def prompts(
    count: int, seed: int, *, vocabulary: int = VOCABULARY, tokens: tuple[int, int] = PROMPTS
) -> list[list[int]]:
    """Draw prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*tokens, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Engine:
    """A sampler.

    Attributes:
        model: its own weights, in its own dtype.
        temperature, top_k, top_p, min_p: of its draws.
        values: "raw", "scaled" or "processed".
        again: score the completions in one pass of a row, instead of recording what the draws had.
    """

    model: Any
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    values: str = "processed"
    again: bool = False

    @torch.no_grad()
    def draw(self, rows: Sequence[Sequence[int]], tokens: int, seed: int) -> list[tuple[list[int], list[float]]]:
        """Draw a completion of each prompt: ids, and the values that are recorded of them."""
        device, longest = self.model.device, max(map(len, rows))
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        positions, cache, drawn, values = (mask.cumsum(1) - 1).clamp(min=0), None, [], []
        for _ in range(tokens):
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache, logits_NV = output.past_key_values, output.logits[:, -1].float()
            kept_NV = self._kept(logits_NV)
            token_N1 = torch.multinomial(torch.softmax(kept_NV, -1), 1, generator=generator)
            drawn.append(token_N1[:, 0])
            values.append(self._values(logits_NV, kept_NV, token_N1))
            ids, positions = token_N1, positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        completions = torch.stack(drawn, 1).tolist()
        nats = self._score(rows, completions) if self.again else torch.stack(values, 1).tolist()
        return list(zip(completions, nats, strict=True))

    def _score(self, rows: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        whole = [[*row, *own] for row, own in zip(rows, completions, strict=True)]
        longest = max(map(len, whole))
        device = self.model.device
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in whole], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in whole], device=device)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        nats = []
        for number, (row, own) in enumerate(zip(rows, completions, strict=True)):
            logits_CV = logits[number, len(row) - 1 : len(row) + len(own) - 1]
            own_C1 = torch.tensor(own, device=device)[:, None]
            nats.append(self._values(logits_CV, self._kept(logits_CV), own_C1).tolist())
        return nats

    def _kept(self, logits_NV: Tensor) -> Tensor:
        scaled_NV = logits_NV / self.temperature
        if self.min_p:
            shares_NV = torch.softmax(scaled_NV, -1)
            scaled_NV = scaled_NV.masked_fill(shares_NV < self.min_p * shares_NV.amax(-1, keepdim=True), -torch.inf)
        if self.top_k:
            least_N1 = scaled_NV.topk(self.top_k, -1).values[:, -1:]
            scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
        if self.top_p < 1:
            sorted_NV, order_NV = torch.softmax(scaled_NV, -1).sort(-1, descending=True)
            dropped_NV = (sorted_NV.cumsum(-1) - sorted_NV) >= self.top_p
            scaled_NV = scaled_NV.masked_fill(torch.zeros_like(dropped_NV).scatter(1, order_NV, dropped_NV), -torch.inf)
        return scaled_NV

    def _values(self, logits_NV: Tensor, kept_NV: Tensor, token_N1: Tensor) -> Tensor:
        own_NV = {"raw": logits_NV, "scaled": logits_NV / self.temperature, "processed": kept_NV}[self.values].clone()
        if self.values == "processed":
            own_NV.scatter_(1, token_N1, (logits_NV / self.temperature).gather(1, token_N1))
        return torch.log_softmax(own_NV, -1).gather(1, token_N1)[:, 0]


# ---- samplers that are wrong -----------------------------------------------------------------------------


class _Head(nn.Module):
    """An output head in another dtype."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD.detach().to(dtype), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits in the head's dtype."""
        logits: Tensor = hidden.to(self.weight.dtype) @ self.weight.T
        return logits


def with_head(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy whose head computes in a dtype."""
    other = copy.deepcopy(model)
    other.lm_head = _Head(model.lm_head.weight, dtype)
    return other


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Return a copy in a dtype, as a checkpoint that is loaded in it: rotary frequencies stay in float32."""
    other = copy.deepcopy(model).to(dtype)
    for part, before in zip(other.modules(), model.modules(), strict=True):
        if hasattr(part, "inv_freq"):
            part.inv_freq = before.inv_freq.clone()
    return other


def with_attention(model: Any, name: str) -> Any:
    """Return a copy with another attention of transformers."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other


def fp8_weights(model: Any, by_channel: bool) -> Any:
    """Return a copy with the weights of all linear layers but the head on the grid of e4m3."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in other.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                weight = layer.weight.float()
                largest = weight.abs().amax(1, keepdim=True) if by_channel else weight.abs().amax()
                scale = largest / 448
                layer.weight.copy_((weight / scale).to(E4M3).float() * scale)
    return other


def fewer_experts(model: Any) -> Any:
    """Return a copy whose routers choose one expert fewer."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if type(module).__name__.endswith("Router"):
            module.top_k -= 1
    return other


def write_adapter(
    model: Any, folder: Path, *, rank: int = 4, alpha: float = 8.0, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write a LoRA adapter of attention in peft's files, and return its factors by layer."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("q_proj", "v_proj", "o_proj")):
            down = 0.1 * torch.randn(rank, layer.in_features, generator=generator)
            factors[name] = (down, 0.05 * torch.randn(layer.out_features, rank, generator=generator))
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{n}.lora_{k}.weight": v
        for n, both in factors.items()
        for k, v in zip("AB", both, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return factors


def merged(model: Any, factors: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> Any:
    """Return a copy with an adapter merged into its weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, (down, up) in factors.items():
            other.get_submodule(name).weight.add_(scale * (up @ down))
    return other


# ---- cases -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A record with what was planted in it.

    Attributes:
        name: of the case.
        factors: that were planted, by the names of `workbench.mismatch`; () in a clean case.
        trainer, sampler: arguments of `wb.attribute`.
    """

    name: str
    factors: tuple[str, ...]
    trainer: Mapping[str, Any]
    sampler: Mapping[str, Any]


@dataclass
class Bench:
    """A trainer's decoder, and everything that cases are made of.

    Attributes:
        kind, size: of the decoder.
        folder: for an adapter.
        count, tokens: completions of a case, and their length.
        temperature: that both sides know.
    """

    kind: str
    size: str
    folder: Path
    count: int = 12
    tokens: int = 16
    temperature: float = 0.8
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = decoder(self.kind, self.size, 1)
        self.half = in_dtype(self.model, torch.bfloat16)
        self.old = moved(self.model, 5)
        self.rows = prompts(self.count, 2)
        self.factors = write_adapter(self.model, self.folder / f"{self.kind}_{self.size}")
        self.trainer = {"model": self.model, "temperature": self.temperature}

    def records(
        self, engine: Engine, rows: Sequence[Sequence[int]] | None = None, seed: int = 3
    ) -> list[dict[str, Any]]:
        """Records of a sampler, which has other prompts than those that are recorded if ``rows`` says so."""
        drawn = engine.draw(rows or self.rows, self.tokens, seed)
        return [
            {"prompt_ids": row, "completion_ids": ids, "sampler_logprobs": nats}
            for row, (ids, nats) in zip(self.rows, drawn, strict=True)
        ]

    def engine(self, model: Any = None, **settings: Any) -> Engine:
        """A sampler of the trainer's weights, or of others."""
        return Engine(self.model if model is None else model, **{"temperature": self.temperature, **settings})

    def case(self, name: str, factors: Sequence[str], records: Any, *, trainer: Any = (), **sampler: Any) -> Case:
        """A case of this trainer."""
        whole = f"{self.kind} {self.size}: {name}"
        return Case(whole, tuple(factors), {**self.trainer, **dict(trainer)}, {"rollouts": records, **sampler})


def singles(bench: Bench) -> dict[str, Callable[[], Case]]:
    """Cases of one cause, by name."""
    b, half, engine, records = bench, bench.half, bench.engine, bench.records
    low = {"precision": "bfloat16"}
    older = {"older": {"step_1": b.old}}
    adapter = {"adapter": b.folder / f"{b.kind}_{b.size}"}
    shifted = [[*row[1:]] for row in b.rows]
    cases: dict[str, Callable[[], Case]] = {
        "stale": lambda: b.case("stale", ["stale weights"], records(engine(b.old)), trainer=older),
        "temperature": lambda: b.case("temperature", ["temperature"], records(engine(half, temperature=0.9)), **low),
        "top_p": lambda: b.case("top_p", ["truncation"], records(engine(top_p=0.9))),
        "raw": lambda: b.case("raw", ["log-probability mode"], records(engine(half, values="raw")), **low),
        "head": lambda: b.case("head", ["head precision"], records(engine(with_head(b.model, torch.bfloat16)))),
        "trunk": lambda: b.case("trunk", ["trunk precision"], records(engine(half))),
        "attention": lambda: b.case(
            "attention", ["attention kernel"], records(engine(with_attention(half, "eager"), again=True)), **low
        ),
        "dropped": lambda: b.case("adapter dropped", ["LoRA merge"], records(engine()), trainer=adapter),
        "offset": lambda: b.case("offset", ["offset by one"], _offset(records(engine(half))), **low),
        "prefix": lambda: b.case("prefix", ["wrong prefix"], records(engine(half), shifted), **low),
        "tokens": lambda: b.case("sampler_ids", ["tokenisation"], _retokenized(records(engine()))),
    }
    if b.kind == "moe":
        cases["experts"] = lambda: b.case("experts", ["routes"], records(engine(fewer_experts(b.model))))
    else:
        cases["fp8"] = lambda: b.case("fp8", ["FP8"], records(engine(fp8_weights(b.model, True))))
    return cases


def pairs(bench: Bench) -> dict[str, Callable[[], Case]]:
    """Cases of two causes, by name."""
    b, half, engine, records = bench, bench.half, bench.engine, bench.records
    low = {"precision": "bfloat16"}
    older = {"older": {"step_1": b.old}}
    adapter = {"adapter": b.folder / f"{b.kind}_{b.size}"}
    shifted = [[*row[1:]] for row in b.rows]
    cases: dict[str, Callable[[], Case]] = {
        "stale, temperature": lambda: b.case(
            "stale, temperature",
            ["stale weights", "temperature"],
            records(engine(b.old, temperature=0.9)),
            trainer=older,
        ),
        "offset, trunk": lambda: b.case(
            "offset, trunk", ["offset by one", "trunk precision"], _offset(records(engine(half, again=True)))
        ),
        "prefix, temperature": lambda: b.case(
            "prefix, temperature",
            ["wrong prefix", "temperature"],
            records(engine(half, temperature=1.0), shifted),
            **low,
        ),
        "raw, head": lambda: b.case(
            "raw, head",
            ["log-probability mode", "head precision"],
            records(engine(with_head(b.model, torch.bfloat16), values="raw", again=True)),
        ),
        "adapter, top_k": lambda: b.case(
            "adapter, top_k", ["LoRA merge", "truncation"], records(engine(top_k=10)), trainer=adapter
        ),
    }
    if b.kind != "moe":
        cases["fp8, prefix"] = lambda: b.case(
            "fp8, prefix", ["FP8", "wrong prefix"], records(engine(fp8_weights(half, True)), shifted), **low
        )
    return cases


def clean(bench: Bench, number: int) -> Case:
    """A case without a cause: settings, batches and lengths are drawn, and stated as they are."""
    generator = torch.Generator().manual_seed(1000 + number)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    dtype, temperature = one_of("float32", "bfloat16", "bfloat16", "float16"), one_of(0.6, 0.8, 1.0)
    top_p, values, again = one_of(1.0, 1.0, 0.9), one_of("processed", "processed", "scaled", "raw"), one_of(True, False)
    attention = one_of("sdpa", "sdpa", "eager")
    bench = copy.copy(bench)
    bench.count, bench.tokens = one_of(8, 10, 12), one_of(8, 12, 16)
    bench.rows = prompts(bench.count, 5000 + number)
    model = with_attention(in_dtype(bench.model, getattr(torch, dtype)), attention)
    engine = Engine(model, temperature=temperature, top_p=top_p, values=values, again=again)
    stated = {
        "precision": dtype,
        "temperature": temperature,
        "top_p": top_p,
        "logprobs": values,
        "attention": attention,
    }
    name = f"clean {number}: {dtype}, {attention}, {values}, top_p {top_p:g}, {'one pass' if again else 'cache'}"
    return bench.case(name, (), bench.records(engine, seed=7000 + number), **stated)


def _offset(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each token with the value of the next one; the last one keeps its own."""
    return [{**one, "sampler_logprobs": [*one["sampler_logprobs"][1:], one["sampler_logprobs"][-1]]} for one in records]


def _retokenized(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trainer reads one other token in the middle; the engine's own ids are recorded."""
    changed = []
    for one in records:
        ids = list(one["completion_ids"])
        ids[len(ids) // 2] = (ids[len(ids) // 2] + 1) % VOCABULARY
        changed.append({**one, "completion_ids": ids, "sampler_ids": one["completion_ids"]})
    return changed
