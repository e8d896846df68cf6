"""megatron-core's DDP, schedule, optimizer and clip, recorded by one call, over tp and dp."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines
LAYOUTS = (
    {"ranks": 1},
    {"ranks": 2, "sharded": 1},
    {"ranks": 2, "tp": 2, "gated": 1},
    {"ranks": 4, "tp": 2, "sharded": 1},
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ranks and changes -> a record and its weights; each is made once."""
    folders, root = {}, tmp_path_factory.mktemp("megatron")

    def of(ranks=1, **changes):
        key = (ranks, *sorted(changes.items()))
        if key not in folders:
            given = (f"{name}={value}" for name, value in changes.items())
            folder = root / str(len(folders))
            output = run("megatron", "train", folder, *given, ranks=ranks, loop="megatron_schedule")
            folders[key] = (folder, output.rsplit("weights ", 1)[-1].split()[0])
        return folders[key]

    return of


def test_a_recorder_changes_no_bit_of_the_weights(runs):
    assert runs(ranks=2, sharded=1)[1] == runs(ranks=2, sharded=1, plain=1)[1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_clips_and_gradients_are_those_by_hand(layout, runs):
    folder, _ = runs(**layout)
    gated = {"gated": 1} if "gated" in layout else {}
    by_hand = load_file(f"{runs(by_hand=1, **gated)[0]}-by-hand.safetensors")
    steps = files.read_steps(folder)
    assert [step["counts"]["trained_tokens"] for step in steps] == [44, 42, 46]
    for number, step in enumerate(steps):
        gradients = files.read_tensors(folder, number, "gradients")
        assert step["loss"] == pytest.approx(by_hand[f"{number}.loss"].item(), rel=1e-6)
        assert step["observed"]["clip"] == {"max_norm": 0.2}
        assert {f"{number}.{name}" for name in gradients} | {f"{number}.loss"} == {
            name for name in by_hand if name.startswith(f"{number}.")
        }
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, by_hand[f"{number}.{name}"], rtol=1e-3, atol=1e-6, msg=name)
            assert step["gradient_norms"][name] == pytest.approx(gradient.double().norm().item(), rel=1e-6)
        assert torch.stack([value.norm() for value in gradients.values()]).norm() > 0.2, "the clip acts"


@pytest.mark.parametrize(
    ("layout", "planted", "cause"),
    [
        ({"ranks": 1}, {"times": 1}, "times_micro_batches"),
        ({"ranks": 2, "sharded": 1}, {"clip": 0.1}, "optimizer_settings"),
        ({"ranks": 1}, {"means": 1}, "model_settings"),
    ],
)
def test_a_planted_factor_is_named_first(layout, planted, cause, runs):
    diagnosis = wb.diagnose(runs(**layout)[0], runs(**layout, **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


@pytest.mark.parametrize("other", [{"ranks": 1, "each": 4}, *LAYOUTS[1:2], LAYOUTS[3]], ids=str)
def test_another_layout_or_division_is_no_difference(other, runs):
    diagnosis = wb.diagnose(runs(ranks=1)[0], runs(**other)[0])
    assert diagnosis.equal, str(diagnosis)


def test_what_cannot_be_recorded_is_refused(tmp_path):
    lines = run("megatron", "refused", tmp_path / "mine", loop="megatron_schedule").splitlines()
    assert [line.removeprefix("refused: ") for line in lines if line.startswith("refused")] == [
        "GPTModel, which is not Megatron's DDP",
        "calculate_per_token_loss without finalize_model_grads_func",
    ]
