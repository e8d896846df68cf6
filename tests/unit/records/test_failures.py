"""The root cause of a failed run, and a line that says it."""

from __future__ import annotations

import json
import time

import pytest
import torch

from workbench.errors import RecordError, ShapeError
from workbench.records import failures
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "cp2", RunSpec(layout={"cp": 2}, steps=3))


class TestFailure:
    def test_a_run_without_failures_has_none(self, run):
        run.write_exit(0, {"cp": 0}, None)
        assert run.failure() is None

    def test_the_first_real_failure_wins_over_an_earlier_lost_connection(self, run):
        run.write_exit(0, {"cp": 0}, RuntimeError("[gloo/pair.cc:534] Connection closed by peer [::1]:23"))
        time.sleep(0.001)
        run.write_exit(1, {"cp": 1}, ShapeError("split 7 tokens", found="7", rule="even", fix="pad"))
        run.write_exit(2, {"cp": 2}, ValueError("later"))
        failure = run.failure()
        assert (failure["rank"], failure["coordinates"], failure["exception"]) == (1, {"cp": 1}, "ShapeError")
        assert failure["also_failed"] == [0, 2]
        assert failure["message"].startswith("split 7 tokens")

    def test_lost_connections_alone_give_the_earliest(self, run):
        run.write_exit(1, {}, ConnectionResetError("reset"))
        time.sleep(0.001)
        run.write_exit(0, {}, ConnectionResetError("reset"))
        assert run.failure()["rank"] == 1

    def test_the_traceback_is_saved_without_machine_paths(self, run, tmp_path):
        try:
            raise ValueError(f"cannot read {tmp_path}/secret/data.json")
        except ValueError as error:
            run.write_exit(3, {}, error)
        failure = run.failure()
        assert 'raise ValueError(f"cannot read' in failure["traceback"]
        assert 'File "tests/unit/records/test_failures.py"' in failure["traceback"]
        assert str(tmp_path) not in json.dumps(failure)
        assert "data.json" in failure["message"]

    def test_the_agent_may_fail_before_any_rank(self, run):
        run.write_exit(None, {}, RuntimeError("no port"))
        assert run.failure()["rank"] is None

    @pytest.mark.parametrize(
        ("error", "cause"),
        [
            (MemoryError(), "out of memory"),
            (RuntimeError("CUDA out of memory. Tried to allocate"), "out of memory"),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
            (torch.OutOfMemoryError("x"), "out of memory"),
            (ConnectionResetError("reset"), "peer"),
            (ValueError("7"), "exception"),
        ],
    )
    def test_the_cause_is_derived_from_the_error_unless_given(self, run, error, cause):
        run.write_exit(0, {}, error)
        assert run.failure()["cause"] == cause
        run.write_exit(0, {}, error, cause="hang", waited_in="all_sum", stack="File here")
        failure = run.failure()
        assert (failure["cause"], failure["waited_in"], failure["stack"]) == ("hang", "all_sum", "File here")


class TestFailureInShort:
    def test_adds_the_reason_if_the_exception_has_none(self, run):
        run.write_exit(1, {}, RuntimeError("rank 1 was killed"), cause="killed")
        assert failures.failure_summary(run.failure()) == "rank 1 RuntimeError (killed): rank 1 was killed"

    def test_has_the_request_and_the_finding(self, run):
        run.write_exit(1, {}, ShapeError("split 7 tokens", found="an odd\nrow", rule="even", fix="pad"))
        assert failures.failure_summary(run.failure()) == "rank 1 ShapeError: split 7 tokens; found: an odd"

    def test_of_any_other_error_the_first_line(self, run):
        run.write_exit(None, {}, ValueError("no\nmore"))
        assert failures.failure_summary(run.failure()) == "ValueError: no"
        assert failures.failure_summary({"exception": "cancelled"}) == "cancelled"


class TestConnectionErrors:
    def test_a_wrapped_error_keeps_its_cause(self):
        def gather():
            try:
                raise RuntimeError("Connection reset by peer")
            except RuntimeError as error:
                raise RecordError("gather metrics") from error

        with pytest.raises(RecordError) as caught:
            gather()
        assert failures.is_connection_error(caught.value)

    def test_one_while_cleaning_up_does_not_hide_the_failure(self):
        def train():
            try:
                raise ValueError("nan")
            finally:
                raise ConnectionError("while leaving")

        with pytest.raises(ConnectionError) as caught:
            train()
        assert not failures.is_connection_error(caught.value)

    def test_torch_errors_are_classified(self):
        assert failures.is_connection_error(torch.distributed.DistNetworkError("x"))
        assert not failures.is_connection_error(ValueError("7 tokens"))
