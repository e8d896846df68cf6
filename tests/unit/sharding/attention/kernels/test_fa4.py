"""The fa4 kernel: arguments of the package, and refusals; its numbers are tested on a GPU (`test_fa4_on_gpu`)."""

import types

import pytest
import torch

from tests.helpers.attention_case import ORDERS, assert_right
from tests.helpers.kernel_blocks import block, by_blocks
from tests.helpers.stand_in import stand_in
from tests.oracles import varlen_attention
from workbench.sharding.attention.kernels import fa4
from workbench.sharding.attention.kernels.fa4 import Fa4Kernel


class Package:
    """The functions of `flash_attn.cute.interface`, by the oracle of torch's operators."""

    def _flash_attn_fwd(self, query, key, value, *, return_lse, softmax_scale, causal, **settings):
        assert return_lse
        assert not (causal and settings["window_size_right"] is not None)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        row = [settings.pop(name) for name in names]
        window = {name: -1 if value is None else value for name, value in settings.items()}
        out = varlen_attention.forward(query, key, value, *row, 0.0, causal, False, scale=softmax_scale, **window)
        return (*out[:2], None, None, None)

    def _flash_attn_bwd(self, query, key, value, out, d_out, lse, *, softmax_scale, causal, **settings):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        row = [settings.pop(name) for name in names]
        window = {name: -1 if value is None else value for name, value in settings.items()}
        return varlen_attention.backward(
            d_out, query, key, value, out, lse, *row, 0.0, causal, None, None, scale=softmax_scale, **window
        )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_give_the_attention_of_the_row_and_its_gradients(order, window, monkeypatch):
    monkeypatch.setattr(fa4, "_package", Package)
    assert_right(by_blocks(Fa4Kernel(), order, 4, (4, 2), window, at_once=True), (4, 2), window, atol=2e-6)


def on_a_gpu(d=64):
    return types.SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 2, 4, d))


@pytest.mark.parametrize(
    ("installed", "capability", "d", "part"),
    [
        (False, (9, 0), 64, "pip install 'workbench[fa4]'"),
        (True, (8, 0), 64, "compute capability 9 or 10"),
        (True, (9, 0), 256, "up to 128, not 256"),
    ],
)
def test_what_it_cannot_compute_is_refused(monkeypatch, installed, capability, d, part):
    monkeypatch.setattr(fa4, "_installed", lambda: installed)
    cuda = stand_in(torch.cuda, get_device_capability=lambda _: capability)
    monkeypatch.setattr(fa4, "torch", stand_in(torch, cuda=cuda))
    query = on_a_gpu(d)
    assert part in Fa4Kernel().refusal(query, query, block(range(4), range(4), [0] * 4))
