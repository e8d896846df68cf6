import types

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.helpers.attention_case import ORDERS, SCALE, assert_right
from tests.helpers.kernel_blocks import block, by_blocks
from tests.helpers.stand_in import stand_in
from workbench.errors import ShardingError
from workbench.sharding.attention.kernels import choose, flex
from workbench.sharding.attention.kernels.flex import FlexKernel, block_mask, tiles
from workbench.sharding.attention.kernels.plain import PlainKernel


def attend(query, key, value, its, scale):
    """FlexAttention in plain torch: its backward knows the block's own normaliser and no other."""
    share = query.shape[1] // key.shape[1]
    scores = scale * query @ key.repeat_interleave(share, 1).mT
    empty_q = ~its.allowed_qk.any(1)[:, None]
    scores = scores.masked_fill(~its.allowed_qk & ~empty_q, -torch.inf)
    out = scores.softmax(-1) @ value.repeat_interleave(share, 1)
    return out.masked_fill(empty_q, 0), scores.logsumexp(-1).masked_fill(empty_q[:, 0], -torch.inf)


def shuffled(queries, keys, documents, window=None):
    return block(torch.randperm(len(documents))[:queries], torch.randperm(len(documents))[:keys], documents, window)


@pytest.fixture
def in_torch(monkeypatch):
    """FlexAttention without a compiler behind it, which runs anywhere; torch refuses gradients on a CPU needlessly."""

    def with_backend(backend):
        known = vars(torch_flex) | {"_validate_device": lambda *_: None}
        unchecked = types.FunctionType(torch_flex.flex_attention.__code__, known, "flex_attention")
        unchecked.__kwdefaults__ = torch_flex.flex_attention.__kwdefaults__
        unchecked.__defaults__ = torch_flex.flex_attention.__defaults__
        compiled = torch.compile(unchecked, fullgraph=True, backend=backend)
        monkeypatch.setattr(flex, "_compiled", lambda: compiled)
        return FlexKernel()

    yield with_backend
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_give_the_attention_of_the_row_and_its_gradients(order, at_once, window):
    heads = (4, 2) if at_once else (3, 1)
    assert_right(by_blocks(FlexKernel(attend), order, 4, heads, window, at_once=at_once), heads, window)


def test_a_query_that_sees_nothing_anywhere_hands_on_no_gradient():
    handed = []

    def watched(*call):
        for result in (text := attend(*call)):
            if result.requires_grad:
                result.register_hook(handed.append)
        return text

    its = block([0, 5], [4, 5, 6], [0] * 3 + [1] * 4)
    query, key = torch.randn(1, 2, 2, 4, dtype=torch.float64), torch.randn(1, 2, 3, 4, dtype=torch.float64)
    out, lse = FlexKernel(watched).forward(query, key, key, its, SCALE)
    FlexKernel(watched).backward(torch.randn_like(out), query, key, key, out, lse, its, SCALE)
    assert lse[0, :, 0].isneginf().all()
    assert [x[:, :, 0].count_nonzero() for x in handed] == [0, 0]


@pytest.mark.parametrize("window", [None, 40, 300])
def test_full_and_empty_tiles_are_detected(window):
    documents = [0] * 300 + [1] * 500 + [2] * 90
    for its in (block(range(128, 890), range(890), documents, window), shuffled(300, 600, documents, window)):
        some_mn, whole_mn = tiles(its)
        for m, queries in enumerate(its.allowed_qk.split(flex.TILE)):
            for n, pairs in enumerate(queries.split(flex.TILE, dim=1)):
                assert some_mn[m, n] or whole_mn[m, n] or not pairs.any()
                assert pairs.all() or not whole_mn[m, n]
                assert not (some_mn[m, n] and whole_mn[m, n])


