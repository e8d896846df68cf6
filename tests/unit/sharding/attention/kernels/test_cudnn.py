"""The cudnn kernel on a stand-in for its operator: parts of a block, merges, gradients, refusals."""

import types

import pytest
import torch

from tests.helpers.attention_case import ORDERS, assert_right, by_ranks
from tests.helpers.kernel_blocks import block, by_blocks
from tests.helpers.stand_in import stand_in
from tests.oracles import dense_attention
from workbench.sharding.attention import kernels
from workbench.sharding.attention.kernels import choose, cudnn
from workbench.sharding.attention.kernels.cudnn import CudnnKernel, Operators, parts_of

STAND_IN = Operators(dense_attention.forward, dense_attention.backward)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_give_the_attention_of_the_row_and_its_gradients(order, at_once):
    heads = (4, 2) if at_once else (3, 1)
    assert_right(by_blocks(CudnnKernel(STAND_IN), order, 4, heads, at_once=at_once), heads, atol=2e-6)


@pytest.mark.parametrize(("algorithm", "inner"), [("gathered", 1), ("ring", 1), ("ulysses", 4), ("hybrid", 2)])
def test_every_algorithm_can_stand_on_it(monkeypatch, algorithm, inner):
    monkeypatch.setattr(CudnnKernel, "_refused_tensors", lambda *_: None)
    monkeypatch.setattr(kernels, "KERNELS", (CudnnKernel(STAND_IN),))
    by_rank = by_ranks("zigzag", 4, algorithm, (8, 4), inner=inner, kernel="cudnn")
    assert_right(by_rank, (8, 4), atol=2e-6)


def test_a_row_alone_is_a_square_a_document_and_adds_nothing():
    parts = parts_of(block(range(12), range(12), [0] * 5 + [1] * 7))
    assert [(part.queries, part.keys) for part in parts] == [(slice(0, 5),) * 2, (slice(5, 12),) * 2]
    assert all(part.causal and not part.queries_again and not part.keys_again for part in parts)


def test_later_queries_of_a_document_are_a_square_and_a_rectangle():
    square, rectangle = parts_of(block([6, 7, 8], range(12), [0] * 2 + [1] * 10))
    assert (square.keys, square.causal, square.queries_again) == (slice(6, 9), True, False)
    assert (rectangle.keys, rectangle.causal, rectangle.queries_again) == (slice(2, 6), False, True)


def test_gradients_that_parts_add_to_are_float32():
    kernel = CudnnKernel(Operators(_of_shapes_forward, _of_shapes_backward))
    query, key = (torch.zeros(1, 2, n, 8, dtype=torch.bfloat16) for n in (4, 8))
    its = block([2, 3, 6, 7], range(8), [0] * 8)
    out, lse = kernel.forward(query, key, key, its, 0.3)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert {x.dtype for x in kernel.backward(out, query, key, key, out, lse, its, 0.3)} == {torch.float32}
    alone = block(range(8), range(8), [0] * 8)
    assert {x.dtype for x in kernel.backward(key, key, key, key, key, lse.new_zeros(1, 2, 8), alone, 0.3)} == {
        torch.bfloat16
    }


def _of_shapes_forward(query, *_, **__):
    return query, query.new_zeros(*query.shape[:3], 1, dtype=torch.float32)


def _of_shapes_backward(_, query, key, value, *__, **___):
    return query, key, value


def test_a_block_in_which_nothing_is_seen_calls_nothing():
    kernel, its = CudnnKernel(Operators(None, None)), block([0, 1], [2, 3, 4], [0] * 5)
    query, key = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 3, 8)
    out, lse = kernel.forward(query, key, key, its, 0.3)
    assert (out.count_nonzero(), lse.isneginf().all()) == (0, True)
    assert [x.count_nonzero() for x in kernel.backward(out, query, key, key, out, lse, its, 0.3)] == [0, 0, 0]


def test_the_operators_of_this_torch_have_the_expected_arguments():
    assert Operators.of_torch() is not None


@pytest.fixture
def hopper(monkeypatch):
    found = stand_in(torch, cuda=stand_in(torch.cuda, get_device_capability=lambda _: (9, 0)))
    available = stand_in(torch.backends.cudnn, is_available=lambda: True)
    found = stand_in(found, backends=stand_in(torch.backends, cudnn=available))
    monkeypatch.setattr(cudnn, "torch", found)


def on_a_gpu(dtype=torch.bfloat16, d=64):
    return types.SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, 2, 4, d))


@pytest.mark.parametrize(
    ("query", "its", "part"),
    [
        (on_a_gpu(torch.float32), None, "bfloat16 or float16, and queries are float32"),
        (on_a_gpu(d=12), None, "multiples of 8"),
        (on_a_gpu(d=256), None, "up to 128"),
        (on_a_gpu(), block(range(8), range(8), [0] * 8, window=3), "no sliding window"),
        (
            on_a_gpu(),
            block(range(1275), range(1275), [n for n in range(50) for _ in range(n + 1)]),
            "this row has 50, of at most 32",
        ),
    ],
)
def test_what_it_cannot_compute_is_refused(hopper, query, its, part):
    assert part in CudnnKernel(STAND_IN).refusal(query, query, its or block(range(4), range(4), [0] * 4))


def test_it_is_taken_by_name_only(hopper, monkeypatch):
    monkeypatch.setattr(CudnnKernel, "_refused_tensors", lambda *_: None)
    query, its = torch.zeros(1, 2, 4, 8), block(range(4), range(4), [0] * 4)
    assert choose("cudnn", query, query, its).name == "cudnn"
    assert choose("auto", query, query, its).name != "cudnn"
