"""GPU-only properties of the flex kernel: the code that torch compiles, its numbers, and the number of compilations."""

import pytest
import torch

from tests.helpers.engine_chunks import error
from tests.helpers.gpu_attention import blocks_of, heads, packed
from workbench.sharding.attention.kernels.flex import FlexKernel
from workbench.sharding.attention.kernels.plain import PlainKernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler loads old parts of torch,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]  # and advises TF32
SCALE = 0.09
BARS = {torch.bfloat16: (4.5e-3, 7.5e-3), torch.float32: (1e-6, 1e-6)}  # twice the value measured on an H200


def held_against_plain(its, *, queries=16, keys=8, d=128, dtype=torch.bfloat16):
    """Output and gradients of a block against the plain kernel's, with a normaliser that has seen other keys too."""
    kernel, plain = FlexKernel(), PlainKernel()
    query, both = heads(queries, its.shape[0], d, dtype), heads(2 * keys, its.shape[1], d, dtype)
    key, value = both[:, :keys], both[:, keys:]  # as they come from other ranks
    assert kernel.refusal(query, key, its) is None
    out, lse = kernel.forward(query, key, value, its, SCALE)
    right, right_lse = plain.forward(query, key, value, its, SCALE)
    right_lse = right_lse.float()
    assert error(out, right) < BARS[dtype][0]
    assert torch.equal(lse.isneginf(), right_lse.isneginf())
    torch.testing.assert_close(lse, right_lse, rtol=0, atol=1e-4)
    final, d_out = right_lse.masked_fill(right_lse.isneginf(), 0) + 0.4, heads(queries, its.shape[0], d, dtype)
    mixed = (right.to(dtype) * 0.6).to(dtype)
    result = kernel.backward(d_out, query, key, value, mixed, final, its, SCALE)
    for one, other in zip(result, plain.backward(d_out, query, key, value, mixed, final, its, SCALE), strict=True):
        assert error(one, other) < BARS[dtype][1]
        assert one.isfinite().all()


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("window", [None, 100])
def test_every_block_is_that_of_the_plain_kernel(window, dtype):
    lengths = packed(2048, most=600, multiple_of=8)
    for order, at_once in (("striped", True), ("balanced", True), ("zigzag", False), ("document_zigzag", True)):
        for _, _, its in blocks_of(order, 4, lengths, at_once=at_once, window=window)[-3:]:
            held_against_plain(its, queries=4, keys=2, d=64, dtype=dtype)


@pytest.mark.parametrize(
    ("queries", "keys", "d", "dtype"),
    [(16, 8, 128, torch.bfloat16), (16, 8, 128, torch.float32), (6, 2, 64, torch.bfloat16)],
)
def test_heads_of_every_kind(queries, keys, d, dtype):
    its = blocks_of("striped", 2, packed(1000, most=300), at_once=True)[1][2]
    held_against_plain(its, queries=queries, keys=keys, d=d, dtype=dtype)


def test_lengths_that_no_tile_divides():
    for tokens in (2 * 37, 2 * 128, 2 * 129, 2 * 1001, 2 * 2003):
        its = blocks_of("striped", 2, packed(tokens, most=300), at_once=True)[0][2]
        held_against_plain(its, queries=4, keys=2, d=64)
