import types

import pytest
import torch

from tests.helpers.attention_case import ORDERS, assert_right, by_ranks
from tests.helpers.kernel_blocks import block, by_blocks
from tests.helpers.stand_in import stand_in
from tests.oracles import varlen_attention
from workbench.errors import ShardingError
from workbench.sharding.attention import kernels
from workbench.sharding.attention.kernels import choose, flash
from workbench.sharding.attention.kernels.flash import FlashKernel, Operators

STAND_IN = Operators(varlen_attention.forward, varlen_attention.backward)


class Watched:
    """The stand-in, and its calls."""

    def __init__(self):
        self.calls = []

    def forward(self, *tensors, **options):
        self.calls.append((tensors, options))
        return varlen_attention.forward(*tensors, **options)

    def backward(self, *tensors, **options):
        self.calls.append((tensors, options))
        return varlen_attention.backward(*tensors, **options)


def token_major(heads, tokens, dtype=torch.float64):
    """[1, heads, tokens, 8] as a decoder makes it: the memory has one token after another."""
    return torch.randn(1, tokens, heads, 8, dtype=dtype).transpose(1, 2)


def on_a_gpu(query):
    """The tensor properties that a refusal reads, as if the tensor were on a GPU."""
    return types.SimpleNamespace(device=torch.device("cuda", 0), dtype=query.dtype, shape=query.shape)


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(
        flash,
        "torch",
        stand_in(
            torch,
            cuda=stand_in(torch.cuda, get_device_capability=lambda _: capability),
            backends=stand_in(
                torch.backends, cuda=stand_in(torch.backends.cuda, is_flash_attention_available=lambda: True)
            ),
        ),
    )


