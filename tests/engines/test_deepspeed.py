"""Engines of DeepSpeed with ZeRO 1, 2 and 3, recorded by the lines that a user adds."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines
STAGES = (1, 2, 3)


def recorded(stage, folder, ranks=2, **changes):
    output = run("deepspeed", stage, folder, *(f"{name}={value}" for name, value in changes.items()), ranks=ranks)
    return folder, output.rsplit("weights ", 1)[1].split()[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Stage and changes -> a record; each is made once."""
    folders, root = {}, tmp_path_factory.mktemp("deepspeed")

    def of(stage, ranks=2, **changes):
        key = (stage, ranks, *sorted(changes.items()))
        if key not in folders:
            folders[key] = recorded(stage, root / str(len(folders)), ranks, **changes)
        return folders[key]

    return of


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by-hand") / "mine"
    run("deepspeed", 0, folder, "by_hand=1")
    return load_file(f"{folder}-by-hand.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_a_recorder_changes_no_bit_of_the_weights(stage, runs):
    _, weights = runs(stage)
    _, plain = runs(stage, plain=1)
    assert weights == plain


@pytest.mark.parametrize(
    ("stage", "changes"), [(0, {}), (1, {}), (2, {}), (3, {}), (3, {"persist": 300}), (2, {"ranks": 1})], ids=str
)
def test_losses_clips_and_gradients_are_those_of_one_plain_rank(stage, changes, runs, by_hand):
    folder, _ = runs(stage, **changes)
    steps = files.read_steps(folder)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        expected = {name: by_hand[f"{number}.{name}"] for name in step["gradient_norms"]}
        assert step["loss"] == pytest.approx(by_hand[f"{number}.loss"].item(), rel=1e-6)
        assert step["observed"]["clip"] == {"max_norm": 0.2}
        gradients = files.read_tensors(folder, number, "gradients")
        assert gradients.keys() == expected.keys() == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=2e-4, atol=2e-6, msg=f"{number} {name}")
            assert step["gradient_norms"][name] == pytest.approx(gradients[name].double().norm().item(), rel=1e-6)
    assert max(torch.stack([by_hand[f"0.{name}"].norm() for name in expected]).norm(), 0) > 0.2, "the clip acts"


@pytest.mark.parametrize(
    ("stage", "planted", "cause"),
    [
        (1, {"accumulation": 1}, "times_micro_batches"),
        (3, {"accumulation": 1}, "times_micro_batches"),
        (2, {"twice": 1}, "over_micro_batches"),
        (3, {"clip": 0.1}, "optimizer_settings"),
    ],
)
def test_a_planted_factor_is_named_first(stage, planted, cause, runs):
    diagnosis = wb.diagnose(runs(stage)[0], runs(stage, **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stage": 1}, {"stage": 1, "each": 2}),
        ({"stage": 2}, {"stage": 2, "ranks": 1}),
        ({"stage": 3}, {"stage": 3, "ranks": 1, "each": 4}),
        ({"stage": 1}, {"stage": 2}),
        ({"stage": 0}, {"stage": 3}),
    ],
    ids=str,
)
def test_another_division_or_stage_is_no_difference(one, other, runs):
    diagnosis = wb.diagnose(runs(**one)[0], runs(**other)[0])
    assert diagnosis.equal, str(diagnosis)


def test_parameters_of_zero_3_are_recorded_in_their_whole_shapes(runs):
    start = files.read_context(runs(3)[0])
    shapes = {name: entry["shape"] for name, entry in start["observed"]["parameters"].items()}
    assert shapes == {"0.weight": [32, 16], "1.weight": [16, 16], "1.bias": [16], "3.weight": [32, 16], "3.bias": [32]}
    assert (start["dp"], start["micro_batches"], start["zero_stage"], start["max_grad_norm"]) == (2, 4, 3, 0.2)
    weights = [step["observed"]["weights"] for step in files.read_steps(runs(3)[0])]
    assert len(set(weights)) == 3, "partitions are seen to change"


def test_weights_in_bfloat16_have_float32_gradients(runs, by_hand):
    folder, _ = runs(2, bf16=1)
    gradients = files.read_tensors(folder, 0, "gradients")
    assert {value.dtype for value in gradients.values()} == {torch.float32}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, by_hand[f"0.{name}"], rtol=0.05, atol=1e-3, msg=name)
