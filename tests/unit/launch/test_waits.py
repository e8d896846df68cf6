"""Waiting ranks, from synthetic records of ranks."""

from __future__ import annotations

import pytest

from workbench.launch.waits import find_waits, format_ranks
from workbench.sharding.flight import CAPACITY, Entry, FlightView

SECOND = 10**9
AXES = {"cp": 7, "tp": 8, "dp_cp": 7}


def record(rank, *collectives, members=(0, 1), waits=False, begun=0, ended=False, before=0):
    """The record of a rank: one second for each collective, written "name shape axis"; the last is not left if it
    waits."""
    entries, seqs = [], {}
    for index, each in enumerate(collectives):
        name, shape, axis = (each.split() + ["2", "cp"][len(each.split()) - 1 :])[:3]
        group = AXES[axis]
        seqs[group] = seqs.get(group, before) + 1
        entered = (begun + index) * SECOND
        last = index == len(collectives) - 1
        entries.append(
            Entry(
                before + index + 1,
                seqs[group],
                group,
                name,
                axis,
                members,
                shape,
                "float32",
                f"step.py:{len(name)}",
                entered,
                None if waits and last else entered + 1,
            )
        )
    return FlightView(rank, 100 + rank, before + len(entries), 0, ended, tuple(entries))


def found(*records, ended=(), ranks=None):
    views = {view.rank: view for view in records}
    return find_waits(views, views if ranks is None else ranks, ended)


def test_no_rank_is_waited_for_while_all_are_equally_advanced():
    assert found(record(0, "a", "b", waits=True), record(1, "a", "b", waits=True)) == []


def test_a_rank_that_has_not_come_is_named_but_nothing_is_certain():
    [wait] = found(record(0, "a", "b", waits=True), record(1, "a"))
    assert (wait.rank, wait.kind, wait.certain, wait.waiting) == (1, "behind", False, (0,))
    assert wait.message(22 * SECOND) == (
        "rank 1 has not come to b over cp [#2, step.py:1], in which rank 0 has waited for 21 s; "
        "its last was a over cp [#1, step.py:1]"
    )


def test_a_rank_that_has_not_begun_is_named():
    [wait] = found(record(0, "join", waits=True), ranks=(0, 1))
    assert wait.message(0).endswith("; it has not begun")
    [wait] = found(record(0, "join", waits=True), record(1))
    assert wait.message(0).endswith("; it has not come to any collective")


def test_where_the_host_runs_ahead_the_counts_decide():
    """NCCL: everything is left at once, and rank 0 is two ahead."""
    [wait] = found(record(0, "a", "b", "c"), record(1, "a"))
    assert (wait.rank, wait.entry.name, wait.entry.entered_ns) == (1, "b", SECOND)


def test_a_waiting_rank_is_not_to_blame():
    """Rank 1 has not come to rank 0's collective, because rank 2 has not come to its own."""
    waits = found(
        record(0, "a", waits=True), record(1, "x 2 tp", members=(1, 2), waits=True), record(2, members=(1, 2))
    )
    assert [(wait.rank, wait.entry.name, wait.waiting) for wait in waits] == [(2, "x", (1,))]


def test_several_wait_for_one():
    four = (0, 1, 2, 3)
    [wait] = found(
        *(record(rank, "a", "b", members=four, waits=True, begun=rank) for rank in (0, 1, 3)),
        record(2, "a", members=four),
    )
    assert (wait.rank, wait.waiting, wait.entry.entered_ns) == (2, (0, 1, 3), SECOND)
    assert "ranks 0, 1 and 3 have waited" in wait.message(0)


def test_a_rank_that_ended_will_never_come():
    [wait] = found(record(0, "a", "b", waits=True), record(1, "a", ended=True), ended={1})
    assert (wait.kind, wait.certain) == ("ended", True)
    assert wait.why == "it has done its part and ended"
    [wait] = found(record(0, "a", "b", waits=True), record(1, "a"), ended={1})
    assert wait.why == "its process is gone"


def test_a_rank_that_is_not_judged_is_left_out():
    assert found(record(0, "a", "b", members=(0, 1), waits=True), ranks=(0,)) == []


