"""Tokens and heads of a rank before and after heads are exchanged, and the keys that it meets."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.attention_case import DOCUMENTS, ORDERS, STRETCHES, plan
from tests.oracles.attention import sees
from workbench.errors import ShardingError
from workbench.sharding.attention import sharded_attention
from workbench.sharding.attention.shard import AttentionShard, Block
from workbench.sharding.mesh import Axis

IDS = torch.tensor(DOCUMENTS)


def shard(order, algorithm, rank, *, cp=4, inner=1):
    return AttentionShard.make(
        plan(order, cp),
        IDS,
        Axis("cp", cp, rank),
        algorithm=algorithm,
        inner=Axis("cp_inner", inner, rank % inner),
        outer=Axis("cp_outer", cp // inner, rank // inner),
    )


def test_stretches_of_padding_are_documents_of_their_own():
    assert shard("contiguous", "gathered", 0).documents_T.tolist() == STRETCHES


def test_a_zigzag_shard_sees_by_place_and_not_by_local_row():
    documents, lay = torch.zeros(8, dtype=torch.int64), plan("zigzag", 2)
    lay = type(lay).make("zigzag", num_tokens=8, cp=2)
    made = AttentionShard.make(lay, documents, Axis("cp", 2, 1))
    # Rank 1 has 2, 3, 4, 5; keys arrive as 0, 1, 6, 7, 2, 3, 4, 5.
    assert made.block().allowed_qk.int().tolist() == [
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 1, 0],
        [1, 1, 0, 0, 1, 1, 1, 1],
    ]
    assert made.block(0).allowed_qk.int().tolist() == [[1, 1, 0, 0]] * 4
    assert made.block(window=3).allowed_qk.sum(1).tolist() == [3] * 4


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize(("algorithm", "inner"), [("gathered", 1), ("ring", 1), ("ulysses", 4), ("hybrid", 2)])
def test_all_ranks_cover_the_row_once_and_neighbours_in_order(order, algorithm, inner):
    lay = plan(order, 4)
    for rank in range(4):
        made = shard(order, algorithm, rank, inner=inner)
        assert made.outer_positions_Gs.shape == (4 // inner, len(STRETCHES) * inner // 4)
        assert made.outer_positions_Gs.flatten().sort().values.tolist() == list(range(len(STRETCHES)))
        own = torch.cat([lay.positions(r) for r in range(rank // inner * inner, (rank // inner + 1) * inner)])
        held, device = made.outer_positions_Gs[rank // inner], torch.device("cpu")
        there, back = made.row_order_on(device), made.row_order_on(device, back=True)
        if inner == 1:
            assert torch.equal(held, own)
        else:
            assert torch.equal(held, own.sort().values)
            assert torch.equal(own if there is None else own[there], held)
            assert torch.equal(held if back is None else held[back], own)
            assert (there is None) == (order == "contiguous")


def test_a_block_is_built_once_for_all_layers():
    made = shard("zigzag", "ring", 1)
    assert made.block(2, window=3) is made.block(2, window=3)
    assert len({id(made.block(source, window=window)) for source in (None, 0, 1) for window in (None, 3)}) == 6


def test_on_one_rank_every_algorithm_is_attention_over_the_row():
    for algorithm in ("gathered", "ring", "ulysses", "hybrid"):
        made = AttentionShard.make(plan("zigzag", 1), IDS, Axis("cp"), algorithm=algorithm)
        assert (made.inner.size, made.outer.size) == (1, 1)
        assert torch.equal(made.block().allowed_qk, made.block(0).allowed_qk)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algorithm": "tree"}, "one of gathered, ring, ulysses, hybrid"),
        ({"algorithm": "hybrid"}, "no inner and outer axes"),
        (
            {"algorithm": "hybrid", "inner": Axis("cp_inner", 2), "outer": Axis("cp_outer", 4)},
            "cp is inner times outer",
        ),
    ],
)
def test_invalid_settings_are_refused(given, words):
    with pytest.raises(ShardingError, match=words):
        AttentionShard.make(plan("zigzag", 4), IDS, Axis("cp", 4, 0), **given)


def test_document_positions_are_distinguished_from_padding():
    assert torch.equal(shard("contiguous", "gathered", 0).real_T, IDS != -1)
    assert not bool(shard("contiguous", "gathered", 0).real_T.all())


def test_a_custom_attention_may_be_given():
    made = shard("contiguous", "gathered", 0, cp=1)
    asked = []

    def attend(query, key, value, by, window, scale):
        asked.append((by, window, scale))
        return value

    value = torch.randn(1, 2, len(IDS), 4)
    other = replace(made, attend=attend)
    mixed, _ = sharded_attention(None, value, value, value, None, shard=other, sliding_window=3, scaling=0.5)
    assert torch.equal(mixed, value.transpose(1, 2))
    assert asked == [(other, 3, 0.5)]


def block(queries, keys, window=None, documents=STRETCHES):
    ids = torch.tensor(documents)
    return Block(queries, keys, ids[queries], ids[keys], window)


def written_out(made):
    return [
        [sees(at, key, STRETCHES, made.window) for key in made.key_positions_k.tolist()]
        for at in made.query_positions_q.tolist()
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize("order", ORDERS)
def test_every_property_matches_the_rule(order, window):
    lay = plan(order, 4)
    for rank in range(4):
        for source in range(4):
            made = block(lay.positions(rank), lay.positions(source), window)
            expected = written_out(made)
            assert made.allowed_qk.tolist() == expected
            assert made.sees_q.tolist() == [any(row) for row in expected]
            assert made.is_empty == (not any(map(any, expected)))
            assert made.every_query_sees == all(map(any, expected))


def test_a_row_sees_itself_under_any_window():
    everyone = torch.arange(len(STRETCHES))
    made = block(everyone, everyone, window=1)
    assert torch.equal(made.allowed_qk, torch.eye(len(STRETCHES), dtype=torch.bool))


def test_a_later_key_in_between_hides_no_earlier_one():
    """The last key that is not after a query decides; keys stand in any order."""
    made = block(torch.tensor([3, 9]), torch.tensor([10, 2, 8]), documents=[0] * 12)
    assert (made.allowed_qk.tolist(), made.sees_q.tolist()) == ([[False, True, False], [False, True, True]], [True] * 2)


def test_an_empty_block_has_no_visible_keys():
    made = block(torch.tensor([3, 9]), torch.tensor([], dtype=torch.int64))
    assert made.is_empty
    assert made.sees_q.tolist() == [False, False]


def test_some_of_the_queries_have_their_part_of_the_mask():
    lay = plan("zigzag", 2)
    made = block(lay.positions(1), lay.positions(0), 5)
    assert torch.equal(made.allowed_on("cpu", slice(3, 17)), made.allowed_qk[3:17])


def test_derived_values_are_computed_once():
    made, calls = block(torch.arange(2), torch.arange(2)), []
    results = [made.once(name, lambda name=name: calls.append(name) or [name]) for name in ("a", "b", "a")]
    assert (calls, results) == (["a", "b"], [["a"], ["b"], ["a"]])
    assert results[0] is results[2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("cp", "inner"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_shared_keys_are_those_that_another_rank_sees_and_a_block_has_the_queries_that_see_one(
    order, cp, inner, window
):
    shards = [shard(order, "hybrid", rank, cp=cp, inner=inner) for rank in range(cp)]
    ranks = {each.outer.rank: each for each in shards}
    needed = {}
    for source in ranks:
        seen_k = torch.zeros(len(DOCUMENTS) // len(ranks), dtype=torch.bool)
        for rank, each in ranks.items():
            if rank != source:
                seen_k |= each.block(source, window=window).allowed_qk.any(0)
        needed[source] = seen_k.nonzero()[:, 0].tolist()
    [shared] = {each.shared(window) for each in shards}
    assert shared.count == max(places[-1] - places[0] + 1 if places else 0 for places in needed.values())
    for source, places in needed.items():
        rows = list(range(len(DOCUMENTS) // len(ranks)))[shared.rows(source)]
        assert len(rows) == shared.count
        assert set(places) <= set(rows)
        for rank in ranks.keys() - {source}:
            allowed_qk = ranks[rank].block(source, window=window).allowed_qk
            queries, block = ranks[rank].shared_block(source, window=window)
            assert torch.equal(block.allowed_qk, allowed_qk[queries][:, shared.rows(source)])
            assert int(block.allowed_qk.sum()) == int(allowed_qk.sum())
            seeing = allowed_qk.any(1).nonzero()[:, 0].tolist()
            assert (queries.start, queries.stop) == ((seeing[0], seeing[-1] + 1) if seeing else (0, 0))
