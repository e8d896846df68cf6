"""The wrapper of torch's context parallelism: checks before, sharded copies, attention restored on any exit."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from torch.nn import functional

from tests.helpers.lent_kernels import lend_to_cpu
from tests.helpers.pretended_ring import RING, head_and_tail
from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding import torch_context_parallel as module
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.torch_context_parallel import (
    TorchRing,
    check_rows,
    guarded,
    torch_context_parallel,
    torch_ring,
)


def test_this_torch_has_one():
    assert torch_ring().place in module.PLACES
    assert torch_ring().enter is importlib.import_module(torch_ring().place).context_parallel
    assert torch_ring().devices == ("cuda",)


def test_an_unsupported_torch_is_reported(monkeypatch):
    monkeypatch.setattr(module, "PLACES", ("torch.nowhere", "torch.distributed"))
    with pytest.raises(ShardingError, match="without context_parallel"):
        torch_ring.__wrapped__()


@pytest.mark.parametrize(
    ("length", "device", "said"),
    [(128, "cpu", "tensors on cpu"), (126, "cuda", "126 is not a multiple of 2 [*] cp = 4")],
)
def test_rows_that_it_cannot_share_out_are_refused(length, device, said):
    with pytest.raises(ShardingError, match=said):
        check_rows(length, 2, device, TorchRing(contextlib.nullcontext, "here"))


def test_the_required_multiple_is_reported():
    with pytest.raises(ShardingError, match="pad the rows at their end to 132 tokens"):
        check_rows(129, 3, "cuda", TorchRing(contextlib.nullcontext, "here"))


def test_tensors_of_several_lengths_are_refused():
    with (
        pytest.raises(ShardingError, match="labels of 7 next to 8 tokens"),
        torch_context_parallel(Axis("cp"), {"ids": torch.zeros(1, 8), "labels": torch.zeros(1, 7)}),
    ):
        pass


def test_one_rank_has_everything_and_the_attention_that_was_there():
    tensors, before = {"ids": torch.arange(7)[None]}, functional.scaled_dot_product_attention
    with torch_context_parallel(Axis("cp"), tensors) as held:
        assert held == tensors
        assert functional.scaled_dot_product_attention is before


# -- attention behind its rules --------------------------------------------------------------------------------


def asked(query=(1, 4, 64, 8), key=(1, 4, 64, 8), dtype=torch.float32, **more):
    """The arguments that reach torch's ring."""
    results = {}

    def attention(query, key, value, **settings):
        results.update(settings, heads=(query.shape[1], key.shape[1], value.shape[1]))
        return query

    settings = {"is_causal": True} | more
    guarded(attention)(*(torch.zeros(shape, dtype=dtype) for shape in (query, key, key)), **settings)
    return results


def test_plain_attention_passes():
    assert asked(scale=0.5) == {"is_causal": True, "scale": 0.5, "enable_gqa": False, "heads": (4, 4, 4)}


def test_shared_heads_are_repeated_for_kernels_without_gqa():
    assert asked(key=(1, 2, 64, 8), enable_gqa=True)["heads"] == (4, 4, 4)
    half = asked(key=(1, 2, 64, 8), dtype=torch.bfloat16, enable_gqa=True)
    assert (half["heads"], half["enable_gqa"]) == ((4, 2, 2), True)
    assert asked(query=(1, 4, 64, 512), key=(1, 2, 64, 512), dtype=torch.bfloat16)["heads"] == (4, 4, 4)


def test_repeated_heads_are_the_groups():
    key = torch.arange(2.0)[None, :, None, None].expand(1, 2, 64, 8)
    seen = guarded(lambda query, key, value, **_: key)(torch.zeros(1, 4, 64, 8), key, key, is_causal=True)
    assert seen[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attn_mask": torch.ones(64, 64)}, "an attention mask of shape [(]64, 64[)]"),
        ({"dropout_p": 0.1}, "dropout of 0.1"),
        ({"is_causal": False}, "attention that is not causal"),
        ({"query": (1, 4, 96, 8)}, "96 tokens per rank in torch.float32"),
    ],
)
def test_options_unsupported_by_the_ring_are_refused(more, said):
    with pytest.raises(ShardingError, match=said):
        asked(**more)


