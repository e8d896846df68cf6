"""Lightning's trainer, recorded by a callback."""

import pytest

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines


def recorded(folder, **changes):
    output = run("lightning", "fit", folder, *(f"{name}={value}" for name, value in changes.items()))
    return folder, output.rsplit("weights ", 1)[1].strip()


def test_a_recorder_changes_no_bit_of_the_weights(tmp_path):
    _, weights = recorded(tmp_path / "mine")
    _, plain = recorded(tmp_path / "none", plain=1)
    assert weights == plain
    steps = files.read_steps(tmp_path / "mine")
    assert len(steps) == 3
    assert all(step["loss"] is not None and step["observed"]["clip"] == {"max_norm": 0.5} for step in steps)


@pytest.mark.parametrize(
    ("planted", "cause"), [({"accumulation": 1}, "times_micro_batches"), ({"clip": 0.1}, "optimizer_settings")]
)
def test_a_planted_factor_is_named_first(planted, cause, tmp_path):
    diagnosis = wb.diagnose(recorded(tmp_path / "right")[0], recorded(tmp_path / "wrong", **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


def test_another_division_into_micro_batches_is_no_difference(tmp_path):
    diagnosis = wb.diagnose(recorded(tmp_path / "right")[0], recorded(tmp_path / "other", each=4)[0])
    assert diagnosis.equal, str(diagnosis)
