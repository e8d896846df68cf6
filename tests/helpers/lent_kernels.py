"""Torch's own ring attention on CPU: the CUDA operators that it is made of, lent plain kernels.

The ring itself (`torch.distributed.tensor.experimental`: cutting, dispatch, rotation, merging, gradients) is torch's,
untouched. What a GPU adds is in the kernels alone, so they keep the habits that the ring sees: the memory-efficient one
takes equal heads only and pads its log-sum-exps to 32, the flash one takes half precision and grouped heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from workbench.sharding.torch_context_parallel import TorchRing, torch_ring

ops, plain = torch.ops.aten, functional.scaled_dot_product_attention


def lend_to_cpu() -> TorchRing:
    """Register the kernels in this process, and choose among them as torch does on a GPU. Once; not to be undone."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
    }.items():
        library.impl(name, kernel, "CPU")
    lend_to_cpu.library = library  # it lives as long as this does
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    return TorchRing(torch_ring().enter, torch_ring().place, ("cpu",))


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """On the ring's tensors flash in half precision, memory-efficient elsewhere; on others torch's own."""
    if type(query) is Tensor:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert attn_mask is None
    assert enable_gqa or query.shape[1] == key.shape[1]
    if query.dtype in (torch.float16, torch.bfloat16):
        return ops._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    assert not enable_gqa
    return ops._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]


def _scores(query, key, is_causal, scale):
    scores = query.double() @ key.double().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf) if is_causal else scores


def _forward(query, key, value, is_causal, scale) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    scores = _scores(query, key.repeat_interleave(groups, 1), is_causal, scale)
    out = scores.softmax(-1) @ value.double().repeat_interleave(groups, 1)
    return out.to(query.dtype), scores.logsumexp(-1).float()


def _backward(gradient, query, key, value, out, lse, is_causal, scale):
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (part.double().repeat_interleave(groups, 1) for part in (key, value))
    shares = (_scores(query, wide_key, is_causal, scale) - lse[..., : query.shape[2], None]).exp()
    gradient = gradient.double()
    delta = (gradient * out.double()).sum(-1, keepdim=True)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    inner = shares * (gradient @ wide_value.transpose(-1, -2) - delta) * factor
    results = inner @ wide_key, inner.transpose(-1, -2) @ query.double(), shares.transpose(-1, -2) @ gradient
    d_key, d_value = (part.unflatten(1, (-1, groups)).sum(2) for part in results[1:])
    return [part.to(query.dtype) for part in (results[0], d_key, d_value)]


def _efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert query.shape[1] == key.shape[1]
    out, lse = _forward(query, key, value, is_causal, scale)
    nothing = torch.zeros((), dtype=torch.long)
    return out, functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), nothing, nothing.clone()


def _efficient_backward(
    gradient, query, key, value, attn_bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None
):
    return *_backward(gradient, query, key, value, out, lse, is_causal, scale), None


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = _forward(query, key, value, is_causal, scale)
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, torch.zeros(0)


def _flash_backward(
    gradient,
    query,
    key,
    value,
    out,
    lse,
    starts_q,
    starts_k,
    length_q,
    length_k,
    dropout_p,
    is_causal,
    seed,
    offset,
    *,
    scale=None,
):
    return tuple(_backward(gradient, query, key, value, out, lse, is_causal, scale))
