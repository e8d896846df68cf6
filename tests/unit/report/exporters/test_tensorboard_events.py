"""TensorBoard's own reader finds every number at its step and time."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.helpers.hand_made import BEGAN_NS
from workbench.report.exporters.tensorboard_events import TensorBoard
from workbench.report.exporters.tracked import TrackedRun, TrackedStep


@pytest.fixture
def read(exported, runs):
    """The reader of the run with that number."""

    def reader(number):
        return EventAccumulator(str(exported("tensorboard")[0] / "bench" / "parity" / runs[number].path.name)).Reload()

    return reader


def test_every_number_at_its_step(read, runs):
    events = read(0)
    assert sorted(events.Tags()["scalars"]) == ["gradient_norms/a.weight", "loss/total/sum", "odd/one/max"]
    loss = events.Scalars("loss/total/sum")
    assert [event.step for event in loss] == [0, 5, 6]
    assert [event.value for event in loss] == [np.float32(0.1 + 0.2), -math.inf, 2.0]
    odd = [event.value for event in events.Scalars("odd/one/max")]
    assert (math.isnan(odd[0]), odd[1:]) == (True, [math.inf, -math.inf])
    assert [event.step for event in events.Scalars("gradient_norms/a.weight")] == [0, 5]


def test_at_its_time(read):
    assert [event.wall_time for event in read(1).Scalars("loss/total/sum")] == [BEGAN_NS / 1e9 + 2]


def test_numbers_beyond_32_bits_are_reported(exported):
    notes = exported("tensorboard")[1][0].notes
    assert "numbers are rounded to some seven digits: scalars have 32 bits there" in notes
    assert "metric loss/total/sum is beyond 32 bits: infinite there" in notes
    assert "metric odd/one/max is beyond 32 bits: infinite there" not in notes  # it was infinite before


def test_settings_and_state_are_hyperparameters(read, runs):
    content = read(1).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["layout.tp"].number_value == 2
    assert start.hparams["run.state"].string_value == "failed"
    assert start.hparams["faults"].string_value == "[]"


def test_and_a_text_in_which_nothing_is_markup(read):
    [text] = read(1).Tensors("run/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert r"no \<b\>good\<" in shown
    assert "<b>" not in shown


def test_an_interrupted_export_leaves_nothing_that_looks_whole(tmp_path):
    run = TrackedRun("a-1", "a", "parity", "failed", 1.0, 2.0, {}, {}, [TrackedStep(0, 1.0, {"x": "no number"})])
    board = TensorBoard(tmp_path, "bench")
    with pytest.raises(struct.error):
        board.write(run)
    assert not board.has(run)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
