"""Orders: the rank of each token, against manual values and the reference table of index maps."""

import itertools

import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.orders import ORDERS, Multiples, block_work, document_lengths, padding_rule


def dealt(order, lengths, cp, block_tokens=1):
    return [local.tolist() for local in ORDERS[order](lengths, cp, block_tokens)]


def test_striped_deals_token_by_token():
    assert dealt("striped", [9], 3) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_document_zigzag_is_a_zigzag_in_each_document():
    assert dealt("document_zigzag", [4, 8, 4], 2) == [[0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14]]


def test_a_document_zigzag_of_one_document_is_the_zigzag():
    assert dealt("document_zigzag", [24], 3) == dealt("zigzag", [24], 3)


def test_blocks_are_dealt_there_and_back_by_their_work():
    # One document of 8 blocks: works 1..8. Sorted: 8 7 | 6 5 | 4 3 | 2 1, every second row turned round.
    assert dealt("balanced", [8], 2) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    # Works 1..6: 6 5 | 4 3 | 2 1. The most goes first, so rank 0 ends with 6, 3 and 2.
    assert dealt("balanced", [6], 2) == [[1, 2, 5], [0, 3, 4]]
    # 12 blocks over 3 ranks; blocks of two tokens.
    assert dealt("balanced", [24], 3, 2) == [
        [0, 1, 10, 11, 12, 13, 22, 23],
        [2, 3, 8, 9, 14, 15, 20, 21],
        [4, 5, 6, 7, 16, 17, 18, 19],
    ]


