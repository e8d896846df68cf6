"""verl's engine worker, recorded by one call, on one rank and on two."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines


def recorded(folder, ranks=1, **changes):
    output = run("verl", "update", folder, *(f"{name}={value}" for name, value in changes.items()), ranks=ranks)
    return folder, output.rsplit("weights ", 1)[1].split()[0]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """A record on one rank, with gradients by hand next to it."""
    return recorded(tmp_path_factory.mktemp("verl") / "right", by_hand=1)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("verl") / "two", ranks=2)


def test_a_recorder_changes_no_bit_of_the_weights(right, on_two_ranks, tmp_path):
    assert recorded(tmp_path / "none", plain=1)[1] == right[1]
    assert recorded(tmp_path / "two", plain=1, ranks=2)[1] == on_two_ranks[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_clip_and_gradients_are_those_by_hand(ranks, right, on_two_ranks):
    by_hand, folder = load_file(f"{right[0]}.safetensors"), (right if ranks == 1 else on_two_ranks)[0]
    steps, gradients = files.read_steps(folder), files.read_tensors(folder, 0, "gradients")
    assert [step["observed"]["clip"] for step in steps] == [{"max_norm": 0.05}] * 3
    assert all(step["counts"]["documents"] == 8 for step in steps)
    assert steps[0]["loss"] == pytest.approx(float(by_hand.pop("loss")), rel=1e-5)
    assert sum(float(value.square().sum()) for value in gradients.values()) > 0.06**2, "of before the clip"
    assert gradients.keys() == by_hand.keys()
    for name, gradient in by_hand.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-8, msg=name)


def test_values_of_tokens_are_noted_in_one_order_on_any_number_of_ranks(right, on_two_ranks):
    one, two = (files.read_tensors(folder, 0, "tokens") for folder, _ in (right, on_two_ranks))
    here, trained = one["documents"] >= 0, one["trained"]
    assert one["documents"][here].unique().tolist() == list(range(8))
    assert int(here.sum()) == int(trained.sum()) + 1, "one token of a response is masked"
    assert one["targets"][here].min() >= 2, "no padding"
    assert bool((one["policy_logprobs"][trained] < 0).all())
    assert not torch.equal(one["policy_logprobs"][trained], one["old_logprobs"][trained])
    for document in range(8):
        assert len(one["advantages"][one["documents"] == document].unique()) == 1
    for name in one.keys() - {"rows"}:
        torch.testing.assert_close(one[name], two[name], msg=name)


@pytest.mark.parametrize(
    ("planted", "cause"),
    [
        ({"times": 1}, "times_micro_batches"),
        ({"aggregation": "seq-mean-token-mean"}, "mean_per_documents"),
        ({"clip_ratio": 0.05}, "clipping"),
        ({"clip": 0.01}, "optimizer_settings"),
    ],
)
def test_a_planted_factor_is_named_first(planted, cause, right, tmp_path):
    diagnosis = wb.diagnose(right[0], recorded(tmp_path / "wrong", **planted)[0])
    assert diagnosis.causes[0].name == cause, str(diagnosis)


@pytest.mark.parametrize("other", [{"each": 4}, {"dynamic": 30}, {"nested": 1, "each": 8}])
def test_another_division_into_micro_batches_is_no_difference(other, right, tmp_path):
    diagnosis = wb.diagnose(right[0], recorded(tmp_path / "other", **other)[0])
    assert diagnosis.equal, str(diagnosis)


def test_a_norm_by_the_longest_response_depends_on_micro_batches(tmp_path):
    """A finding: without loss_scale_factor each micro-batch of nested responses is divided by its own longest one."""
    changes = {"nested": 1, "aggregation": "seq-mean-token-sum-norm"}
    two, eight = (recorded(tmp_path / str(each), **changes, each=each)[0] for each in (2, 8))
    assert not wb.diagnose(two, eight).equal
    losses = [files.read_steps(folder)[0]["loss"] for folder in (two, eight)]
    assert losses == pytest.approx([0.55, 0.42], abs=0.01)


def test_two_ranks_are_no_difference(right, on_two_ranks):
    diagnosis = wb.diagnose(right[0], on_two_ranks[0])
    assert diagnosis.equal, str(diagnosis)
    steps = files.read_steps(on_two_ranks[0])
    assert [(step["micro_batches"], step["observed"]["replicas"]) for step in steps] == [(2, "equal")] * 3
