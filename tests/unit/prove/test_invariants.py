"""The change of each invariant, and everything that it leaves alone."""

import math

import pytest

from workbench.prove.arrangement import one_rank_policy, one_row
from workbench.prove.documents import Document, draw_documents
from workbench.prove.invariants import (
    DECLARED,
    INVARIANTS,
    SCHEDULES,
    Case,
    Invariant,
    dealt,
    shrink,
    smaller_cases,
    straddled,
)
from workbench.sharding.orders import ORDERS
from workbench.specs.losses import LossSpec

MAY_CHANGE = {
    "dp_split": {"dp", "rows"},
    "micro_batch_split": {"rows"},
    "micro_batch_order": {"rows"},
    "packing_order": {"rows"},
    "cp_degree": {"cp", "attention"},
    "cp_order": {"order"},
    "tp": {"tp", "sequence_parallel"},
    "pipeline": {"pp", "schedule", "stages_per_rank"},
    "expert_degree": {"ep"},
    "routes": {"ep", "replay"},
    "head_chunking": {"chunk_tokens", "fused"},
    "padding": {"multiple_of"},
    "masked_rows": {"documents", "rows"},
    "empty_ranks": {"dp", "cp", "rows"},
    "together": {"dp", "cp", "tp", "rows", "order", "multiple_of", "chunk_tokens"},
}


@pytest.fixture(scope="module")
def documents():
    return draw_documents("5", one_rank_policy())


def pairs(invariant, documents, **settings):
    """The cases of fifteen numbers."""
    made = [invariant.arrange(invariant.draw(documents, number, f"{number}", **settings)) for number in range(15)]
    return [pair for pair in made if pair is not None]


@pytest.mark.parametrize("invariant", INVARIANTS.values(), ids=INVARIANTS)
def test_an_invariant_changes_its_subject_and_nothing_else(invariant, documents):
    changes = set()
    for plain, changed in pairs(invariant, documents):
        differ = {name for name, value in vars(plain).items() if value != getattr(changed, name)}
        assert differ <= MAY_CHANGE[invariant.name], invariant.name
        assert differ, "a case that changes nothing is none"
        changes |= differ
        for arrangement in (plain, changed):
            lying = sorted(number for row in arrangement.rows for number in row)
            assert lying == list(range(len(arrangement.documents))), "every document lies in one row"
            assert len(arrangement.rows) % arrangement.dp == 0
    assert changes == MAY_CHANGE[invariant.name], "and each of these is tried"


@pytest.mark.parametrize(
    "invariant",
    [invariant for invariant in INVARIANTS.values() if not invariant.idle],
    ids=lambda invariant: invariant.name,
)
def test_only_the_idle_rank_invariant_makes_rows_without_work(invariant, documents):
    trained = [document for document in documents if document.trained]
    for pair in pairs(invariant, (*trained[:4], *(document.silent() for document in documents))):
        for arrangement in pair:
            assert all(any(arrangement.documents[number].trained for number in row) for row in arrangement.rows)


def test_documents_lie_across_the_edges_of_shards(documents):
    for name in ("cp_degree", "cp_order"):
        for plain, changed in pairs(INVARIANTS[name], documents):
            assert straddled(plain, changed.cp) >= changed.cp - 2, "of cp - 1 edges"
    few = one_row(documents[:0] + tuple(d for d in documents if d.trained == len(d.tokens) - 1 > 0)[:1])
    length = len(few.documents[0].tokens)
    assert straddled(few, 1) == 0
    assert straddled(few, length) == length - 2, "targets stand on all places but the last"


def test_every_order_and_three_ways_of_attention_are_tried(documents):
    assert {changed.order for _, changed in pairs(INVARIANTS["cp_order"], documents)} == set(ORDERS) - {"contiguous"}
    assert {plain.order for plain, _ in pairs(INVARIANTS["cp_order"], documents)} == {"contiguous"}
    assert {changed.attention for _, changed in pairs(INVARIANTS["cp_degree"], documents)} == {
        "gathered",
        "ring",
        "ulysses",
    }