def test_an_overwritten_entry_is_not_missing():
    """Rank 0's ring has lost the world's entries, rank 1's has not."""
    lost = record(0, "a", "a", before=CAPACITY + 5)
    kept = FlightView(1, 1, CAPACITY + 7, 0, False, (*record(1, "join 2 tp").entries, *lost.entries))
    assert found(lost, kept) == []


STEP = ("q 4", "k 2", "v 2", "o 4")


def test_the_rank_that_left_its_habit_skipped_a_collective():
    """In the third step rank 1 leaves out k."""
    right, wrong = record(0, *STEP, *STEP, *STEP[:2], waits=True), record(1, *STEP, *STEP, "q 4", "v 2", waits=True)
    [wait] = found(right, wrong)
    assert (wait.rank, wait.kind, wait.certain, wait.waiting) == (1, "skipped", True, (0,))
    assert wait.entry.name == "k"
    assert wait.why == "it skipped that k of 2 float32 and went on to v of 2 float32 [step.py:1]"
    [other] = found(record(0, *STEP, *STEP, "q 4", "v 2", waits=True), record(1, *STEP, *STEP, *STEP[:2], waits=True))
    assert other.rank == 0, "whoever has the higher number is not to blame for it"


def test_a_habit_is_of_calls_where_rows_change_their_length():
    """Three like calls in a row say nothing of what follows them; the step before does, though its rows were longer."""

    def step(tokens):
        return f"q {tokens}", f"q {tokens}", f"q {tokens}", f"q {tokens}", "sum 99", "loss 1"

    begun = (*step(8), *step(9), *step(7)[:4])
    [wait] = found(record(0, *begun, "sum 99", waits=True), record(1, *begun, "loss 1", waits=True))
    assert (wait.rank, wait.kind) == (1, "skipped")
    assert wait.why == "it skipped that sum of 99 float32 and went on to loss of 1 float32 [step.py:4]"


def test_where_a_step_has_exchanges_that_none_before_had_the_calls_over_one_axis_are_the_habit():
    usual = ("grads 9 dp_cp", "loss 1 dp_cp", "tokens 1 dp_cp", "largest 1 dp_cp")
    first = (*usual, *usual, "gather", "scatter")
    [wait] = found(record(0, *first, "grads 9 dp_cp", waits=True), record(1, *first, "loss 1 dp_cp", waits=True))
    assert (wait.rank, wait.kind, wait.entry.name) == (1, "skipped", "grads")
    assert wait.why == "it skipped that grads of 9 float32 and went on to loss of 1 float32 [step.py:4]"


def test_where_all_made_the_usual_call_the_usual_shape_decides():
    for brought, other in (("k 2", "k 3"), ("k 3", "k 2")):
        [wait] = found(record(0, *STEP, *STEP, "q 4", brought), record(1, *STEP, *STEP, "q 4", other))
        assert wait.rank == (0 if brought == "k 3" else 1)
        assert wait.why == "it came to k of 3 float32 [step.py:1] instead of k of 2 float32"


def test_a_rank_that_skipped_several():
    [wait] = found(record(0, *STEP, *STEP, "q 4", "k 2"), record(1, *STEP, *STEP, "q 4", "o 4"))
    assert wait.why == "it skipped that k of 2 float32 and 1 more, and went on to o of 4 float32 [step.py:1]"


def test_a_rank_that_did_something_new_is_wrong():
    [wait] = found(record(0, *STEP, *STEP, *STEP[:2]), record(1, *STEP, *STEP, "q 4", "new 4"))
    assert wait.rank == 1
    assert wait.why == "it came to new of 4 float32 [step.py:3] instead of k of 2 float32"


def test_without_a_habit_most_ranks_are_right():
    three = (0, 1, 2)
    [wait] = found(record(0, "b", members=three), *(record(rank, "a", members=three) for rank in (1, 2)))
    assert (wait.rank, wait.waiting) == (0, (1, 2))


