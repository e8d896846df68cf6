"""The sampler: a decoder of its own in plain torch, with a cache, batches padded on either side, and its own kernels.

Its experts run in a loop, or grouped as those of transformers do: one pass a row then has the trainer's rounding.

It reads the weights of a Llama, Qwen3, Qwen3-MoE or Mixtral checkpoint by name and computes in the precision it is
told. Nothing of transformers is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
E4M3 = 448.0


@dataclass
class Shape:
    """What the engine needs of a config."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    experts: int = 0
    chosen: int = 0
    renormalise: bool = True
    gates_in_float32: bool = False


def _grid(x: Tensor, scale: Tensor) -> Tensor:
    """Return x on the e4m3 grid of a scale, in float32."""
    scale = scale.clamp(min=1e-12)
    return (x / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float() * scale


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest magnitude of the block that each entry lies in."""
    height, width = x.shape
    padded = F.pad(x.abs(), (0, -width % columns, 0, -height % rows))
    top = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    return top.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:height, :width]


def _mx(x: Tensor) -> Tensor:
    """Return x in mxfp8: blocks of 32 along the last dimension, scales that are powers of two (OCP)."""
    top = _blocks(x, 1, 32).clamp(min=2.0**-120)
    return _grid(x, torch.exp2(torch.floor(torch.log2(top)) - 8))


def quantise_weight(w: Tensor, kind: str) -> Tensor:
    """Return a weight [out, in] on its e4m3 grid."""
    w = w.float()
    if kind == "tensorwise":
        return _grid(w, w.abs().amax() / E4M3)
    if kind == "rowwise":
        return _grid(w, w.abs().amax(-1, keepdim=True) / E4M3)
    if kind == "blockwise":
        return _grid(w, _blocks(w, 128, 128) / E4M3)
    return _mx(w)


def quantise_activation(x: Tensor, kind: str) -> Tensor:
    """Return activations [tokens, in] on their e4m3 grid."""
    x = x.float()
    if kind == "tensorwise":
        return _grid(x, x.abs().amax() / E4M3)
    if kind == "rowwise":
        return _grid(x, x.abs().amax(-1, keepdim=True) / E4M3)
    if kind == "blockwise":
        return _grid(x, _blocks(x, 1, 128) / E4M3)
    return _mx(x)


class Engine:
    """Weights as a sampler holds them, and its forward."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: Shape,
        precision: str = "float32",
        head: str | None = None,
        attention: str = "sdpa",
        gemms: str = "dense",
        router: str | None = None,
        experts: int = 0,
        renormalise: bool | None = None,
        adapter: tuple[dict[str, tuple[Tensor, Tensor]], float, int] | None = None,
        lora: str = "unmerged",
        selection: dict[str, Tensor] | None = None,
        grouped: bool = False,
    ) -> None:
        self.shape, self.attention, self.router = shape, attention, router
        self.grouped = grouped
        self.dtype = DTYPES[precision]
        self.head = head or precision
        self.chosen = shape.chosen + experts
        self.renormalise = shape.renormalise if renormalise is None else renormalise
        self.activations: str | None = None
        self.selection = {name: w.to(DTYPES[precision]) for name, w in (selection or {}).items()}
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        self.scale = 0.0
        weights = dict(weights)
        lm_head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        if adapter and lora != "dropped":
            self._adapt(weights, adapter, lora)
        kind = gemms.removeprefix("fp8_").removeprefix("weights_")
        alone = gemms.startswith("fp8_weights")
        self.w: dict[str, Tensor] = {}
        for name, w in weights.items():
            w = w.to(self.dtype)
            if gemms != "dense" and name.endswith("proj.weight"):
                w = quantise_weight(w, kind)
                w = w.to(self.dtype) if alone else w
            elif alone and name.endswith(("gate_up_proj", "down_proj")):
                w = torch.stack([quantise_weight(one, kind) for one in w]).to(self.dtype)
            self.w[name] = w
        if gemms != "dense" and not alone:
            self.activations = kind
        if self.head == "float32_masters":
            self.lm_head = lm_head.float()
        else:
            self.lm_head = lm_head.to(self.dtype).to(DTYPES[self.head.removesuffix("_softmax")])
        d = shape.head_dim
        self.frequencies = 1.0 / (shape.theta ** (torch.arange(0, d, 2, dtype=torch.int64).float() / d))

    def _adapt(self, weights: dict[str, Tensor], adapter: Any, lora: str) -> None:
        pairs, alpha, rank = adapter
        scales = {"doubled": 2 * alpha / rank, "alpha": alpha, "rslora": alpha / rank**0.5, "unscaled": 1.0}
        self.scale = scales.get(lora, alpha / rank)
        for name, (a, b) in pairs.items():
            if lora == "merged":
                weights[name] = weights[name] + self.scale * (b @ a)
            elif lora == "merged_rounded":
                weights[name] = weights[name].to(self.dtype) + (self.scale * (b @ a)).to(self.dtype)
            else:
                self.pairs[name] = (a.to(self.dtype), b.to(self.dtype))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        w = self.w[name]
        if self.activations is None:
            y = F.linear(x, w)
        else:
            flat = quantise_activation(x.reshape(-1, x.shape[-1]), self.activations)
            y = F.linear(flat, w).to(self.dtype).view(*x.shape[:-1], -1)
        if name in self.pairs:
            a, b = self.pairs[name]
            y = y + F.linear(F.linear(x, a), b) * self.scale
        return y

    def _norm(self, name: str, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return self.w[name] * y.to(self.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        groups = self.shape.heads // self.shape.kv_heads
        if self.attention == "sdpa":
            if mask is None:
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=q.shape[2] > 1, scale=self.shape.head_dim**-0.5, enable_gqa=groups > 1
                )
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.shape.head_dim**-0.5)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.shape.head_dim**-0.5
        if mask is None:
            t = q.shape[2]
            mask = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        scores = scores + torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)

    def _mixture(self, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        gate = self.w[f"{at}.gate.weight"]
        lower = DTYPES[self.router] if self.router else self.dtype
        probabilities = F.linear(flat.to(lower), gate.to(lower)).float().softmax(-1)
        gates, chosen = probabilities.topk(self.chosen, -1)
        if self.selection:
            chosen = F.linear(flat, self.selection[f"{at}.gate.weight"]).topk(self.chosen, -1).indices
            gates = probabilities.gather(-1, chosen)
        if self.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        if not self.shape.gates_in_float32:
            gates = gates.to(self.dtype)
        up, down = self.w[f"{at}.experts.gate_up_proj"], self.w[f"{at}.experts.down_proj"]
        if self.grouped:
            order = chosen.reshape(-1).argsort(stable=True)
            ends = torch.bincount(chosen.reshape(-1), minlength=self.shape.experts).cumsum(0).to(torch.int32)
            a, b = F.grouped_mm(flat[order // chosen.shape[-1]], up.transpose(1, 2), offs=ends).chunk(2, -1)
            z = F.grouped_mm(F.silu(a) * b, down.transpose(1, 2), offs=ends) * gates.reshape(-1)[order, None]
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            y = z[back].view(*chosen.shape, -1).sum(1).to(flat.dtype)
            return y.view_as(x), chosen.view(*x.shape[:-1], -1)
        y = torch.zeros_like(flat)
        for expert in range(self.shape.experts):
            place, token = torch.where((chosen == expert).T)
            if token.numel():
                a, b = F.linear(flat[token], up[expert]).chunk(2, -1)
                z = F.linear(F.silu(a) * b, down[expert]) * gates[token, place, None]
                y.index_add_(0, token, z.to(y.dtype))
        return y.view_as(x), chosen.view(*x.shape[:-1], -1)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, T, H] and routes [B, T, mixtures, chosen]; a cache is filled in place."""
        s = self.shape
        batch, length = ids.shape
        if positions is None:
            positions = torch.arange(length)[None].expand(batch, -1)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None]
        h = self.w["model.embed_tokens.weight"][ids]
        seen = []
        for layer in range(s.layers):
            at = f"model.layers.{layer}"
            x = self._norm(f"{at}.input_layernorm.weight", h)
            q, k, v = (
                self._linear(f"{at}.self_attn.{one}_proj.weight", x).view(batch, length, -1, s.head_dim)
                for one in "qkv"
            )
            if f"{at}.self_attn.q_norm.weight" in self.w:
                q = self._norm(f"{at}.self_attn.q_norm.weight", q)
                k = self._norm(f"{at}.self_attn.k_norm.weight", k)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            q, k = (one * cos + torch.cat([-one[..., s.head_dim // 2 :], one[..., : s.head_dim // 2]], -1) * sin
                    for one in (q, k))  # fmt: skip
            if cache is not None:
                if len(cache) > layer:
                    k, v = torch.cat([cache[layer][0], k], 2), torch.cat([cache[layer][1], v], 2)
                    cache[layer] = (k, v)
                else:
                    cache.append((k, v))
            y = self._attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, -1)
            h = h + self._linear(f"{at}.self_attn.o_proj.weight", y)
            x = self._norm(f"{at}.post_attention_layernorm.weight", h)
            if f"{at}.mlp.gate.weight" in self.w:
                y, chosen = self._mixture(f"{at}.mlp", x)
                seen.append(chosen)
            else:
                up = F.silu(self._linear(f"{at}.mlp.gate_proj.weight", x)) * self._linear(f"{at}.mlp.up_proj.weight", x)
                y = self._linear(f"{at}.mlp.down_proj.weight", up)
            h = h + y
        return self._norm("model.norm.weight", h), torch.stack(seen, 2) if seen else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits in float32, or in the head's dtype if its log-softmax is in it."""
        logits = F.linear(hidden.to(self.lm_head.dtype), self.lm_head)
        return logits if self.head.endswith("_softmax") else logits.float()