@pytest.fixture
def hopper(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_give_the_attention_of_the_row_and_its_gradients(order, at_once, window):
    heads = (4, 2) if at_once else (3, 1)
    assert_right(by_blocks(FlashKernel(STAND_IN), order, 4, heads, window, at_once=at_once), heads, window, atol=2e-6)


@pytest.mark.parametrize(("algorithm", "inner"), [("gathered", 1), ("ring", 1), ("ulysses", 4), ("hybrid", 2)])
def test_every_algorithm_can_stand_on_it(monkeypatch, algorithm, inner):
    monkeypatch.setattr(FlashKernel, "_refused_tensors", lambda *_: None)
    monkeypatch.setattr(kernels, "KERNELS", (FlashKernel(STAND_IN),))
    by_rank = by_ranks("zigzag", 4, algorithm, (8, 4), inner=inner, window=9, kernel="flash")
    assert_right(by_rank, (8, 4), 9, atol=2e-6)


@pytest.mark.parametrize(("algorithm", "inner"), [("gathered", 1), ("ring", 1), ("ulysses", 4), ("hybrid", 2)])
def test_every_algorithm_in_the_dtype_of_its_results(monkeypatch, algorithm, inner):
    """Which are narrower than what several blocks add to."""

    def halved(one):
        return one.bfloat16() if isinstance(one, torch.Tensor) and one.dim() == 3 else one  # not normalisers

    def narrow(operator):
        def compute(*arguments, **options):
            halves = [isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 for one in arguments]
            wide = [one.float() if half else one for one, half in zip(arguments, halves, strict=True)]
            return tuple(map(halved, operator(*wide, **options)))

        return compute

    monkeypatch.setattr(FlashKernel, "_refused_tensors", lambda *_: None)
    stand_in = Operators(narrow(STAND_IN.forward), narrow(STAND_IN.backward))
    monkeypatch.setattr(kernels, "KERNELS", (FlashKernel(stand_in),))
    by_rank = by_ranks("zigzag", 4, algorithm, (8, 4), inner=inner, kernel="flash", dtype=torch.bfloat16)
    assert {one.dtype for one in by_rank} == {torch.bfloat16}
    assert_right(by_rank, (8, 4), atol=0.15)


@pytest.mark.parametrize("order", ["contiguous", "balanced"])
def test_a_rank_alone(order):
    assert_right(by_blocks(FlashKernel(STAND_IN), order, 1, (2, 2), at_once=True), (2, 2), atol=2e-6)


@pytest.mark.parametrize("keys", [range(40), [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_the_operators_of_this_torch_accept_our_arguments(keys):
    kernel, its = FlashKernel(), block([2, 3, 14, 15], keys, [0] * 40, window=7)
    query, key = (
        torch.empty(1, n, heads, 16, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for n, heads in ((4, 6), (len(keys), 2))
    )
    out, lse = kernel.forward(query, key, key, its, 0.3)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, query.dtype, (1, 6, 4), torch.float32)
    gradients = kernel.backward(out, query, key, key, out, lse, its, 0.3)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]


def test_a_row_in_its_own_order_is_one_call_that_copies_nothing():
    watched = Watched()
    kernel, its = FlashKernel(watched), block(range(12), range(12), [0] * 5 + [1] * 7)
    query, key, value = token_major(4, 12), token_major(2, 12), token_major(2, 12)
    out, lse = kernel.forward(query, key, value, its, 0.3)
    gradients = kernel.backward(out, query, key, value, out, lse, its, 0.3)
    forward, backward = (tensors for tensors, _ in watched.calls)
    assert [x.data_ptr() for x in forward[:3]] == [x.data_ptr() for x in (query, key, value)]
    assert [x.data_ptr() for x in backward[:6]] == [x.data_ptr() for x in (out, query, key, value, out, lse)]
    assert all(x.dtype == torch.float64 for x in gradients)


def test_keys_that_lie_in_order_are_not_copied_for_a_shard_either():
    watched = Watched()
    query, key = token_major(4, 3), token_major(2, 12)
    FlashKernel(watched).forward(query, key, key, block([6, 7, 8], range(12), [0] * 5 + [1] * 7), 0.3)
    ((tensors, options),) = watched.calls
    assert [x.data_ptr() for x in tensors[:2]] == [query.data_ptr(), key.data_ptr()]
    assert tensors[3].tolist() == [0, 0, 3, 3]
    assert tensors[4].tolist() == [0, 5, 9, 12]
    assert (tensors[8], options["window_size_left"], options["window_size_right"]) == (True, -1, 0)


@pytest.mark.parametrize(
    ("queries", "keys", "window", "mask"),
    [
        ([4, 5], [0, 1], None, (False, -1, -1)),
        ([4, 5], range(6), 3, (False, 2, 0)),
        ([4, 5], range(3), 4, (False, 0, -1)),
    ],
)
def test_masks_match_torch(queries, keys, window, mask):
    watched = Watched()
    query, key = token_major(1, 2), token_major(1, len(keys))
    FlashKernel(watched).forward(query, key, key, block(queries, keys, [0] * 6, window), 0.3)
    ((tensors, options),) = watched.calls
    assert (tensors[8], options["window_size_left"], options["window_size_right"]) == mask
    assert options["scale"] == 0.3


def test_gradients_of_keys_that_stand_twice_are_added_in_float32():
    kernel, its = FlashKernel(), block([0, 1, 6, 7], [0, 1, 6, 7, 2, 3, 4, 5], [0] * 8)
    query, key = (torch.empty(1, 2, n, 8, dtype=torch.bfloat16, device="meta") for n in (4, 8))
    out, lse = kernel.forward(query, key, key, its, 0.3)
    assert [x.dtype for x in kernel.backward(out, query, key, key, out, lse, its, 0.3)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


def test_a_block_in_which_nothing_is_seen_calls_nothing():
    watched = Watched()
    kernel, its = FlashKernel(watched), block([0, 1], [2, 3, 4], [0] * 5)
    query, key = token_major(2, 2), token_major(1, 3)
    out, lse = kernel.forward(query, key, key, its, 0.3)
    assert (out.count_nonzero(), lse.isneginf().all()) == (0, True)
    assert [x.count_nonzero() for x in kernel.backward(out, query, key, key, out, lse, its, 0.3)] == [0, 0, 0]
    assert watched.calls == []


def test_heads_that_the_operator_could_not_read_are_copied():
    watched = Watched()
    query = torch.randn(1, 2, 8, 4, dtype=torch.float64).mT  # head dimension not the fastest
    FlashKernel(watched).forward(query, query, query, block(range(4), range(4), [0] * 4), 0.3)
    assert [x.stride(-1) for x in watched.calls[0][0][:3]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "d", "words"),
    [
        (torch.float32, 64, "bfloat16 or float16, and queries are float32"),
        (torch.bfloat16, 12, "multiples of 8"),
        (torch.bfloat16, 264, "up to 256"),
    ],
)
def test_unsupported_operands_are_refused(hopper, dtype, d, words):
    query = on_a_gpu(torch.empty(1, 2, 4, d, dtype=dtype, device="meta"))
    assert words in FlashKernel(STAND_IN).refusal(query, query, block(range(4), range(4), [0] * 4))


def test_a_gpu_before_ampere_and_a_torch_without_the_operator_are_refused(hopper, monkeypatch):
    query, its = on_a_gpu(torch.empty(1, 2, 4, 64, dtype=torch.bfloat16, device="meta")), block([0], [0], [0])
    assert FlashKernel(STAND_IN).refusal(query, query, its) is None
    monkeypatch.setattr(Operators, "of_torch", classmethod(lambda _: None))
    assert "has no flash attention operator" in FlashKernel().refusal(query, query, its)
    pretend_gpu(monkeypatch, (7, 5))
    assert "compute capability 8.0" in FlashKernel(STAND_IN).refusal(query, query, its)


def test_an_order_that_needs_too_many_keys_is_refused_with_their_number(hopper):
    query = on_a_gpu(torch.empty(1, 2, 32, 64, dtype=torch.bfloat16, device="meta"))
    striped = block(range(1, 64, 2), [*range(0, 64, 2), *range(1, 64, 2)], [0] * 64)
    result = FlashKernel(STAND_IN).refusal(query, query, striped)
    assert "1056 keys of 64 for 32 runs of queries" in result
    assert "at most 8 times" in result


def test_a_window_over_keys_with_many_gaps_is_refused(hopper):
    query = on_a_gpu(torch.empty(1, 2, 20, 64, dtype=torch.bfloat16, device="meta"))
    documents = [number for number in range(10) for _ in range(20)]
    queries = [20 * number + place for number in range(10) for place in (15, 16)]
    keys = [20 * number + place for number in range(10) for place in range(11 - number)]
    result = FlashKernel(STAND_IN).refusal(query, query, block(queries, keys, documents, window=16))
    assert "10, of at most 8" in result


def test_on_a_cpu_it_is_refused_by_name_and_passed_over():
    query, its = torch.empty(1, 2, 4, 64, dtype=torch.bfloat16), block(range(4), range(4), [0] * 4)
    with pytest.raises(ShardingError, match="flash runs on an NVIDIA GPU, and queries are on cpu"):
        choose("flash", query, query, its)
    assert choose("auto", query, query, its).name == "plain"


@pytest.mark.parametrize("change", ["cum_seq_q", "window_size_left"])
def test_an_operator_with_other_arguments_is_not_used(monkeypatch, change):
    def renamed(operator):
        known = operator.default._schema.arguments
        arguments = [
            types.SimpleNamespace(name="other" if one.name == change else one.name, kwarg_only=one.kwarg_only)
            for one in known
        ]
        return types.SimpleNamespace(default=types.SimpleNamespace(_schema=types.SimpleNamespace(arguments=arguments)))

    assert Operators.of_torch() is not None
    aten = torch.ops.aten
    monkeypatch.setattr(
        flash,
        "torch",
        stand_in(
            torch,
            ops=stand_in(
                torch.ops, aten=stand_in(aten, _flash_attention_backward=renamed(aten._flash_attention_backward))
            ),
        ),
    )
    assert Operators.of_torch() is None
