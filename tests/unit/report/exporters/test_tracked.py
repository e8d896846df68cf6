"""The tracker's view of a run: every number with its step and time, and a note for non-numeric values."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from tests.helpers.hand_made import BEGAN_NS, SECOND_NS, make_run
from workbench.atomic import from_json, to_json
from workbench.errors import RecordError
from workbench.report.exporters.tracked import as_text, from_plain, tracked


def test_every_number_of_every_step_under_its_key(tmp_path):
    run = tracked(
        make_run(
            tmp_path / "parity",
            "cp2",
            records=[
                {
                    "step": 3,
                    "loss/total/sum": 0.1 + 0.2,
                    "flag": True,
                    "count": 2**60,
                    "worst": math.inf,
                    "gradient_norms": {"model.norm.weight": 1e-300, "deep": {"er": -1}},
                    "nothing": None,
                },
                {"step": 7, "loss/total/sum": math.nan},
            ],
        )
    )
    assert [step.number for step in run.steps] == [3, 7]
    assert run.steps[0].values == {
        "loss/total/sum": 0.30000000000000004,
        "flag": 1,
        "count": 2**60,
        "worst": math.inf,
        "gradient_norms/model.norm.weight": 1e-300,
        "gradient_norms/deep/er": -1,
    }
    assert math.isnan(run.steps[1].values["loss/total/sum"])


def test_non_numeric_values_are_reported_once(tmp_path):
    records = [{"step": n, "device": "cpu", "list": [1], "x": 1.0} for n in range(3)]
    run = tracked(make_run(tmp_path, "a", records=records))
    assert [note for note in run.notes if "number" in note] == [
        "device is not a number: left out",
        "list is not a number: left out",
    ]
    assert [step.values for step in run.steps] == [{"x": 1.0}] * 3


class TestTimes:
    def test_are_the_recorded_ones_if_present(self, tmp_path):
        records = [
            {"step": n, "x": 1.0, "time/step_ms": 5.0, "time/ended_ns": BEGAN_NS + (10 + n) * SECOND_NS}
            for n in range(2)
        ]
        run = tracked(make_run(tmp_path, "a", records=records))
        assert [step.time_s for step in run.steps] == [BEGAN_NS / 1e9 + 10, BEGAN_NS / 1e9 + 11]
        assert run.steps[0].values == {"x": 1.0, "time/step_ms": 5.0}
        assert run.notes == []

    def test_are_estimated_otherwise_and_reported(self, tmp_path):
        run = tracked(make_run(tmp_path, "a"))  # steps of 1000, 41, 42 and 43 ms, after a second of waiting
        assert [round(step.time_s - BEGAN_NS / 1e9, 3) for step in run.steps] == [2.0, 2.041, 2.083, 2.126]
        assert len([note for note in run.notes if "reckoned" in note]) == 1

    def test_of_the_run(self, tmp_path):
        run = tracked(make_run(tmp_path, "a", took_s=9))
        assert (run.began_s, run.ended_s) == (BEGAN_NS / 1e9 + 1, BEGAN_NS / 1e9 + 10)

    def test_a_lost_run_ends_with_its_last_step(self, tmp_path):
        run = tracked(make_run(tmp_path, "a", state="lost", done=1))
        assert (run.state, run.ended_s) == ("lost", run.steps[-1].time_s)
        never = tracked(make_run(tmp_path, "b", state="cancelled", done=0, fields={"ended_ns": 0}))
        assert never.ended_s == never.began_s


def test_identifies_the_run(tmp_path):
    directory = make_run(
        tmp_path / "my parity",
        "cp2",
        state="failed",
        rank=1,
        layout={"cp": 2},
        faults=["shift"],
        error=ValueError("x" * 5000),
        fields={"device_note": "no GPU here"},
    )
    directory.write_json("provenance.json", {"git": {"commit": "abc", "dirty": True}, "versions": {"torch": "2.13"}})
    run = tracked(directory)
    assert (run.id, run.name, run.experiment, run.state) == (directory.path.name, "cp2", "my parity", "failed")
    assert run.key == f"my_parity-{directory.path.name}"
    assert run.tags == ["failed", "fault:shift"]
    assert (run.config["layout.cp"], run.config["faults"], run.config["frozen_clip"]) == (2, ["shift"], None)
    assert run.facts["run.failure"].startswith("rank 1 ValueError: xxx")
    assert len(run.facts["run.failure"]) == 2000
    assert {
        key: run.facts[key]
        for key in ("run.world_size", "run.device_note", "run.failure_cause", "run.commit", "run.version.torch")
    } == {
        "run.world_size": 2,
        "run.device_note": "no GPU here",
        "run.failure_cause": "exception",
        "run.commit": "abc",
        "run.version.torch": "2.13",
    }


def test_a_non_finite_setting_becomes_text_and_is_reported(tmp_path):
    run = tracked(make_run(tmp_path, "a", loss={"surrogate": {"clip_high": math.inf}}))
    assert run.config["loss.surrogate.clip_high"] == "inf"
    assert "setting loss.surrogate.clip_high is not finite: kept as text" in run.notes


@pytest.mark.parametrize("numbers", [[0, 0], [2, 1], ["one", 2]])
def test_steps_that_a_tracker_would_drop_in_silence_are_refused(tmp_path, numbers):
    run = make_run(tmp_path, "a", records=[{"step": number, "x": 1.0} for number in numbers])
    with pytest.raises(RecordError, match="step numbers grow"):
        tracked(run)


def test_it_crosses_to_another_process_unchanged(tmp_path):
    run = tracked(make_run(tmp_path, "a", records=[{"step": 0, "x": math.inf, "y": 0.1}]))
    assert from_plain(from_json(to_json(asdict(run)))) == run


def test_settings_as_text():
    assert [as_text(value) for value in (None, True, 0.2, "zigzag")] == ["None", "True", "0.2", "zigzag"]
    assert json.loads(as_text(["a"])) == ["a"]
