"""torchtitan's Trainer, recorded by one call: its steps on CPUs, on one rank and on two."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines


def recorded(folder, ranks=1, kind="cpu", **changes):
    output = run("torchtitan", kind, folder, *(f"{name}={value}" for name, value in changes.items()), ranks=ranks)
    return folder, output.rsplit("weights ", 1)[1].split()[0]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """A record on one rank, with gradients by hand next to it."""
    return recorded(tmp_path_factory.mktemp("torchtitan") / "right", by_hand=1)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("torchtitan") / "two", ranks=2)


def test_a_recorder_changes_no_bit_of_the_weights(right, on_two_ranks, tmp_path):
    assert recorded(tmp_path / "none", plain=1)[1] == right[1]
    assert recorded(tmp_path / "two", plain=1, ranks=2)[1] == on_two_ranks[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_clip_and_gradients_are_those_by_hand(ranks, right, on_two_ranks):
    by_hand, folder = load_file(f"{right[0]}.safetensors"), (right if ranks == 1 else on_two_ranks)[0]
    steps, gradients = files.read_steps(folder), files.read_tensors(folder, 0, "gradients")
    assert [step["observed"]["clip"] for step in steps] == [{"max_norm": 0.5}] * 3
    assert [step["counts"] for step in steps] == [{"trained_tokens": 68, "all_tokens": 128}] * 3
    assert steps[0]["loss"] == pytest.approx(float(by_hand.pop("loss")), rel=1e-5)
    assert sum(float(value.square().sum()) for value in gradients.values()) > 1, "of before the clip"
    assert gradients.keys() == by_hand.keys()
    for name, gradient in by_hand.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("planted", "ranks", "cause"),
    [
        ({"times": 1}, 1, "times_micro_batches"),
        ({"clip": 0.1}, 1, "optimizer_settings"),
        ({"mean": 1}, 2, "over_dp"),
    ],
)
def test_a_planted_factor_is_named_first(planted, ranks, cause, right, tmp_path):
    diagnosis = wb.diagnose(right[0], recorded(tmp_path / "wrong", ranks, **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


def test_each_micro_batch_divided_by_its_own_tokens_is_a_difference(right, tmp_path):
    """Without values of tokens the cause is told as one of weights, and not decided."""
    diagnosis = wb.diagnose(right[0], recorded(tmp_path / "wrong", own=1)[0])
    assert not diagnosis.equal
    assert diagnosis.causes[0].name in ("mean_per_rows", "uneven_weights"), str(diagnosis)


@pytest.mark.parametrize("other", [{"each": 4}, {"whole": 1}])
def test_another_division_into_micro_batches_or_chunks_is_no_difference(other, right, tmp_path):
    diagnosis = wb.diagnose(right[0], recorded(tmp_path / "other", **other)[0])
    assert diagnosis.equal, str(diagnosis)


def test_two_ranks_are_no_difference(right, on_two_ranks):
    diagnosis = wb.diagnose(right[0], on_two_ranks[0])
    assert diagnosis.equal, str(diagnosis)
    assert "initial_weights" not in [cause.name for cause in diagnosis.causes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with an accelerator it runs")
def test_the_trainer_itself_needs_an_accelerator(tmp_path):
    with pytest.raises(AssertionError, match=r"device_module.set_device\(self.device\)"):
        recorded(tmp_path / "none", kind="trainer")