def test_half_precision_needs_no_multiple():
    assert asked(query=(1, 4, 6, 8), key=(1, 4, 6, 8), dtype=torch.bfloat16)["is_causal"]


# -- in and out ------------------------------------------------------------------------------------------------


def attend(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads(requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, h, 128, 8, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for h in (4, 2, 2)
    ]


def in_and_out():
    axis = make_mesh(cp=2)["cp"]
    ids, before = torch.arange(256).view(2, 128), functional.scaled_dot_product_attention
    tensors = {"ids": ids, "shared": ids[:1].expand(2, 128), "wide": torch.stack([ids, -ids], dim=-1)}
    local = head_and_tail(axis.rank, 2, 128)
    with torch_context_parallel(axis, tensors, ring=RING) as held:
        same = [torch.equal(held[name], tensor[:, local]) for name, tensor in tensors.items()]
        query, key, value = (part[:, :, local].detach().requires_grad_() for part in heads())
        attend(query, key, value).square().sum().backward()
        inside = functional.scaled_dot_product_attention is not before
    with contextlib.suppress(KeyError), torch_context_parallel(axis, tensors, ring=RING):
        raise KeyError("halfway")
    return {
        "same": same,
        "inside": inside,
        "put back": functional.scaled_dot_product_attention is before,
        "whole": torch.equal(ids, torch.arange(256).view(2, 128)),
        "gradients": [part.grad for part in (query, key, value)],
    }


def test_rows_are_cut_and_everything_is_put_back(tmp_path):
    query, key, value = heads(requires_grad=True)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    mixed.square().sum().backward()
    for rank, result in enumerate(run_ranks(in_and_out, 2, tmp_path)):
        assert result["same"] == [True] * 3
        assert (result["inside"], result["put back"], result["whole"]) == (True, True, True)
        for whole, gradient in zip((query, key, value), result["gradients"], strict=True):
            expected = whole.grad[:, :, head_and_tail(rank, 2, 128)]
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)


# -- torch's own ring, with kernels lent to the CPU ------------------------------------------------------------


def through_torchs_ring():
    ring, axis = lend_to_cpu(), make_mesh(cp=2)["cp"]
    local, result, before = head_and_tail(axis.rank, 2, 128), {}, functional.scaled_dot_product_attention
    with contextlib.suppress(KeyError), torch_context_parallel(axis, {"x": torch.zeros(1, 128)}, ring=ring):
        raise KeyError("halfway")
    result["put back"] = functional.scaled_dot_product_attention is before
    for dtype in (torch.float32, torch.bfloat16):
        whole = dict(zip("qkv", (part.transpose(1, 2).to(dtype) for part in heads()), strict=True))
        places = torch.arange(128).expand(2, 128)
        with torch_context_parallel(axis, whole | {"places": places}, ring=ring) as held:
            assert held["places"][1].tolist() == local
            parts = [held[name].transpose(1, 2).detach().requires_grad_() for name in "qkv"]
            out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            out.square().sum().backward()
        result[dtype] = [out.detach(), *(part.grad for part in parts)]
    return result


def test_torchs_own_ring_is_attention_over_whole_rows(tmp_path):
    """Merging rounds to float32 whatever the kernels do."""
    answers = run_ranks(through_torchs_ring, 2, tmp_path)
    for dtype, bar in {torch.float32: 1e-6, torch.bfloat16: 2e-2}.items():
        parts = [part.to(dtype).double().requires_grad_() for part in heads()]
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        for rank, result in enumerate(answers):
            assert result["put back"]
            for true, got in zip([out.detach(), *(part.grad for part in parts)], result[dtype], strict=True):
                true = true[:, :, head_and_tail(rank, 2, 128)]
                assert got.dtype is dtype
                assert (got.double() - true).norm() < bar * true.norm()
