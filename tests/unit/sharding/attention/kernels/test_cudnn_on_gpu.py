"""GPU-only properties of the cudnn kernel: the operator itself, its numbers."""

import pytest
import torch

from tests.helpers.engine_chunks import error
from tests.helpers.gpu_attention import blocks_of, heads, packed
from workbench.sharding.attention.kernels.cudnn import CudnnKernel
from workbench.sharding.attention.kernels.plain import PlainKernel

pytestmark = pytest.mark.gpu
SCALE = 0.09


@pytest.mark.parametrize(("queries", "keys", "d"), [(16, 8, 128), (4, 1, 64)])
@pytest.mark.parametrize(
    ("order", "at_once"), [("contiguous", True), ("zigzag", True), ("document_zigzag", True), ("zigzag", False)]
)
def test_every_block_is_that_of_the_plain_kernel(order, at_once, queries, keys, d):
    """With a normaliser that has seen other keys too, as in a ring."""
    kernel, plain = CudnnKernel(), PlainKernel()
    for _, _, its in blocks_of(order, 2, packed(2048, least=100, most=900, multiple_of=4), at_once=at_once):
        query, key, value = heads(queries, its.shape[0], d), heads(keys, its.shape[1], d), heads(keys, its.shape[1], d)
        assert kernel.refusal(query, key, its) is None
        out, lse = kernel.forward(query, key, value, its, SCALE)
        right, right_lse = plain.forward(query, key, value, its, SCALE)
        right_lse = right_lse.float()
        assert error(out, right) < 6e-3  # bars: twice the value measured on an H200
        torch.testing.assert_close(lse, right_lse, rtol=0, atol=1e-3)
        final, d_out = right_lse.masked_fill(right_lse.isneginf(), 0) + 0.4, heads(queries, its.shape[0], d)
        mixed = (right.to(torch.bfloat16) * 0.6).to(torch.bfloat16)
        result = kernel.backward(d_out, query, key, value, mixed, final, its, SCALE)
        for one, other in zip(result, plain.backward(d_out, query, key, value, mixed, final, its, SCALE), strict=True):
            assert one.isfinite().all()
            assert error(one, other) < 9e-3