def test_tiles_of_rows_in_order_are_not_computed_in_vain():
    documents = [0] * 256 + [1] * 512
    some_mn, whole_mn = tiles(block(range(768), range(768), documents))
    assert some_mn.nonzero().tolist() == [[m, m] for m in range(6)]
    assert whole_mn.nonzero().tolist() == [[1, 0], [3, 2], [4, 2], [4, 3], [5, 2], [5, 3], [5, 4]]


def test_the_mask_that_torch_is_given_lists_these_tiles():
    mask = block_mask(block(range(768), range(700), [0] * 256 + [1] * 512), torch.device("cpu"))
    assert mask.shape == (1, 1, 768, 700)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0, 1, 2, 3]]]
    assert mask.full_kv_indices[0, 0, 5, :3].tolist() == [2, 3, 4]


def test_a_mask_is_built_once_for_all_layers(monkeypatch):
    masks = []

    def compiled(query, _key, _value, *, block_mask, **_):
        masks.append(block_mask)
        return query, torch_flex.AuxOutput(lse=query[..., 0])

    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    its, query = shuffled(20, 30, [0] * 40), torch.empty(1, 2, 20, 16)
    for _ in range(2):
        FlexKernel().forward(query, query, query, its, SCALE)
    assert masks[0] is masks[1]
    assert masks[0].shape == (1, 1, 20, 30)


def test_torch_applies_the_mask_as_intended(in_torch):
    kernel, documents = in_torch("eager"), [0] * 100 + [1] * 150 + [2] * 50
    for queries, keys in ((170, 290), (65, 300)):
        its = shuffled(queries, keys, documents, 37)
        query, key, value = (
            torch.randn(1, heads, n, 16, dtype=torch.float64) for heads, n in ((4, queries), (2, keys), (2, keys))
        )
        for result, right in zip(
            kernel.forward(query, key, value, its, SCALE),
            PlainKernel().forward(query, key, value, its, SCALE),
            strict=True,
        ):
            torch.testing.assert_close(result, right, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["striped", "balanced"])
def test_torch_s_own_backward_gives_the_gradients_of_the_row(in_torch, order):
    assert_right(by_blocks(in_torch("aot_eager"), order, 2, (4, 2), 9, at_once=False), (4, 2), 9)


@pytest.mark.slow
def test_lengths_that_differ_are_not_each_compiled(in_torch):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    kernel = in_torch(backend)
    for queries, keys in ((700, 1400), (800, 1500), (900, 1700), (1000, 1900), (1100, 2000)):
        query, key = torch.randn(1, 2, queries, 16), torch.randn(1, 1, keys, 16)
        kernel.forward(query, key, key, shuffled(queries, keys, [0] * 2000), SCALE)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "words"),
    [
        (torch.float64, 64, (9, 0), "at most 32 bits, and queries are float64"),
        (torch.float32, 8, (9, 0), "head dimensions of at least 16, not 8"),
        (torch.bfloat16, 64, (7, 5), "capability 8.0"),
        (torch.float32, 64, (9, 0), None),
    ],
)
def test_unsupported_operands_are_refused(monkeypatch, dtype, d, capability, words):
    monkeypatch.setattr(
        flex, "torch", stand_in(torch, cuda=stand_in(torch.cuda, get_device_capability=lambda _: capability))
    )
    query = types.SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, 2, 4, d))
    result = FlexKernel(attend).refusal(query, query, block(range(4), range(4), [0] * 4))
    assert result == words or words in result


def test_on_a_cpu_it_is_refused_by_name():
    query = torch.empty(1, 2, 4, 64)
    with pytest.raises(ShardingError, match="flex is compiled for a GPU, and queries are on cpu"):
        choose("flex", query, query, block(range(4), range(4), [0] * 4))


def test_auto_does_not_compile_for_a_few_scores(monkeypatch):
    monkeypatch.setattr(FlexKernel, "refusal", lambda *_: None)
    its = block(range(4), range(4), [0] * 4)
    few, many = (torch.empty(1, 2, n, 64, device="meta") for n in (4096, 16384))
    assert choose("auto", few, few, its).name == "plain"
    assert choose("auto", many, many, its).name == "flex"
