"""Shares of ranks: every rank in one, dealt by grids or declared by each rank for itself."""

import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.sides import Share, Side, blocks, declare, numbers, sharded, stacked, whole
from workbench.sharding.simulated import simulate


def tokens(*numbers_t):
    return torch.tensor(numbers_t, dtype=torch.int64)


def held(side):
    return [(share.ranks, share.tokens_t.tolist()) for share in side.shares]


@pytest.mark.parametrize("ranks", [[(0, 1), (1,)], [(0,), (2,)], []])
def test_a_rank_in_no_share_or_in_two_is_refused(ranks):
    with pytest.raises(ShardingError, match="every rank from 0 on is in exactly one share"):
        Side(tuple(Share(one, tokens(0)) for one in ranks))


def test_tokens_that_grids_assign():
    grid = Grid.of(tp=2, cp=2, offset=4)
    replicas = sharded(grid, lambda dp, cp, tp: tokens(10 * cp + tp))
    assert held(replicas) == [((0, 1), [0]), ((2, 3), [10])]
    assert held(sharded(grid, lambda dp, cp, tp: tokens(10 * cp + tp), over_tp=True)) == [
        ((0,), [0]),
        ((1,), [1]),
        ((2,), [10]),
        ((3,), [11]),
    ]
    both = whole(grid, lambda dp: tokens(3, -1, 4), lambda dp, cp: torch.tensor([cp == 0, True, cp == 1]))
    assert held(both) == [((0, 1), [3, -1, 4]), ((2, 3), [3, -1, 4])]
    assert [share.gradient_rows_t.tolist() for share in both.shares] == [[True, False, False], [False, False, True]]
    assert [side.number_of for side in (replicas, both)] == [(0, 0, 1, 1)] * 2
    assert replicas.share_of[3] is replicas.shares[1]


def test_ranks_declare_their_tokens_possibly_none():
    def of_rank(mesh):
        rank = mesh["dp"].rank
        return held(declare(tokens(*range(rank // 2, 3)), mesh["dp"], replica_id=7 - rank // 2))

    assert simulate(of_rank, dp=8) == [[((0, 1), [0, 1, 2]), ((2, 3), [1, 2]), ((4, 5), [2]), ((6, 7), [])]] * 8


def test_replicas_with_different_tokens_are_refused():
    with pytest.raises(ShardingError, match=r"ranks 0 and 2 as replicas \(alike = 0\)\n  found: 1 and 1 rows"):
        simulate(lambda mesh: declare(tokens(mesh["dp"].rank // 2), mesh["dp"], replica_id=0), dp=4)


def test_samples_are_dealt_in_order_as_evenly_as_possible():
    assert blocks(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert blocks(1, 3) == [(0, 1), (1, 1), (1, 1)]
    assert stacked([2, 0, 3]) == [(0, 2), (2, 2), (2, 5)]
    assert numbers((1, 3), 10, tokens(4, 2)).tolist() == [14, 12, 24, 22]
    assert numbers((1, 1), 10, tokens(4, 2)).tolist() == []
