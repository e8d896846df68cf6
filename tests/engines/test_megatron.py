"""GPT models of megatron-core over tp and dp, recorded by the lines that a user adds."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines
LAYOUTS = ({"ranks": 2, "tp": 2}, {"ranks": 2}, {"ranks": 2, "tp": 2, "gated": 1}, {"ranks": 4, "tp": 2})
NEEDS_GPU = (
    *("DistributedDataParallel", "DistributedOptimizer", "FP32Optimizer", "get_grad_norm_fp32"),
    *("clip_grad_by_total_norm_fp32", "get_forward_backward_func", "DotProductAttention", "RotaryEmbedding"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Ranks and changes -> a record and its weights; each is made once."""
    folders, root = {}, tmp_path_factory.mktemp("megatron")

    def of(ranks=1, **changes):
        key = (ranks, *sorted(changes.items()))
        if key not in folders:
            given = (f"{name}={value}" for name, value in changes.items())
            output = run("megatron", "train", root / str(len(folders)), *given, ranks=ranks)
            folders[key] = (root / str(len(folders)), output.rsplit("weights ", 1)[-1].split())
        return folders[key]

    return of


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_recorder_changes_no_bit_of_the_weights(layout, runs):
    _, weights = runs(**layout)
    _, plain = runs(**layout, plain=1)
    assert weights == plain


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_clips_and_gradients_are_those_of_one_plain_rank(layout, runs):
    folder, _ = runs(**layout)
    gated = {"gated": 1} if "gated" in layout else {}
    by_hand = load_file(f"{runs(by_hand=1, **gated)[0]}-by-hand.safetensors")
    steps = files.read_steps(folder)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        expected = {
            name.removeprefix(f"{number}."): value
            for name, value in by_hand.items()
            if name.startswith(f"{number}.") and not name.endswith(".loss")
        }
        assert step["loss"] == pytest.approx(by_hand[f"{number}.loss"].item(), rel=1e-6)
        assert step["observed"]["clip"] == {"max_norm": 0.2}
        gradients = files.read_tensors(folder, number, "gradients")
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5, msg=f"{number} {name}")
            assert step["gradient_norms"][name] == pytest.approx(gradients[name].double().norm().item(), rel=1e-6)
        assert torch.stack([value.norm() for value in expected.values()]).norm() > 0.2, "the clip acts"
    shapes = files.read_context(folder)["observed"]["parameters"]
    assert {name: tuple(entry["shape"]) for name, entry in shapes.items()} == {
        name: tuple(value.shape) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("layout", "planted", "cause"),
    [
        ({"ranks": 2, "tp": 2}, {"accumulation": 1}, "times_micro_batches"),
        ({"ranks": 2}, {"twice": 1}, "over_micro_batches"),
        ({"ranks": 2, "tp": 2}, {"clip": 0.1}, "optimizer_settings"),
    ],
)
def test_a_planted_factor_is_named_first(layout, planted, cause, runs):
    diagnosis = wb.diagnose(runs(**layout)[0], runs(**layout, **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"ranks": 2, "tp": 2}, {"ranks": 2, "tp": 2, "each": 4}),
        ({"ranks": 2, "tp": 2}, {"ranks": 1}),
        ({"ranks": 2}, {"ranks": 4, "tp": 2}),
        ({"ranks": 2, "tp": 2, "gated": 1}, {"ranks": 1, "gated": 1}),
    ],
    ids=str,
)
def test_another_layout_or_division_is_no_difference(one, other, runs):
    diagnosis = wb.diagnose(runs(**one)[0], runs(**other)[0])
    assert diagnosis.equal, str(diagnosis)


def test_what_needs_a_gpu_says_so(tmp_path):
    """The list of engines/README.md: where one of them runs on a CPU, it belongs into the loop."""
    lines = run("megatron", "refused", tmp_path / "mine").splitlines()
    answers = dict(line.split(" ", 1) for line in lines if line.partition(" ")[0] in NEEDS_GPU)
    assert answers.keys() == set(NEEDS_GPU)
    assert [name for name, answer in answers.items() if answer == "runs"] == []
