"""A checkpoint as one side computes it: precision, head, attention, FP8, routes, adapter; passes over rows and batches.

All of it is written for this set on top of transformers' modules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

PAD = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
E4M3 = 448.0  # largest magnitude of float8_e4m3fn


# --- FP8 ----------------------------------------------------------------------------------------------------------
def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Round to e4m3 under a scale, and back to float32."""
    return (x / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float() * scale


def blocks_of(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of each number's block."""
    r, c = x.shape
    padded = F.pad(x.abs(), (0, -c % columns, 0, -r % rows))
    grid = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    most = grid.amax(dim=(1, 3), keepdim=True).expand_as(grid)
    return most.reshape(padded.shape)[:r, :c]


def quantised(x: Tensor, kind: str, weight: bool) -> Tensor:
    """Return a matrix after e4m3 in a format of the guide."""
    x = x.float()
    if kind == "tensorwise":
        most = x.abs().amax().expand_as(x)
    elif kind == "rowwise":
        most = x.abs().amax(dim=-1, keepdim=True).expand_as(x)
    elif kind == "blockwise":
        most = blocks_of(x, 128 if weight else 1, 128)
    else:
        raise ValueError(kind)
    return to_e4m3(x, most.clamp_min(1e-30) / E4M3)


class Fp8Linear(nn.Module):
    """A linear layer with e4m3 weights and activations, products in float32."""

    def __init__(self, layer: nn.Linear, kind: str):
        super().__init__()
        self.kind, self.dtype = kind, layer.weight.dtype
        self.weight, self.bias = quantised(layer.weight.detach(), kind, True), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        flat = quantised(x.reshape(-1, x.shape[-1]), self.kind, False)
        out = (flat @ self.weight.T).reshape(*x.shape[:-1], -1)
        if self.bias is not None:
            out = out + self.bias.float()
        return out.to(self.dtype)


def quantise(model: nn.Module, gemms: str) -> None:
    """Put an FP8 format into a model's linear layers, its head apart."""
    alone = gemms.startswith("fp8_weights_")
    kind = gemms.rsplit("_", 1)[1]
    for path, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            if alone:
                layer.weight.data = quantised(layer.weight.data, kind, True).to(layer.weight.dtype)
            else:
                parent, _, name = path.rpartition(".")
                setattr(model.model.get_submodule(parent), name, Fp8Linear(layer, kind))
        elif alone and hasattr(layer, "gate_up_proj") and isinstance(layer.gate_up_proj, nn.Parameter):
            for weights in (layer.gate_up_proj, layer.down_proj):
                for expert in range(weights.shape[0]):
                    weights.data[expert] = quantised(weights.data[expert], kind, True).to(weights.dtype)


# --- LoRA ---------------------------------------------------------------------------------------------------------
class LoraLinear(nn.Module):
    """W x + s B A x, in the trunk's dtype."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.layer, self.a, self.b, self.scale = layer, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def adapt(model: nn.Module, folder: Path, how: str, masters: Callable[[str], Tensor]) -> None:
    """Put an adapter into a model."""
    if how == "dropped":
        return
    config = json.loads((folder / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = {"alpha": alpha, "alpha / sqrt(r)": alpha / math.sqrt(rank), "1": 1.0, "doubled": 2 * alpha / rank}
    s = float(scale.get(how, alpha / rank))
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a in tensors.items():
        if "lora_A" not in key:
            continue
        path = key.removeprefix("base_model.model.").split(".lora_A")[0]
        b = tensors[key.replace("lora_A", "lora_B")]
        layer = model.get_submodule(path)
        dtype = layer.weight.dtype
        if how == "merged":
            layer.weight.data = (masters(f"{path}.weight") + s * (b @ a)).to(dtype)
        elif how == "merged_rounded":
            layer.weight.data = layer.weight.data + (s * (b @ a)).to(dtype)
        else:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(layer, a.to(dtype), b.to(dtype), s))


# --- routes -------------------------------------------------------------------------------------------------------
def routers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if type(layer).__name__.endswith("TopKRouter")]


def reroute(model: nn.Module, s: dict[str, Any], tape: list[Tensor]) -> None:
    """Give every router its other choice, and record what it chooses."""
    biases = torch.Generator().manual_seed(77)
    bias = {layer: torch.randn(layer.num_experts, generator=biases) * s["bias"] for layer in routers(model)}

    def forward(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, router.hidden_dim)
        dtype = DTYPES[s["router"]] if s["router"] else hidden.dtype
        logits = F.linear(hidden.to(dtype), router.weight.to(dtype))
        shares = logits.float().softmax(-1)
        choice = logits.float() + bias[router]  # of the choice alone
        chosen = choice.topk(router.top_k + s["experts"], dim=-1).indices
        gates = shares.gather(-1, chosen)
        if s["renorm"] if s["renorm"] is not None else router.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)
        tape.append(chosen)
        return logits, gates.to(hidden.dtype), chosen

    for layer in routers(model):
        layer.forward = forward.__get__(layer)


# --- attention ----------------------------------------------------------------------------------------------------
def blocks_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention by blocks of 16 keys with a running softmax in float32; rows begin at position 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).float(), value.repeat_interleave(groups, 1).float()
    n = query.shape[2]
    at = torch.arange(n)
    most = torch.full((*query.shape[:3], 1), -1e30)
    total, out = torch.zeros_like(most), torch.zeros(query.shape)
    for begin in range(0, n, 16):
        k = key[:, :, begin : begin + 16]
        scores = query.float() @ k.transpose(-1, -2) * scaling
        scores = scores.masked_fill(at[None, begin : begin + 16] > at[:, None], -1e30)
        top = torch.maximum(most, scores.amax(-1, keepdim=True))
        shares, keep = (scores - top).exp() * (scores > -1e29), (most - top).exp()
        total, out = total * keep + shares.sum(-1, keepdim=True), out * keep + shares @ value[:, :, begin : begin + 16]
        most = top
    return (out / total).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register("set2_blocks", blocks_attention)
AttentionMaskInterface.register("set2_blocks", sdpa_mask)


# --- engine -------------------------------------------------------------------------------------------------------
KEYS = ("older", "precision", "head", "attention", "gemms", "lora", "router", "experts", "renorm", "bias", "adapter")


class Engine:
    """A checkpoint under a side's settings."""

    def __init__(self, folder: Path, s: dict[str, Any]):
        checkpoint = folder / (s["older"] or "v7")
        dtype = DTYPES[s["precision"]]
        self.model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation=s["attention"], experts_implementation="eager"
        ).eval()
        self.tape: list[Tensor] = []
        masters: dict[str, Tensor] = {}

        def master(key: str) -> Tensor:
            if not masters:
                masters.update(load_file(checkpoint / "model.safetensors"))
            return masters[key]

        if s["adapter"]:
            adapt(self.model, folder / "adapter", s["lora"], master)
        if s["gemms"] != "dense":
            quantise(self.model, s["gemms"])
        reroute(self.model, s, self.tape)
        head = s["head"] or s["precision"]
        weight = self.model.lm_head.weight.detach()
        if head == "float32_masters":
            weight = master("lm_head.weight")
        self.head = weight.to(DTYPES[head.split("_")[0]])

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.head.dtype), self.head)

    @torch.no_grad()
    def passes(self, rows: list[list[int]], how: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits of each row's positions, and its routes [tokens, mixtures, experts]."""
        if how == "rows":
            out, routes = [], []
            for row in rows:
                self.tape.clear()
                out.append(self.logits(self.model.model(input_ids=torch.tensor([row])).last_hidden_state)[0])
                routes.append(torch.stack(self.tape, 1) if self.tape else torch.empty(0))
            return out, routes
        out = []
        if how == "kernel":
            was = self.model.config._attn_implementation
            self.model.set_attn_implementation("set2_blocks")
        for begin in range(0, len(rows), 6):
            part = rows[begin : begin + 6]
            length = max(map(len, part))
            ids = torch.tensor([row + [PAD] * (length - len(row)) for row in part])
            mask = None
            if how == "padded":
                mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in part])
            hidden = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            out += [self.logits(hidden[i, : len(row)]) for i, row in enumerate(part)]
        if how == "kernel":
            self.model.set_attn_implementation(was)
        self.tape.clear()
        return out, []

    @torch.no_grad()
    def draw(
        self, prompts: list[list[int]], lengths: list[int], s: dict[str, Any], g: torch.Generator
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw completions with a cache in one batch padded on the left; return them and their values."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        cache, drawn, values = None, [], []
        for _ in range(max(lengths)):
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            out = self.model.model(
                input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logits = self.logits(out.last_hidden_state[:, -1])
            keep = left(logits.float() / s["temperature"], s)
            ids = torch.multinomial(keep.softmax(-1), 1, generator=g)
            drawn.append(ids[:, 0])
            values.append(logprobs(logits, ids[:, 0], s))
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        self.tape.clear()
        tokens, vals = torch.stack(drawn, 1).tolist(), torch.stack(values, 1).tolist()
        return [t[:n] for t, n in zip(tokens, lengths, strict=True)], [
            v[:n] for v, n in zip(vals, lengths, strict=True)
        ]


def left(logits: Tensor, s: dict[str, Any], always: Tensor | None = None) -> Tensor:
    """Return logits with the tokens that truncation removes at -inf; the tokens ``always`` stay."""

    def min_p(x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        return x.masked_fill(shares < s["min_p"] * shares.amax(-1, keepdim=True), -torch.inf)

    def top_k(x: Tensor) -> Tensor:
        return x.masked_fill(x < x.topk(s["top_k"], -1).values[..., -1:], -torch.inf)

    def top_p(x: Tensor) -> Tensor:
        shares, order = x.softmax(-1).sort(-1, descending=True)
        gone = shares.cumsum(-1) - shares >= s["top_p"]
        return x.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)

    steps = {"min_p": (min_p, s["min_p"] > 0), "top_k": (top_k, s["top_k"] > 0), "top_p": (top_p, s["top_p"] < 1)}
    order = ("min_p", "top_k", "top_p") if s["order"] == "vllm" else ("top_k", "top_p", "min_p")
    out = logits
    for name in order:
        cut, acts = steps[name]
        out = cut(out) if acts else out
    if always is not None:
        out = out.scatter(-1, always[..., None], logits.gather(-1, always[..., None]))
    return out


def logprobs(logits: Tensor, tokens: Tensor, s: dict[str, Any]) -> Tensor:
    """Return what a side records for tokens, from the logits before each."""
    if s["head"] != "bfloat16_softmax":
        logits = logits.float()
    if s["logprobs"] in ("raw", "divided"):
        values = logits.log_softmax(-1)
        values = values / s["temperature"] if s["logprobs"] == "divided" else values
    else:
        logits = logits / s["temperature"]
        if s["logprobs"] == "processed":
            logits = left(logits, s, tokens)
        values = logits.log_softmax(-1)
    return values.gather(-1, tokens[..., None])[..., 0].float()
