"""A record on disk is whole or absent, and a run directory always knows how its run ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench import atomic as whole_files
from workbench.errors import RecordError, SpecError
from workbench.records import provenance
from workbench.records.directory import RunDirectory
from workbench.records.integrity import check_whole
from workbench.records.progress import StepTail, steps_recorded
from workbench.records.provenance import this_process
from workbench.specs.run import RunSpec


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "cp2", RunSpec(layout={"cp": 2}, steps=3))


class TestMaking:
    def test_name_and_hash_make_the_folder(self, run):
        assert run.path.name == f"cp2-{run.spec.content_hash()}"
        assert run.status == "pending"
        assert run.name == "cp2"

    def test_an_existing_directory_is_never_modified(self, run):
        run.append_step({"step": 0})
        again = RunDirectory.create(run.path.parent, "cp2", run.spec)
        third = RunDirectory.create(run.path.parent, "cp2", run.spec)
        assert [again.path.name, third.path.name] == [f"{run.path.name}-2", f"{run.path.name}-3"]
        assert again.steps() == []
        assert run.steps() == [{"step": 0}]

    def test_opening_gives_the_same_spec_back(self, run):
        assert RunDirectory.open(run.path).spec == run.spec
        assert json.loads((run.path / "config.json").read_text())["layout"]["cp"] == 2

    @pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "-flag", "with space"])
    def test_a_name_that_is_no_folder_name_is_refused(self, tmp_path, name):
        with pytest.raises(RecordError, match="beginning with a letter or digit"):
            RunDirectory.create(tmp_path, name, RunSpec())
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path):
        with pytest.raises(RecordError, match=r"config\.json"):
            RunDirectory.open(tmp_path)

    def test_a_config_of_another_version_is_refused(self, run):
        (run.path / "config.json").write_text('{"layuot": {}}')
        with pytest.raises(SpecError, match="layuot"):
            RunDirectory.open(run.path)

    def test_find_gives_runs_of_one_name_oldest_first(self, run):
        root = run.path.parent
        RunDirectory.create(root, "cp2-other", run.spec)
        newer = RunDirectory.create(root, "cp2", run.spec)
        (root / "cp2-broken").mkdir()
        (root / "cp2-broken" / "config.json").write_text("{")
        assert [result.path for result in RunDirectory.find(root, "cp2")] == [run.path, newer.path]


class TestState:
    def test_fields_stay_until_they_are_changed(self, run):
        run.set_state("pending", device="cpu", device_note="asked for 2 GPUs, 0 here")
        run.set_state("running")
        run.set_state("succeeded", device_note="")
        state = run.state
        assert (state["state"], state["device"], state["device_note"]) == ("succeeded", "cpu", "")
        assert state["rank0"] == this_process()
        assert state["rank0"]["pid"] == os.getpid()
        assert state["started_ns"] <= state["ended_ns"]

    def test_an_unknown_state_is_refused(self, run):
        with pytest.raises(RecordError, match="one of pending, running"):
            run.set_state("finished")

    def test_a_run_is_lost_if_no_process_is_left_to_end_it(self, run):
        process = subprocess.Popen([sys.executable, "-c", ""])
        gone = this_process() | {"pid": process.pid}
        process.wait()
        run.note(launcher=gone)
        assert run.status == "lost"  # it waits for no rank
        run.note(launcher=this_process())
        assert run.status == "pending"
        run.set_state("running")
        run.note(rank0=gone)
        assert run.status == "running"  # its launcher will record the end
        run.note(launcher=gone, agent=gone)
        assert run.status == "lost"

    def test_a_process_that_inherited_the_pid_is_not_the_run(self, run):
        run.set_state("running")
        run.note(rank0=this_process() | {"create_time": psutil.Process().create_time() - 100})
        assert run.status == "lost"

    def test_a_process_before_a_reboot_is_gone_and_a_remote_one_is_unknown(self, run):
        run.set_state("running")
        run.note(rank0=this_process() | {"boot": "before"})
        assert run.status == "lost"
        run.note(rank0=this_process() | {"host": "elsewhere", "boot": "before", "create_time": 0.0})
        assert run.status == "running"

    def test_a_zombie_does_not_live(self):
        process = subprocess.Popen([sys.executable, "-c", ""])
        created = psutil.Process(process.pid).create_time()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not provenance.process_alive(process.pid, created)
        process.wait()

    @pytest.mark.parametrize(
        ("first", "second", "stands"),
        [
            ("succeeded", "failed", "failed"),
            ("failed", "cancelled", "cancelled"),
            ("failed", "succeeded", "failed"),
            ("cancelled", "failed", "cancelled"),
            ("cancelled", "running", "cancelled"),
            ("lost", "running", "lost"),
            ("succeeded", "cancelled", "succeeded"),
            ("succeeded", "running", "succeeded"),
        ],
    )
    def test_an_end_is_final_except_for_causes_unknown_to_the_first_rank(self, run, first, second, stands):
        run.set_state(first, why="first")
        assert run.set_state(second) == stands
        assert run.state["state"] == stands

    def test_a_note_moves_no_state(self, run):
        run.set_state("cancelled")
        run.note(handle="x")
        assert (run.state["state"], run.state["handle"]) == ("cancelled", "x")

    def test_writers_do_not_undo_one_another(self, run):
        threads = [
            threading.Thread(target=lambda n=n: [run.note(**{f"field{n}-{i}": i}) for i in range(20)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(key.startswith("field") for key in run.state) == 80

    def test_a_cancel_can_be_requested(self, run):
        assert not run.cancel_requested
        run.request_cancel("a test")
        assert RunDirectory.open(run.path).cancel_requested
        assert run.state["state"] == "pending"

    def test_a_state_is_never_seen_half_written(self, run, monkeypatch):
        def crash(*_):
            raise OSError("disk full")

        monkeypatch.setattr(whole_files, "os", stand_in(os, fsync=crash))
        with pytest.raises(OSError, match="disk full"):
            run.set_state("running")
        assert run.state["state"] == "pending"
        assert not list(run.path.glob(".*.tmp"))


class TestSteps:
    def test_floats_come_back_exactly(self, run):
        record = {"step": 0, "loss/total/sum": 0.1 + 0.2, "worst": float("inf"), "text": 'a "word" é \n line'}
        run.append_step(record)
        assert run.steps() == [record]

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    def test_numbers_outside_of_json_round_trip(self, run, value):
        run.append_step({"step": 0, "value": float(value), "text": value, "nested": [{"deep": float(value)}]})
        line = (run.path / "metrics.jsonl").read_text()
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not standard JSON"))
        [record] = run.steps()
        assert (repr(record["value"]), record["text"], repr(record["nested"])) == (
            value,
            value,
            f"[{{'deep': {value}}}]",
        )

    def test_a_line_that_could_not_be_written_is_cut_off_before_the_next(self, run, monkeypatch):
        run.append_step({"step": 0})
        with monkeypatch.context() as patch:
            patch.setattr(whole_files, "os", stand_in(os, fsync=lambda *_: (_ for _ in ()).throw(OSError("disk full"))))
            with pytest.raises(OSError, match="disk full"):
                run.append_step({"step": 1})
        path = run.path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-9])
        run.append_step({"step": 2})
        assert [record["step"] for record in run.steps()] == [0, 2]

    def test_a_tail_returns_each_record_once_and_a_torn_one_when_complete(self, run):
        tail = StepTail(run)
        assert tail.new() == []
        _write_steps(run, 2)
        path = run.path / "metrics.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[:-5])
        assert [record["step"] for record in tail.new()] == [0]
        assert tail.new() == []
        path.write_bytes(content)
        assert [record["step"] for record in tail.new()] == [1]
        assert tail.new() == []

    def test_a_tail_survives_a_torn_line_that_its_next_writer_cuts_off(self, run):
        _write_steps(run, 1)
        tail = StepTail(run)
        tail.new()
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"crc32": "00000000", "step": 1\n')
        assert tail.new() == []
        RunDirectory.open(run.path).append_step({"step": 1})
        assert tail.new() == [{"step": 1}]

    def test_a_tail_refuses_damage_before_the_last_line(self, run):
        _write_steps(run, 3)
        path = run.path / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")
        lines[1] = lines[1].replace(b"step", b"spet")
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(RecordError, match="damaged"):
            StepTail(run).new()

    def whole(self, run, steps=3):
        """A run that succeeded, with a gradient a step."""
        run = RunDirectory.create(run.path.parent, "whole", RunSpec(steps=steps))
        for step in range(steps):
            run.write_tensors(f"step{step:04d}.gradients", {"b": torch.ones(4), "a": torch.ones(2)})
            run.append_step(
                {
                    "step": step,
                    "loss/total/sum": 0.5,
                    "gradient/norm/global": 1.5,
                    "gradient_norms": {"b": 2.0, "a": 2**0.5},
                }
            )
        run.set_state("succeeded")
        return run

    @pytest.mark.parametrize(
        ("cut", "found"),
        [(0, ""), (1, ""), (10, "2 whole records; the last line is cut or damaged"), (10**6, "0 whole records")],
    )
    def test_a_run_that_succeeded_has_all_its_steps(self, run, cut, found):
        run = self.whole(run)
        path = run.path / "metrics.jsonl"
        content = path.read_bytes()
        path.write_bytes(content[: max(0, len(content) - cut)])
        if not found:
            assert [record["step"] for record in run.steps()] == [0, 1, 2]
            check_whole(run)
            return
        for read in (run.steps, lambda: check_whole(run)):
            with pytest.raises(RecordError) as caught:
                read()
            assert caught.value.parts["requested"] == f"read {run.path.name}/metrics.jsonl"
            assert caught.value.parts["found"] == found
            assert "3 step record(s)" in caught.value.parts["rule"]

    def test_a_run_that_succeeded_without_a_file_of_steps_is_damaged(self, run):
        run = self.whole(run)
        (run.path / "metrics.jsonl").unlink()
        with pytest.raises(RecordError, match="no such file"):
            run.steps()
        (run.path / "metrics.jsonl").mkdir()
        with pytest.raises(RecordError, match="IsADirectoryError"):
            run.steps()

    @pytest.mark.parametrize(
        ("records", "found"),
        [
            ([{"step": 0}, {"step": 0}], "line 2 is of step 0, not 1"),
            ([{"step": 0, "loss/total/sum": 1.0}, {"step": 1}], "line 2 has no loss/total/sum"),
            ([{"step": 0}, {"step": 1}, {"step": 2}], "3 whole records"),
        ],
    )
    def test_a_run_that_succeeded_has_one_record_of_each_step_with_the_same_numbers(self, run, records, found):
        run = RunDirectory.create(run.path.parent, "odd", RunSpec(steps=2))
        for record in records:
            run.append_step(record)
        assert len(run.steps()) == len(records), "who runs on may have fewer"
        run.set_state("succeeded")
        with pytest.raises(RecordError) as caught:
            run.steps()
        assert caught.value.parts["found"] == found

    def test_the_steps_of_a_run_that_succeeded_are_read_again_when_the_file_changes(self, run):
        run = self.whole(run)
        first = run.steps()
        first[0]["step"] = "mine"
        assert run.steps()[0]["step"] == 0, "what is handed out is the reader's"
        _damage(run, line=2)
        with pytest.raises(RecordError, match="2 whole records"):
            run.steps()

    def test_a_file_without_a_parameter_is_damaged(self, run):
        run = self.whole(run)
        run.write_tensors("step0001.gradients", {"a": torch.ones(2)})
        with pytest.raises(RecordError) as caught:
            check_whole(run)
        assert caught.value.parts["requested"] == f"read {run.path.name}/tensors/step0001.gradients.safetensors"
        assert caught.value.parts["found"] == "no b"

    @pytest.mark.parametrize("left", [0, 20, -1, None])
    def test_a_file_of_tensors_that_is_cut_or_gone_is_damaged(self, run, left):
        run = self.whole(run)
        path = run.path / "tensors/step0002.gradients.safetensors"
        content = path.read_bytes()
        path.unlink() if left is None else path.write_bytes(content[:left])
        with pytest.raises(RecordError, match=r"read .*tensors/step0002\.gradients\.safetensors"):
            check_whole(run)

    def test_no_file_is_no_steps(self, run):
        assert run.steps() == []

    @pytest.mark.parametrize("cut", [1, 2, 10, 30])
    def test_a_torn_last_line_is_left_out(self, run, cut):
        _write_steps(run, 3)
        path = run.path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-cut])
        expected = 3 if cut == 1 else 2  # only the newline is missing: the record is whole
        assert [record["step"] for record in run.steps()] == list(range(expected))

    def test_a_damaged_last_line_is_left_out(self, run):
        _write_steps(run, 3)
        _damage(run, line=2)
        assert [record["step"] for record in run.steps()] == [0, 1]

    def test_a_damaged_line_before_the_last_is_an_error(self, run):
        _write_steps(run, 3)
        _damage(run, line=1)
        with pytest.raises(RecordError, match="line 2 of 3 is damaged"):
            run.steps()

    def test_a_missing_line_break_in_the_middle_is_an_error(self, run):
        _write_steps(run, 3)
        path = run.path / "metrics.jsonl"
        path.write_bytes(path.read_bytes().replace(b"\n", b"", 1))
        with pytest.raises(RecordError, match="line 1 of 2 is damaged"):
            run.steps()

    def test_appending_after_a_torn_line_begins_a_line_of_its_own(self, run):
        _write_steps(run, 2)
        path = run.path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-7])
        RunDirectory.open(run.path).append_step({"step": 1, "again": True})
        assert run.steps() == [{"step": 0, "value": 0.0}, {"step": 1, "again": True}]

    @pytest.mark.parametrize("record", [{}, {"crc32": 1}, {"step": 0, "tensor": torch.zeros(2)}])
    def test_an_invalid_record_is_refused(self, run, record):
        with pytest.raises(RecordError):
            run.append_step(record)
        assert run.steps() == []


class TestTensors:
    def test_come_back_bitwise(self, run):
        expected = {"weight": torch.randn(3, 5, dtype=torch.float64), "mask": torch.tensor([True, False])}
        assert not run.has_tensors("step0000.gradients")
        run.write_tensors("step0000.gradients", expected)
        assert run.has_tensors("step0000.gradients")
        actual = run.read_tensors("step0000.gradients")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)

    def test_tied_and_transposed_tensors_are_saved_too(self, run):
        weight = torch.randn(4, 6, requires_grad=True)
        run.write_tensors("step0000.gradients", {"head": weight, "embedding": weight, "turned": weight.T})
        actual = run.read_tensors("step0000.gradients")
        assert torch.equal(actual["head"], weight)
        assert torch.equal(actual["embedding"], weight)
        assert torch.equal(actual["turned"], weight.T)

    def test_a_cut_file_is_refused_by_name(self, run):
        path = run.write_tensors("step0001.tokens", {"ratio": torch.ones(64)})
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(RecordError, match=r"step0001\.tokens\.safetensors"):
            run.read_tensors("step0001.tokens")

    def test_missing_tensors_are_refused(self, run):
        with pytest.raises(RecordError, match="run again, with record settings that keep these tensors"):
            run.read_tensors("step0000.tokens")

    def test_no_temporary_file_is_left(self, run):
        run.write_tensors("a", {"x": torch.ones(1)})
        run.write_json("provenance.json", {"x": 1})
        assert json.loads((run.path / "provenance.json").read_text()) == {"x": 1}
        assert [path for path in run.path.rglob("*") if ".tmp" in path.name] == []


def _write_steps(run, count):
    for step in range(count):
        run.append_step({"step": step, "value": step / 7})


def _damage(run, *, line):
    """Change one digit in a line of metrics.jsonl."""
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[line] = lines[line].replace(b'"step": ', b'"step": 1')
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("content", ["{}", "null", "[]", '{"name": "cp2", "state": "bogus"}', '{"state": "pending"}'])
def test_a_state_file_without_a_state_is_damaged(tmp_path, content):
    run = RunDirectory.create(tmp_path, "cp2", RunSpec())
    other = RunDirectory.create(tmp_path, "cp2", RunSpec())
    (run.path / "state.json").write_text(content)
    with pytest.raises(RecordError, match=r"a mapping with a name and a state"):
        RunDirectory.open(run.path)
    assert [result.path for result in RunDirectory.find(tmp_path, "cp2")] == [other.path]


def test_a_job_that_waits_on_a_cluster_is_not_lost_with_its_launcher(tmp_path):
    run = RunDirectory.create(
        tmp_path, "cp2", RunSpec(), launcher=this_process() | {"create_time": 0.0}, backend="slurm"
    )
    assert run.status == "lost"
    run.note(handle="slurm://torchx/7")
    assert run.status == "pending"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", {"created_ns": []}, "created_ns is int"),
        ("state.json", {"launcher": "x"}, "launcher is dict"),
        ("state.json", {"state": ["running"]}, "a mapping with a name and a state"),
        ("ranks/rank00000.exit.json", {"message": 3}, "message is str"),
        ("ranks/rank00000.exit.json", {"rank": []}, "rank is int or null"),
        ("ranks/rank00000.exit.json", [], "a mapping with rank"),
    ],
)
def test_a_value_of_another_type_than_a_writer_gives_is_damage(run, name, content, message):
    run.write_exit(0, {}, None)
    path = run.path / name
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | content if isinstance(content, dict) else content))
    with pytest.raises(RecordError, match=message):
        _ = run.state, run.exits()


def test_a_folder_in_place_of_the_step_records_is_an_error(run):
    (run.path / "metrics.jsonl").mkdir()
    for read in (run.steps, StepTail(run).new, lambda: steps_recorded(run)):
        with pytest.raises(RecordError, match="IsADirectoryError"):
            read()
