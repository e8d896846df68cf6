"""GPU-only properties of the flash kernel: torch's operator itself, its numbers, copies and waits."""

import pytest
import torch

from tests.helpers.engine_chunks import error
from tests.helpers.gpu_attention import blocks_of, heads, packed
from tests.helpers.kernel_blocks import block
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.kernels.flash import FlashKernel
from workbench.sharding.attention.kernels.plain import PlainKernel

pytestmark = pytest.mark.gpu
SCALE = 0.09


def held_against_plain(its, *, queries=16, keys=8, d=128, dtype=torch.bfloat16):
    """Output and gradients of a block against the plain kernel's, with a normaliser that has seen other keys too."""
    kernel, plain = FlashKernel(), PlainKernel()
    query, both = heads(queries, its.shape[0], d, dtype), heads(2 * keys, its.shape[1], d, dtype)
    key, value = both[:, :keys], both[:, keys:]  # as they come from other ranks
    assert kernel.refusal(query, key, its) is None
    out, lse = kernel.forward(query, key, value, its, SCALE)
    right, right_lse = plain.forward(query, key, value, its, SCALE)
    right_lse = right_lse.float()
    assert error(out, right) < 4.5e-3  # bars: twice the value measured on an H200
    assert torch.equal(lse.isneginf(), right_lse.isneginf())
    torch.testing.assert_close(lse, right_lse, rtol=0, atol=1e-4)
    final, d_out = right_lse.masked_fill(right_lse.isneginf(), 0) + 0.4, heads(queries, its.shape[0], d, dtype)
    mixed = (right.to(dtype) * 0.6).to(dtype)
    result = kernel.backward(d_out, query, key, value, mixed, final, its, SCALE)
    for one, other in zip(result, plain.backward(d_out, query, key, value, mixed, final, its, SCALE), strict=True):
        assert error(one, other) < 6.5e-3
        assert one.isfinite().all()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("order", "at_once"),
    [
        ("contiguous", True),
        ("zigzag", True),
        ("document_zigzag", True),
        ("whole_documents", True),
        ("whole_documents", False),
        ("balanced", True),
        ("contiguous", False),
        ("zigzag", False),
        ("striped", False),
        ("document_zigzag", False),
        ("balanced", False),
    ],
)
def test_every_block_is_that_of_the_plain_kernel(order, at_once, window):
    lengths = packed(2048, most=600, multiple_of=8)
    for _, _, its in blocks_of(order, 4, lengths, at_once=at_once, window=window):
        held_against_plain(its, queries=4, keys=2, d=64)


@pytest.mark.parametrize(
    ("queries", "keys", "d", "dtype"),
    [(16, 8, 128, torch.bfloat16), (8, 8, 256, torch.bfloat16), (8, 1, 64, torch.float16), (4, 2, 8, torch.float16)],
)
def test_heads_of_every_kind(queries, keys, d, dtype):
    its = blocks_of("zigzag", 2, packed(1024, most=300), at_once=True)[1][2]
    held_against_plain(its, queries=queries, keys=keys, d=d, dtype=dtype)


def test_segments_of_one_query_and_unseen_keys():
    documents = [0] * 700 + [1] * 700 + [2] * 700
    held_against_plain(block([699, 1399, 2099], range(2100), documents))
    held_against_plain(block([1200], range(2100), documents))
    held_against_plain(block([3, 1500, 4], [2, 1, 0, *range(1400, 2100)], documents))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_waits_for_nothing_on_the_host_and_copies_no_keys():
    its = blocks_of("contiguous", 4, packed(8192), at_once=True)[2][2]
    query, key, value = heads(16, 2048), heads(8, 8192), heads(8, 8192)
    kernel = FlashKernel()

    def step():
        out, lse = kernel.forward(query, key, value, its, SCALE)
        return kernel.backward(out, query, key, value, out, lse, its, SCALE)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernel.forward(query, key, value, its, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 2 * query.nbytes


def test_auto_takes_it():
    its = blocks_of("zigzag", 2, packed(512), at_once=True)[0][2]
    query, key = heads(4, 256), heads(2, 512)
    assert choose("auto", query, key, its).name == "flash"
    assert choose("auto", query.float(), key.float(), its).name == "plain"