def test_equal_work_is_dealt_in_the_order_of_the_row():
    assert dealt("balanced", [1, 1, 1, 1], 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("lengths", "block_tokens"),
    [([8], 2), ([1, 1, 2], 1), ([3, 5, 8], 4), ([7, 1, 4, 4], 4), ([2, 30], 8), ([5, 5, 5, 5, 12], 4)],
)
def test_the_work_of_a_block_is_the_blocks_it_looks_at(lengths, block_tokens):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(ids))
    sees = (ids[:, None] == ids) & (at[:, None] >= at)
    blocks = sees.view(len(ids) // block_tokens, block_tokens, -1, block_tokens).any(3).any(1)
    assert block_work(lengths, block_tokens).tolist() == blocks.sum(1).tolist()


def test_documents_stay_whole_on_the_rank_with_the_least_work_that_has_room():
    # Longest first: 8 to rank 0 and 8 to rank 1, then fours in turn.
    assert dealt("whole_documents", [4, 8, 4, 8, 4, 4], 2) == [
        [*range(12), *range(24, 28)],
        [*range(12, 24), *range(28, 32)],
    ]


def test_a_rank_without_room_gets_no_document_however_little_its_work():
    # 12 tokens a rank. When the ones are dealt, the last rank has 6 3 3, the least work, and no room.
    assert dealt("whole_documents", [6, 6, 6, 5, 5, 3, 3, 1, 1], 3) == [
        [*range(6), *range(18, 23), 34],
        [*range(6, 12), *range(23, 28), 35],
        [*range(12, 18), *range(28, 34)],
    ]


def test_documents_of_more_than_half_a_rank_are_in_zigzag_and_what_has_no_room_is_cut():
    assert dealt("whole_documents", [16, 8, 8, 16], 2) == [  # 24 tokens a rank
        [*range(4), *range(12, 16), *range(16, 24), *range(32, 36), *range(44, 48)],
        [*range(4, 12), *range(24, 32), *range(36, 44)],
    ]
    # 16 of 24 tokens in zigzag; 4 to rank 0, and the other 4 to rank 1.
    assert dealt("whole_documents", [4, 16, 4], 2) == [
        [*range(4), *range(4, 8), *range(16, 20)],
        [*range(8, 16), *range(20, 24)],
    ]
    # 15 tokens a rank: 7 + 6 each, and the last 6 to the first. The line is 3 0 6, 4 1, 5 2, cut at 15 and 30.
    assert dealt("whole_documents", [7, 7, 7, 6, 6, 6, 6], 3) == [
        [*range(7), *range(21, 27), 39, 40],
        [*range(7, 12), *range(27, 33), *range(41, 45)],
        [*range(12, 21), *range(33, 39)],
    ]


@pytest.mark.parametrize(
    ("order", "lengths", "block_tokens", "most"),
    [
        ("document_zigzag", [4096], 1, 4 / 3),
        ("contiguous", [4096], 1, 4 / 3),
        ("balanced", [4096], 256, 1.0),
        ("striped", [4096], 1, 1.0),
        ("document_zigzag", [256] * 16, 1, 4 / 3),
        ("whole_documents", [256] * 16, 1, 1.0),
    ],
)
def test_trained_tokens_of_the_fullest_of_four_ranks_where_a_quarter_is_prompt(order, lengths, block_tokens, most):
    """As docs/guides/layouts.md says, section "Equal work"."""
    begins = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    places = torch.arange(sum(lengths)) - begins.repeat_interleave(torch.tensor(lengths))
    trained = places >= torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)) // 4
    counts = [int(trained[tokens].sum()) for tokens in ORDERS[order](lengths, 4, block_tokens)]
    assert max(counts) * 4 / sum(counts) == pytest.approx(most)


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_whole_documents_are_a_permutation_in_equal_shares_with_few_documents_cut(cp, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = [2 * cp * int(n) for n in torch.randint(1, 40, (30,), generator=draw)]
    shares = dealt("whole_documents", lengths, cp)
    assert sorted(itertools.chain(*shares)) == list(range(sum(lengths)))
    assert {len(share) for share in shares} == {sum(lengths) // cp}
    assert all(share == sorted(share) for share in shares)
    ends = torch.tensor(lengths).cumsum(0)
    ranks = [{int(torch.searchsorted(ends, token, right=True)) for token in share} for share in shares]
    holders = [[rank for rank, of in enumerate(ranks) if number in of] for number in range(len(lengths))]
    cut = [some for some, length in zip(holders, lengths, strict=True) if 2 * length <= sum(lengths) // cp and some[1:]]
    assert len(cut) < cp
    assert all(some == [some[0], some[0] + 1] for some in cut), "a seam is between neighbours"


@pytest.mark.parametrize(
    ("order", "settings", "rule"),
    [
        ("contiguous", {}, Multiples(4)),
        ("striped", {}, Multiples(4)),
        ("zigzag", {}, Multiples(8)),
        ("document_zigzag", {}, Multiples(8, 8)),
        ("whole_documents", {}, Multiples(8, 8)),
        ("balanced", {}, Multiples(512)),
        ("balanced", {"block_tokens": 6}, Multiples(24)),
        ("contiguous", {"tp": 3}, Multiples(12)),
        ("zigzag", {"tp": 2}, Multiples(8)),
        ("zigzag", {"tp": 4}, Multiples(16)),
        ("document_zigzag", {"tp": 4}, Multiples(16, 8)),
        ("balanced", {"block_tokens": 6, "tp": 4}, Multiples(48)),
    ],
)
def test_divisibility_of_each_order(order, settings, rule):
    assert padding_rule(order, 4, **settings) == rule
    assert rule.row // 4 % settings.get("tp", 1) == 0, "each tp rank takes equally many of a cp rank's tokens"


def test_invalid_orders_are_refused():
    with pytest.raises(ShardingError, match="order 'zagzig'"):
        padding_rule("zagzig", 2)
    with pytest.raises(ShardingError, match=r"block_tokens=0(.|\n)*all are at least 1"):
        padding_rule("balanced", 2, block_tokens=0)


@pytest.mark.parametrize(
    ("ids", "multiple_of", "lengths"),
    [
        ([0, 0, 0, 1, 1, -1], 1, (3, 2, 1)),
        ([0, 0, 0, -1, 1, 1, -1, -1], 4, (4, 4)),
        ([0, 0, 0, -1, 1, 1, -1, -1], 2, (4, 2, 2)),
        ([0, 0, 0, 0], 4, (4,)),
        ([-1, -1], 4, (2,)),
    ],
)
def test_documents_are_read_off_with_their_padding(ids, multiple_of, lengths):
    assert document_lengths(torch.tensor(ids), multiple_of) == lengths


@pytest.mark.parametrize(
    ("ids", "multiple_of"),
    [([0, 0, 0, 1, 1, -1], 2), ([0, 0, -1, -1, 1, 1], 1), ([0, 0, -1, -1, 1, 1], 2), ([-1, 0, 0], 1)],
)
def test_documents_with_other_padding_are_refused(ids, multiple_of):
    with pytest.raises(ShardingError, match="a document begins where the padding of the one before it ends"):
        document_lengths(torch.tensor(ids), multiple_of)
