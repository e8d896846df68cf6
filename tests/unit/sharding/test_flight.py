"""Flight records of a rank: readable by others at any time, also after SIGKILL, never torn."""

from __future__ import annotations

import ast
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.errors import RecordError
from workbench.records.provenance import project_root
from workbench.sharding import collectives, flight
from workbench.sharding.mesh import Axis, make_mesh

PAIR = range(2)


@pytest.fixture
def path(tmp_path):
    """The flight record of this process; recording stops afterwards."""
    path = tmp_path / "rank00000.flight"
    flight.start(path, 0)
    yield path
    flight.stop()


def enter(name="all_sum", axis="tp", ranks=PAIR, group="g", shape=(4, 8), dtype=torch.float32):
    return flight.entering(name, axis, ranks, group, shape, dtype)


def test_nothing_is_recorded_before_it_was_started(tmp_path):
    with enter():
        assert flight.waiting_in() == ""
    assert flight.caller() is None
    assert list(tmp_path.iterdir()) == []


def test_an_entry_has_the_collective_its_place_and_its_time(path):
    before = time.time_ns()
    with enter():
        [inside] = flight.read(path).entries
        assert flight.read(path).inside == inside
        assert flight.waiting_in() == str(inside)
    after = time.time_ns()
    view = flight.read(path)
    [entry] = view.entries
    assert (view.rank, view.pid, view.count, view.inside, view.ended) == (0, os.getpid(), 1, None, False)
    assert (entry.number, entry.seq, entry.axis, entry.ranks) == (1, 1, "tp", (0, 1))
    assert entry.signature == ("all_sum", "4x8", "float32")
    assert before <= entry.entered_ns <= entry.left_ns <= view.beat_ns <= after
    assert inside.left_ns is None
    assert str(entry).startswith("all_sum over tp [#1, sharding/test_flight.py:")
    assert flight.read_beat(path) == (os.getpid(), view.beat_ns)


def test_groups_are_counted_separately_and_axes_of_one_group_together(path):
    for axis, group in (("cp", "a"), ("tp", "b"), ("dp_cp", "a"), ("cp", "a")):
        with enter(axis=axis, group=group):
            pass
    entries = flight.read(path).entries
    assert [(e.axis, e.seq) for e in entries] == [("cp", 1), ("tp", 1), ("dp_cp", 2), ("cp", 3)]
    assert entries[0].group == entries[2].group != entries[1].group


def test_a_collective_that_raised_was_not_left(path):
    with pytest.raises(RuntimeError, match="gone"), enter("all_max"):
        raise RuntimeError("gone")
    assert flight.waiting_in().startswith("all_max over tp [#1,")
    assert flight.read(path).inside.name == "all_max"


def test_only_the_last_entries_are_stored_in_order(path):
    for number in range(flight.CAPACITY + 3):
        with enter(shape=(number,)):
            pass
    view = flight.read(path)
    assert view.count == flight.CAPACITY + 3
    assert [entry.seq for entry in view.entries] == list(range(4, flight.CAPACITY + 4))
    assert view.entries[-1].shape == str(flight.CAPACITY + 2)


def test_long_names_are_shortened_and_ranks_omitted(path):
    with flight.entering("n" * 99, "a" * 99, [0, *range(3, 99), 7], "g", range(99), "d" * 99, caller="é" * 99):
        pass
    [entry] = flight.read(path).entries
    assert entry.ranks == ()
    assert len(entry.name) < 40


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), (1, 3, 5, 7), (0, 1, 4), (2, 1)])
def test_ranks_come_back_as_they_were(path, ranks):
    with enter(ranks=flight.compact(ranks)):
        pass
    assert flight.read(path).entries[0].ranks == ranks
    assert tuple(flight.compact(ranks)) == ranks


def test_an_end_is_recorded_and_a_new_start_resets(path):
    with enter():
        pass
    flight.stop()
    assert flight.read(path).ended
    flight.start(path, 3)
    assert (flight.read(path).rank, flight.read(path).entries, flight.read(path).ended) == (3, (), False)


def test_a_half_written_slot_is_left_out(path):
    for _ in range(3):
        with enter():
            pass
    content = bytearray(path.read_bytes())
    whole = flight.read(path).entries
    for torn in (8, 24, 40, 60):  # a number in the group, a time, the check, a letter of the text
        at = flight._HEADER + flight._SLOT + torn
        content[at] ^= 1
        path.with_name("torn.flight").write_bytes(content)
        assert flight.read(path.with_name("torn.flight")).entries == (whole[0], whole[2])
        content[at] ^= 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 4096])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "rank00000.flight"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"read rank00000.flight"):
        flight.read(path)
    with pytest.raises(RecordError):
        flight.read_beat(tmp_path / "missing.flight")
    assert flight.read_all(tmp_path) == {}


def test_a_concurrent_read_is_consistent(path):
    """A concurrent reader sees whole entries only: each shape has its own number."""
    stop = threading.Event()

    def write():
        number = 0
        while not stop.is_set():
            number += 1
            with flight.entering("all_sum", "tp", PAIR, "g", (number,), "", caller="here"):
                pass

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        for _ in range(60):
            entries = flight.read(path).entries
            assert all(entry.shape == str(entry.number) == str(entry.seq) for entry in entries)
            seen = max(seen, len(entries))
    finally:
        stop.set()
        writer.join()
    assert seen > flight.CAPACITY // 2


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from workbench.sharding import flight
flight.start(Path(sys.argv[2]), 1)
for name in ("first", "second"):
    with flight.entering(name, "cp", range(2), "g", (3,), "float64"):
        if name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_sigkill(tmp_path):
    path = tmp_path / "rank00001.flight"
    done = subprocess.run([sys.executable, "-c", KILLED, str(project_root()), str(path)], timeout=240)
    assert done.returncode == -signal.SIGKILL
    view = flight.read_all(tmp_path)[1]
    assert [(entry.name, entry.left_ns is None) for entry in view.entries] == [("first", False), ("second", True)]
    assert view.inside.name == "second"


