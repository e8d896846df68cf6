"""Torch's real ring on two GPUs, behind our rules, against attention over whole rows on one."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional

from tests.helpers.ranks import run_ranks
from workbench.sharding.mesh import axis_of
from workbench.sharding.torch_context_parallel import torch_context_parallel

BARS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def heads(dtype, device):
    """Query, key and value of grouped heads, [B, T, H, d]."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 256, h, 64, generator=g).to(device, dtype) for h in (4, 2, 2)]


def attend(parts):
    """Output and gradients of some [B, t, H, d]."""
    parts = [part.detach().clone().requires_grad_() for part in parts]
    query, key, value = (part.transpose(1, 2) for part in parts)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    (out.float() * parts[0].detach().float().cos()).sum().backward()
    return [out.detach(), *(part.grad for part in parts)]


def on_a_gpu():
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    axis = axis_of(dist.new_group(backend="nccl"), "cp")
    before, result = functional.scaled_dot_product_attention, {}
    for dtype in BARS:
        with contextlib.suppress(KeyError), torch_context_parallel(axis, {"x": torch.zeros(1, 256, device=device)}):
            raise KeyError("halfway")
        result[f"{dtype} put back"] = functional.scaled_dot_product_attention is before
        whole = heads(dtype, device)
        tensors = dict(zip(("query", "key", "value"), whole, strict=True))
        places = torch.arange(256, device=device).expand(2, 256)
        with torch_context_parallel(axis, tensors | {"places": places}) as held:
            ring = attend([held[name] for name in tensors])
        local = held["places"][0]
        exact = attend([part.double() for part in whole])
        for name, got, true in zip(("out", "query", "key", "value"), ring, exact, strict=True):
            true = true[:, local]
            result[dtype, name] = float((got.double() - true).norm() / true.norm())
        result[f"{dtype} places"] = local.tolist()
    return result


@pytest.mark.gpus(2)
def test_the_ring_is_attention_over_whole_rows(tmp_path):
    for rank, result in enumerate(run_ranks(on_a_gpu, 2, tmp_path)):
        for dtype, bar in BARS.items():
            assert result[f"{dtype} put back"]
            assert result[f"{dtype} places"] == [
                *range(64 * rank, 64 * rank + 64),
                *range(192 - 64 * rank, 256 - 64 * rank),
            ]
            for name in ("out", "query", "key", "value"):
                assert result[dtype, name] < bar, f"{dtype}, {name}, rank {rank}"