def test_every_schedule_and_several_micro_batches_are_tried(documents):
    tried = {(changed.schedule, changed.micro_batches) for _, changed in pairs(INVARIANTS["pipeline"], documents)}
    assert tried == {(schedule, count) for schedule in SCHEDULES for count in (1, 2, 3)}
    assert {(plain.dp, plain.cp) for plain, _ in pairs(INVARIANTS["expert_degree"], documents)} == {(2, 1), (1, 2)}


def test_orders_of_micro_batches_and_rows_differ_in_order_only(documents):
    for plain, changed in pairs(INVARIANTS["micro_batch_order"], documents):
        assert sorted(plain.rows) == sorted(changed.rows)
    sizes = {len(plain.rows) for plain, _ in pairs(INVARIANTS["packing_order"], documents)}
    assert sizes == {1, 2}


def test_added_documents_train_nothing_and_may_lie_anywhere(documents):
    places = set()
    for plain, changed in pairs(INVARIANTS["masked_rows"], documents):
        count = len(plain.documents)
        assert changed.documents[:count] == plain.documents
        assert not any(document.trained for document in changed.documents[count:])
        (row,) = changed.rows
        assert [number for number in row if number < count] == list(range(count)), "the others keep their order"
        places |= {row.index(number) for number in range(count, len(row))}
    assert len(places) > 4


def test_an_idle_rank_has_padding_or_masked_documents(documents):
    kinds = set()
    for plain, changed in pairs(INVARIANTS["empty_ranks"], documents):
        assert plain.documents == changed.documents
        idle = [row for row in changed.rows if not any(changed.documents[number].trained for number in row)]
        assert idle or changed.cp == 2
        kinds.add((changed.dp, changed.cp, changed.micro_batches, bool(idle and idle[0])))
    assert {(2, 1, 1, True), (2, 1, 1, False), (1, 1, 2, True), (1, 1, 2, False), (1, 2, 1, False)} <= kinds


def test_groups_stay_together_where_a_loss_needs_them():
    documents = draw_documents("5", one_rank_policy(), pairs=True)
    for name in ("dp_split", "micro_batch_split", "packing_order", "masked_rows", "empty_ranks", "together"):
        for pair in pairs(INVARIANTS[name], documents, together=True):
            for arrangement in pair:
                homes = {}
                for at, row in enumerate(arrangement.rows):
                    for number in row:
                        homes.setdefault(arrangement.documents[number].group_id, set()).add(at)
                assert all(len(rows) == 1 for rows in homes.values()), name


def test_too_few_documents_are_no_case(documents):
    trained = tuple(document for document in documents if document.trained)
    case = INVARIANTS["dp_split"].draw(trained[:2], 0, "0")
    assert dealt(case, 2) is not None
    assert dealt(case, 3) is None
    for name in ("dp_split", "micro_batch_order", "packing_order", "together"):
        assert INVARIANTS[name].arrange(INVARIANTS[name].draw(trained[:1], 1, "0")) is None


def test_a_case_is_the_same_for_the_same_number(documents):
    invariant = INVARIANTS["packing_order"]
    assert invariant.draw(documents, 3, "3") == invariant.draw(documents, 3, "3")
    assert invariant.draw(documents, 3, "3") != invariant.draw(documents, 4, "4")
    assert [invariant.draw(documents, number, "")["micro_batches"] for number in range(4)] == [2, 1, 2, 1]
    case = invariant.draw(documents, 3, "3").with_number("micro_batches", 1)
    assert case["micro_batches"] == 1


def test_every_declarable_name_is_known():
    declared = {word for name in ("bnpo", "clip_cov") for word in LossSpec(name=name).breaks}
    declared |= set(LossSpec(compat={"documents_counted": "all"}, denominator="document").breaks)
    assert declared == set(DECLARED)
    assert {invariant for invariants in DECLARED.values() for invariant in invariants} <= set(INVARIANTS)


LAW = Invariant("made up", "nothing", {"ranks": (2, 3, 4), "kind": (0, 1)}, lambda case: None)


def document(length, group=0):
    zeros = (0.0,) * length
    return Document((1,) * length, (True,) * length, zeros, zeros, zeros, zeros, zeros, 0.0, group, 0)