def record_everything(folder):
    """Every collective of the package on two ranks, forward and backward."""
    from torch.distributed import get_rank

    path = Path(folder) / f"rank{get_rank():05d}.flight"
    flight.start(path, get_rank())
    mesh = make_mesh(cp=2)
    axis = mesh["cp"]
    x = torch.ones(4, requires_grad=True)
    for function in (collectives.sum_identity, collectives.sum_sum, collectives.identity_sum):
        function(x, axis).sum().backward()
    collectives.gather_scatter(x, axis, dim=0).sum().backward()
    collectives.all_sum(x, axis)
    collectives.all_max(x, mesh["dp_cp"])
    collectives.all_gather(torch.ones(2, 3), axis)
    collectives.gather_equal(x, axis)
    collectives.scatter_sum(torch.ones(2, 3), axis)
    collectives.exchange(torch.ones(2, 3), axis)
    collectives.start_rotation(x, axis)()
    collectives.start_exchange(torch.ones(2, 3), axis)()
    collectives.start_all_sum_([torch.ones(2), torch.ones(3)], axis)()
    flight.stop()
    return [(entry.name, entry.axis, entry.seq, entry.shape, entry.caller) for entry in flight.read(path).entries]


def test_every_collective_is_recorded_with_its_backward_and_its_caller(tmp_path):
    first, second = run_ranks(record_everything, 2, tmp_path / "ranks", str(tmp_path))
    assert first == second
    assert [entry[:4] for entry in first] == [
        ("make_mesh", "world", 1, "1x1x2x1"),
        ("sum_identity", "cp", 1, "4"),
        ("sum_sum", "cp", 2, "4"),
        ("backward of sum_sum", "cp", 3, "4"),
        ("backward of identity_sum", "cp", 4, "4"),
        ("gather_scatter", "cp", 5, "4"),
        ("backward of gather_scatter", "cp", 6, "2x4"),
        ("all_sum", "cp", 7, "4"),
        ("all_max", "dp_cp", 8, "4"),
        ("all_gather of lengths", "cp", 9, "1"),
        ("all_gather", "cp", 10, "6"),
        ("gather_equal", "cp", 11, "4"),
        ("scatter_sum", "cp", 12, "2x3"),
        ("exchange", "cp", 13, "2x3"),
        ("start_rotation", "cp", 14, "4"),
        ("end of rotation", "cp", 15, "4"),
        ("start_exchange", "cp", 16, "2x3"),
        ("end of exchange", "cp", 17, "2x3"),
        ("start_all_sum_", "cp", 18, "5"),
        ("end of all_sum_", "cp", 19, "5"),
    ]
    assert {entry[4].partition(":")[0] for entry in first} == {"sharding/test_flight.py"}
    lines = {entry[0]: entry[4] for entry in first}
    assert lines["backward of sum_sum"] == lines["sum_sum"] != lines["gather_scatter"]


_SENDERS = ("dist", "wire")


def _root(expression):
    """The name at the beginning of `a.b.c`, "" if there is another expression."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return getattr(expression, "id", "")


def test_every_collective_of_the_package_is_recorded():
    """Each call of a collective of torch.distributed, or of `sharding.wire`, stands in a ``with`` that notes it."""
    unrecorded = []
    for path in (project_root() / "workbench").rglob("*.py"):
        if path.parent.name == "launch" or path.name == "wire.py":  # the doctor's own two ranks; what is called by it
            continue
        source = path.read_text()
        if "dist." not in source and "wire." not in source:
            continue
        tree = ast.parse(source)
        noted = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.With)
            and any(name in ast.unparse(block.items[0]) for name in ("_in(", "flight.entering("))
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) and _root(node.func) in _SENDERS else ""
            if (
                called.startswith(("dist.", "wire."))
                and any(
                    word in called
                    for word in (
                        "all_reduce",
                        "gather",
                        "scatter",
                        "broadcast",
                        "barrier",
                        "send",
                        "recv",
                        "all_to_all",
                        "rotation",
                        "exchange_rows",
                        "subgroup",
                        "init_process_group",
                    )
                )
                and id(node) not in noted
            ):
                unrecorded.append(f"{path.name}:{node.lineno} {called}")
    assert unrecorded == []


def test_it_costs_a_few_microseconds(path):
    """CPU time of this thread, and generous, as cores are shared; docs have the value measured on a quiet machine."""
    tensor, axis = torch.ones(4, 4), Axis("tp", ranks=PAIR)
    best = min(_seconds_each(tensor, axis) for _ in range(5))
    assert best < 60e-6
    flight.stop()
    assert min(_seconds_each(tensor, axis) for _ in range(5)) < 10e-6
    assert len(flight.read(path).entries) == 1000


def _seconds_each(tensor, axis, times=200):
    began = time.thread_time()
    for _ in range(times):
        with collectives._in("all_sum", tensor, axis):
            pass
    return (time.thread_time() - began) / times


def test_a_machine_word_has_eight_bytes():
    assert struct.calcsize("@7Q") == 56 == flight._TEXT_AT
