import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.attention_case import ORDERS, STRETCHES, plan
from tests.helpers.kernel_blocks import block
from tests.oracles.attention import sees
from tests.oracles.varlen_attention import allowed
from workbench.sharding.attention.segments import Segment, find_calls, segments_of


def rows(count, chosen):
    return torch.arange(count)[chosen]


def seen_by_calls(its):
    """Return how often each query meets each key in all calls of a block."""
    count = torch.zeros(its.shape, dtype=torch.int64)
    for call in find_calls(its):
        queries, keys = rows(its.shape[0], call.query_rows), rows(its.shape[1], call.key_rows)
        assert (int(call.query_starts[-1]), int(call.key_starts[-1])) == (len(queries), len(keys))
        lengths = [starts.diff().tolist() for starts in (call.query_starts, call.key_starts)]
        assert max(lengths[0]) == call.longest_query
        assert max(lengths[1]) == call.longest_key
        for some, others in zip(queries.split(lengths[0]), keys.split(lengths[1]), strict=True):
            before = -1 if call.window is None else call.window - 1
            mask = allowed(len(some), len(others), False, before, 0 if call.causal else -1)
            count[some[:, None], others] += mask
    return count


def seen_by_rule(its, documents):
    keys = its.key_positions_k.tolist()
    return torch.tensor(
        [[sees(at, key, documents, its.window) for key in keys] for at in its.query_positions_q.tolist()],
        dtype=torch.int64,
    ).view(its.shape)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("order", ORDERS)
def test_every_pair_that_is_allowed_is_in_one_call_and_no_other_is_in_any(order, window):
    lay = plan(order, 2)
    for rank in range(2):
        for keys in (lay.permutation_T, lay.positions(0), lay.positions(1)):
            its = block(lay.positions(rank), keys, STRETCHES, window)
            torch.testing.assert_close(seen_by_calls(its), seen_by_rule(its, STRETCHES), rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_queries_against_any_keys_in_any_order(data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = st.lists(st.sampled_from(range(len(documents))), unique=True)
    its = block(
        torch.tensor(data.draw(places), dtype=torch.int64),
        torch.tensor(data.draw(places), dtype=torch.int64),
        documents,
        data.draw(st.one_of(st.none(), st.integers(1, 5))),
    )
    torch.testing.assert_close(seen_by_calls(its), seen_by_rule(its, documents), rtol=0, atol=0)


def test_a_chunk_of_a_document_is_one_causal_segment_over_its_earlier_keys():
    its = block([2, 3, 4, 5], range(6), [0, 0, 0, 0, 1, 1])
    assert segments_of(its) == [Segment((0, 2), (0, 4), True, None), Segment((2, 4), (4, 6), True, None)]


def test_a_document_of_one_token_leaves_the_next_one_whole():
    its = block(range(5), range(5), [0, 1, 2, 2, 2])
    assert [segment.queries for segment in segments_of(its)] == [(0, 1), (1, 2), (2, 5)]


def test_keys_that_are_all_earlier_need_no_mask():
    its = block([4, 5, 6], [0, 1, 2], [0] * 7)
    assert segments_of(its) == [Segment((0, 3), (0, 3), False, None)]


def test_a_striped_shard_meets_the_keys_of_one_rank_in_a_segment_a_document():
    documents = [0] * 6 + [1] * 6
    its = block(range(1, 12, 2), range(0, 12, 2), documents)
    assert segments_of(its) == [Segment((0, 3), (0, 3), True, None), Segment((3, 6), (3, 6), True, None)]


def test_a_single_query_joins_the_calls_that_there_are():
    its = block([3, 4, 7], [0, 1, 2, 5, 6], [0, 0, 0, 0, 0, 1, 1, 1])
    assert [segment.causal for segment in segments_of(its)] == [False, None]
    assert [call.causal for call in find_calls(its)] == [False]


def test_a_window_that_cuts_is_the_width_at_the_last_query():
    its = block(range(6), range(6), [0] * 6, window=2)
    assert segments_of(its) == [Segment((0, 6), (0, 6), True, 2)]
    apart = block([6, 7, 8], [0, 1, 2, 3, 4], [0] * 9, window=5)  # they see 2 3 4, then 3 4, then 4
    assert segments_of(apart) == [Segment((0, 3), (2, 5), False, 1)]


def test_keys_in_the_order_of_the_row_are_taken_where_they_lie():
    its = block([3, 4, 7, 8], range(10), [0] * 2 + [1] * 4 + [2] * 4)
    (call,) = find_calls(its)
    assert (call.query_rows, call.key_rows, call.repeats) == (slice(0, 4), slice(0, 10), False)
    assert call.query_starts.tolist() == [0, 0, 2, 2, 4, 4]
    assert call.key_starts.tolist() == [0, 2, 5, 6, 9, 10]


def test_unseen_keys_are_split_into_short_segments():
    its = block([1000, 1001], range(1600), [0] * 1000 + [1] * 600)
    (call,) = find_calls(its)
    assert call.key_starts.diff().tolist() == [512, 488, 2, 512, 86]
    assert call.query_starts.diff().tolist() == [0, 0, 2, 0, 0]


def test_reordered_keys_are_gathered_and_repeats_are_detected():
    head_and_tail = [0, 1, 6, 7]
    its = block(head_and_tail, [0, 1, 6, 7, 2, 3, 4, 5], [0] * 8)
    (call,) = find_calls(its)
    assert call.key_rows.tolist() == [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]
    assert call.repeats
    assert call.query_starts.tolist() == [0, 2, 4]


def test_queries_that_see_nothing_stand_in_no_call():
    its = block([0, 5, 1, 6], [4, 5, 6], [0] * 4 + [1] * 4)
    (call,) = find_calls(its)
    assert call.query_rows.tolist() == [1, 3]
    assert find_calls(block([0, 1], [4, 5], [0] * 6)) == []


def test_segments_are_computed_once_per_block():
    its = block(range(4), range(4), [0] * 4)
    assert segments_of(its) is segments_of(its)
