"""The plain kernel against the oracle: any block, in one piece or in many."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.attention_case import SCALE, STRETCHES, T, expected, plan, tensors
from tests.oracles.attention import normaliser
from workbench.sharding.attention.kernels import plain
from workbench.sharding.attention.kernels.plain import PlainKernel
from workbench.sharding.attention.ring import merge
from workbench.sharding.attention.shard import Block

IDS = torch.tensor(STRETCHES)


def block(queries, keys, window=None):
    return Block(queries, keys, IDS[queries], IDS[keys], window)


@pytest.mark.parametrize("scores", [2**18, 5 * 4 * T, 1])
@pytest.mark.parametrize(("heads", "window"), [((4, 2), None), ((4, 1), 3), ((4, 4), 7)])
def test_a_row_in_one_piece_or_in_many_is_the_oracles(heads, window, scores, monkeypatch):
    monkeypatch.setitem(plain._SCORES, "cpu", scores)
    everyone = torch.arange(T)
    made, (query, key, value, d_out) = block(everyone, everyone, window), (x[None] for x in tensors(*heads))
    kernel = PlainKernel()
    assert kernel.refusal(query, key, made) is None
    out, lse = kernel.forward(query, key, value, made, SCALE)
    results = (out, *kernel.backward(d_out, query, key, value, out, lse, made, SCALE))
    for actual, right in zip(results, expected(heads, window), strict=True):
        torch.testing.assert_close(actual[0], right, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        lse[0], normaliser(*tensors(*heads)[:2], STRETCHES, scale=SCALE, window=window), rtol=0, atol=1e-13
    )


def test_queries_without_keys_have_zero_output_and_no_gradient():
    queries, keys = torch.tensor([20, 4, 0, 47]), torch.tensor([3, 2, 19])
    made, (query, key, value, d_out) = block(queries, keys), tensors(4, 2)
    query, key, value = query[None, :, queries], key[None, :, keys], value[None, :, keys]
    out, lse = PlainKernel().forward(query, key, value, made, SCALE)
    assert lse.isneginf()[0].tolist() == [[False, False, True, True]] * 4
    assert not out[:, :, 2:].any()
    result = PlainKernel().backward(d_out[None, :, queries], query, key, value, out, lse, made, SCALE)
    assert all(torch.isfinite(x).all() for x in result)
    assert not result[0][:, :, 2:].any()
    assert result[0][:, :, 1].all()


@pytest.mark.parametrize("scores", [2**18, 1])
def test_gradients_of_blocks_with_the_final_output_and_normaliser_add_up(scores, monkeypatch):
    monkeypatch.setitem(plain._SCORES, "cpu", scores)
    lay, everyone, kernel = plan("zigzag", 4), torch.arange(T), PlainKernel()
    query, key, value, d_out = (x[None] for x in tensors(4, 2))
    keys = [lay.positions(rank) for rank in range(4)]
    blocks = [block(everyone, some) for some in keys]
    parts = [
        kernel.forward(query, key[:, :, some], value[:, :, some], made, SCALE)
        for some, made in zip(keys, blocks, strict=True)
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    gradients = [torch.zeros_like(x) for x in (query, key, value)]
    for some, made in zip(keys, blocks, strict=True):
        d_query, d_key, d_value = kernel.backward(
            d_out, query, key[:, :, some], value[:, :, some], out, lse, made, SCALE
        )
        gradients[0] += d_query
        gradients[1][:, :, some] += d_key
        gradients[2][:, :, some] += d_value
    for actual, right in zip((out, *gradients), expected((4, 2)), strict=True):
        torch.testing.assert_close(actual[0], right, rtol=0, atol=1e-13)


def test_half_precision_is_computed_in_float32():
    everyone = torch.arange(T)
    query, key, value, d_out = (x[None].bfloat16() for x in tensors(4, 2))
    made = block(everyone, everyone)
    out, lse = PlainKernel().forward(query, key, value, made, SCALE)
    wide, wide_lse = PlainKernel().forward(query.float(), key.float(), value.float(), made, SCALE)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    assert torch.equal(out, wide)
    assert torch.equal(lse, wide_lse)
    assert {x.dtype for x in PlainKernel().backward(d_out, query, key, value, out, lse, made, SCALE)} == {torch.float32}


def test_a_small_mask_is_built_once_for_all_layers(monkeypatch):
    made = block(torch.arange(T), torch.arange(T))
    query, key, value, _ = (x[None] for x in tensors(4, 2))
    built = []
    monkeypatch.setattr(plain, "_batch", lambda *of, rule=plain._batch: built.append(1) or rule(*of))
    for _ in range(3):
        PlainKernel().forward(query, key, value, made, SCALE)
    assert len(built) == len(plain._split(made, "cpu", 4))


def scores(made, heads=4):
    """Scores that the kernel computes for a block, over all heads, and those that a query may see."""
    return heads * sum(map(plain._scores, plain._split(made, "cpu", heads))), heads * int(made.allowed_qk.sum())


@pytest.mark.parametrize("order", ["row", "reversed", "shuffled", "striped"])
def test_a_packed_row_is_computed_in_proportion_to_what_it_sees(order):
    """In any order of its tokens; the whole square of 96 documents would be 64 times as much as is seen."""

    def case(documents):
        count = 48 * documents
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        striped = torch.arange(count).view(-1, 4).T.flatten()
        positions = {"row": torch.arange(count), "reversed": torch.arange(count).flip(0), "shuffled": shuffled}
        queries = (positions | {"striped": striped})[order]
        return Block(queries, queries, queries // 48, queries // 48)

    few, many = scores(case(24)), scores(case(96))
    assert many[0] <= 5 * many[1]
    assert many[0] <= 4.1 * few[0]


def test_a_long_document_is_cut_along_its_diagonal():
    everyone = torch.arange(2048)
    made = Block(everyone, everyone, everyone * 0, everyone * 0)
    computed, seen = scores(made)
    assert computed <= 1.1 * seen
    assert max(map(plain._scores, plain._split(made, "cpu", 4))) <= plain._SCORES["cpu"] // 4


def test_a_window_limits_what_is_computed():
    everyone = torch.arange(2048)
    computed, seen = scores(Block(everyone, everyone, everyone * 0, everyone * 0, 32))
    assert computed <= 4 * seen


@pytest.mark.parametrize("most", [2**18, 1])
def test_pieces_hold_every_query_that_sees_a_key_once(most, monkeypatch):
    monkeypatch.setitem(plain._SCORES, "cpu", most)
    made = block(torch.randperm(T)[: T // 2], torch.randperm(T)[: T // 3])
    batches = plain._split(made, "cpu", 1)
    covered = [query for batch in batches for piece in batch for query in piece.queries_n.tolist()]
    assert sorted(covered) == made.sees_q.nonzero().flatten().tolist()


def test_no_key_is_in_two_pieces_of_a_batch():
    """Their gradients are copied, not added: that of a long document, in many pieces, would be one piece's."""
    everyone = torch.arange(640)
    for batch in plain._split(Block(everyone, everyone, everyone // 320, everyone // 320), "cpu", 1):
        keys = torch.cat([piece.keys_k for piece in batch])
        assert len(keys) == len(keys.unique())


def test_many_short_documents_are_a_few_batches():
    documents = torch.arange(72).repeat_interleave(torch.arange(72) % 32 + 7)
    everyone = torch.arange(len(documents))
    made = Block(everyone, everyone, documents, documents)
    batches = plain._split(made, "cpu", 4)
    assert len(batches) <= 6
    assert sum(map(plain._scores, batches)) <= 1.5 * documents.bincount().square().sum()


def peak_of_backward(count):
    """Bytes of all tensors that a backward over one document has alive at a time."""
    everyone, live, peak, known = torch.arange(count), 0, 0, weakref.WeakSet()
    made = Block(everyone, everyone, everyone * 0, everyone * 0)
    query, key, value, d_out = (torch.randn(1, 2, count, 16) for _ in range(4))
    out, lse = PlainKernel().forward(query, key, value, made, SCALE)

    def free(size):
        nonlocal live
        live -= size

    class Alive(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), settings=None):
            nonlocal live, peak
            result = function(*arguments, **(settings or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
                if storage is not None and storage not in known:
                    known.add(storage)
                    live += storage.nbytes()
                    weakref.finalize(storage, free, storage.nbytes())
            peak = max(peak, live)
            return result

    with Alive():
        PlainKernel().backward(d_out, query, key, value, out, lse, made, SCALE)
    return peak


def test_memory_of_the_backward_is_linear_in_the_row():
    """Gradients are added in place: those of pieces that wait for their sum would be a square or a cube."""
    assert 0 < peak_of_backward(4096) <= 4.4 * peak_of_backward(1024)
