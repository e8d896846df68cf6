"""GPU-only properties of the fa4 kernel, where flash-attn-4 is installed."""

from importlib.util import find_spec

import pytest
import torch

from tests.helpers.engine_chunks import error
from tests.helpers.gpu_attention import blocks_of, heads, packed
from workbench.sharding.attention.kernels.fa4 import Fa4Kernel
from workbench.sharding.attention.kernels.plain import PlainKernel

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # of the packages that it imports
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn-4"),
]


@pytest.mark.parametrize(("order", "at_once"), [("contiguous", True), ("zigzag", True), ("zigzag", False)])
def test_every_block_is_that_of_the_plain_kernel(order, at_once):
    """With a normaliser that has seen other keys too, as in a ring."""
    kernel, plain, scale = Fa4Kernel(), PlainKernel(), 0.09
    for _, _, its in blocks_of(order, 2, packed(2048, least=100, most=900, multiple_of=4), at_once=at_once):
        query, key, value = heads(16, its.shape[0]), heads(8, its.shape[1]), heads(8, its.shape[1])
        assert kernel.refusal(query, key, its) is None
        out, lse = kernel.forward(query, key, value, its, scale)
        right, right_lse = plain.forward(query, key, value, its, scale)
        right_lse = right_lse.float()
        assert error(out, right) < 6e-3  # the bars of the cudnn kernel
        torch.testing.assert_close(lse, right_lse, rtol=0, atol=1e-3)
        final, d_out = right_lse.masked_fill(right_lse.isneginf(), 0) + 0.4, heads(16, its.shape[0])
        mixed = (right.to(torch.bfloat16) * 0.6).to(torch.bfloat16)
        result = kernel.backward(d_out, query, key, value, mixed, final, its, scale)
        for one, other in zip(result, plain.backward(d_out, query, key, value, mixed, final, its, scale), strict=True):
            assert error(one, other) < 9e-3