def test_an_undecidable_case_is_reported():
    [wait] = found(record(0, "a"), record(1, "b"))
    assert (wait.rank, wait.certain) == (1, True)
    assert wait.why == (
        "it came to b of 2 float32 as #1 and rank 0 to a of 2 float32, and nothing before shows which of them is wrong"
    )


@pytest.mark.parametrize("other", ["a 3", "b 2"])
def test_shapes_and_names_must_agree(other):
    assert found(record(0, "a 2"), record(1, other))[0].kind == "skipped"


def test_a_mismatch_hides_its_consequences():
    waits = found(
        record(0, *STEP, *STEP, "q 4", "k 2", waits=True), record(1, *STEP, *STEP, "q 4", "v 2", "o 4", waits=True)
    )
    assert [wait.kind for wait in waits] == ["skipped"]


class TestRing:
    def two(self, *, waits=True):
        """Rank 0 stands in cp and rank 1 in tp, and each misses the other."""
        habit = ("a", "b 2 tp") * 3
        return record(0, *habit, "a", waits=waits), record(1, *habit, "b 2 tp", waits=waits)

    def test_ranks_that_wait_for_each_other_deadlock(self):
        [wait] = found(*self.two())
        assert (wait.kind, wait.rank, wait.waiting) == ("deadlock", 1, (0,)), "rank 1 left its habit"
        assert wait.why == (
            "they wait for each other: rank 0 is in a over cp [#4, step.py:1]; rank 1 is in b over tp [#4, step.py:1]"
        )

    def test_nothing_is_certain_where_the_host_only_ran_ahead(self):
        [wait] = found(*self.two(waits=False))
        assert (wait.kind, wait.certain) == ("behind", False)


def test_a_sender_between_stages_waits_for_nobody_and_its_receiver_does():
    """Sends run ahead of their receiver; a receiver that is ahead of the sender waits."""
    send = ["stage 0 > 1, micro-batch 0", "stage 0 > 1, micro-batch 1"]
    forward = [stage_entry(0, name, 1 + at, (0, 1), 5) for at, name in enumerate(send)]
    assert found(view(0, forward), view(1, forward[:1])) == []
    [wait] = found(view(0, forward[:1]), view(1, [*forward[:1], stage_entry(1, send[1], 2, (0, 1), 5, left=None)]))
    assert (wait.rank, wait.waiting, wait.kind) == (0, (1,), "behind")
    assert "has not come to stage 0 > 1, micro-batch 1 over pp" in wait.message(SECOND)


def test_stages_that_each_have_sent_are_in_no_deadlock():
    """Each is ahead of the other in its own direction, and inside a collective of its own stage."""
    forward, back = (
        stage_entry(0, "stage 0 > 1, micro-batch 1", 1, (0, 1), 5),
        stage_entry(1, "stage 1 > 0, micro-batch 0", 1, (1, 0), 6),
    )
    inside = [
        Entry(2, 1, 10 + rank, "all_sum", "cp", (rank, 2 + rank), "2", "float32", "a.py:1", SECOND, None)
        for rank in (0, 1)
    ]
    waits = found(view(0, [forward, inside[0]]), view(1, [back, inside[1]]), view(2, []), view(3, []))
    assert {wait.rank for wait in waits} == {2, 3}
    assert not any(wait.certain for wait in waits)


def stage_entry(rank, name, seq, ranks, group, left=SECOND):
    return Entry(seq, seq, group, name, "pp", ranks, "4x64", "float32", "train/pipeline.py:1", SECOND // 2, left)


def view(rank, entries):
    return FlightView(rank, 100 + rank, len(entries), 0, False, tuple(entries))


def test_certain_ones_come_first():
    four = (0, 1, 2, 3)
    waits = found(
        record(0, "a", "b", members=four, waits=True),
        record(1, "a", members=four),
        record(2, "a", members=four),
        record(3, "a", "b", members=four, waits=True),
        ended={2},
    )
    assert [(wait.rank, wait.kind) for wait in waits] == [(2, "ended"), (1, "behind")]


def test_ranks_are_formatted():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks(range(5)) == "ranks 0, 1, 2, 3 and 4"
    assert format_ranks(range(6)) == "ranks 0, 1, 2 and 3 more"