def case(*lengths, **numbers):
    return Case(tuple(document(length, at) for at, length in enumerate(lengths)), tuple(numbers.items()))


def shape(found):
    return [len(each.tokens) for each in found.documents], dict(found.numbers)


def test_the_smallest_failing_case_is_returned():
    def fails(smaller):
        lengths = [len(each.tokens) for each in smaller.documents]
        return max(lengths) >= 5 and len(lengths) >= 2 and smaller["ranks"] >= 3

    shrunk = shrink(case(9, 4, 12, 3, 7, ranks=4, kind=1), LAW, fails, lambda: True)
    assert sorted(shape(shrunk)[0]) == [1, 5]
    assert shape(shrunk)[1] == {"ranks": 3, "kind": 0}


def test_no_step_from_the_smallest_case_fails_and_none_is_tried_twice():
    tried = []

    def fails(smaller):
        tried.append(smaller)
        lengths = [len(each.tokens) for each in smaller.documents]
        return sum(lengths) >= 7 and smaller["ranks"] >= (3 if len(lengths) > 1 else 2)

    smallest = shrink(case(9, 4, 12, 3, 7, ranks=4, kind=1), LAW, fails, lambda: True)
    assert shape(smallest) == ([7], {"ranks": 2, "kind": 0}), "fewer ranks fail with one document only"
    assert len(set(tried)) == len(tried)
    assert not any(fails(smaller) for smaller in smaller_cases(smallest, LAW))


def test_an_unconditional_failure_shrinks_to_one_token():
    assert shape(shrink(case(9, 4, 3, ranks=2, kind=1), LAW, lambda _: True, lambda: True)) == (
        [1],
        {"ranks": 2, "kind": 0},
    )


def test_a_case_that_cannot_be_smaller_stays():
    start = case(9, 4, ranks=4, kind=1)
    assert shrink(start, LAW, lambda _: False, lambda: True) == start


def test_when_time_is_over_the_best_so_far_is_given_back():
    tries = iter([True, True, False])
    shrunk = shrink(case(8, 8, 8, 8, ranks=2, kind=0), LAW, lambda _: True, lambda: next(tries))
    assert shape(shrunk)[0] == [8], "half of them gone, and half again"


def test_greatest_steps_come_first():
    steps = [shape(smaller) for smaller in smaller_cases(case(4, 4, 6, 1, ranks=3, kind=0), LAW)]
    assert steps[0] == ([4, 4, 6, 1], {"ranks": 2, "kind": 0}), "fewer ranks make all that follows cheaper"
    assert [len(lengths) for lengths, _ in steps[1:7]] == [2, 2, 3, 3, 3, 3]
    assert [lengths for lengths, _ in steps[7:]] == [
        [2, 4, 6, 1],
        [3, 4, 6, 1],
        [4, 2, 6, 1],
        [4, 3, 6, 1],
        [4, 4, 3, 1],
        [4, 4, 5, 1],
    ]


@pytest.mark.parametrize("invariant", INVARIANTS.values(), ids=INVARIANTS)
def test_cases_cross_all_numbers_and_begin_with_the_greatest(invariant, documents):
    combinations = math.prod(len(choices) for choices in invariant.numbers.values())
    drawn = [dict(invariant.draw(documents, number, "0").numbers) for number in range(combinations)]
    named = [tuple(case[name] for name in invariant.numbers) for case in drawn]
    assert len(set(named)) == combinations
    assert named[0] == tuple(choices[-1] for choices in invariant.numbers.values())
    if combinations > 1:
        sizes = [len(choices) for choices in invariant.numbers.values()]
        changed = [one != other for one, other in zip(named[0], named[1], strict=True)]
        assert sum(changed) >= min(2, sum(size > 1 for size in sizes)) or min(sizes) == 2, "the next differs in all"


def test_four_ranks_of_each_kind_are_drawn():
    assert INVARIANTS["dp_split"].numbers["dp"] == (2, 3, 4)
    crossed = {
        (case["cp"], case["order"])
        for number in range(12)
        for case in [dict(INVARIANTS["cp_order"].draw((), number, "0").numbers)]
    }
    assert (4, 1) in crossed
