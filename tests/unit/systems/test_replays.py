"""Common parts of all replays: kinds, numpy or tensors, garbage under the mask, gradients on request."""

import numpy as np
import pytest
import torch

from tests.unit.systems.test_cases import ALL, CASES, index
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import replay
from workbench.systems.registry import load_system
from workbench.systems.replays import COMMON, aggregation

NEEDS_MASK = {"policy_loss", "policy_loss_packed"}
GARBAGE = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "is_weights", "entropies")


def arguments(system, name):
    case = index(system)[name]
    with np.load(CASES / system / case["file"]) as arrays:
        return case, {key[3:]: arrays[key] for key in arrays if key.startswith("in.")}


FIRST = {}
for _system, _name in ALL:
    FIRST.setdefault((_system, index(_system)[_name]["kind"]), _name)
FIRST = [(system, kind, name) for (system, kind), name in FIRST.items()]


def test_every_kind_of_the_cases_has_a_replay():
    for system, kind, _ in FIRST:
        assert kind in {**COMMON, **load_system(system).replays}, (system, kind)


@pytest.mark.parametrize(("system", "kind", "name"), [f for f in FIRST if f[1] in NEEDS_MASK])
def test_masked_values_do_not_matter(system, kind, name):
    case, inputs = arguments(system, name)
    clean = replay(system, kind, case["function"], case["config"], inputs)
    hidden = inputs["mask"] == 0
    spoilt = {
        key: np.where(hidden, np.nan, value) if key in GARBAGE and value.shape == hidden.shape else value
        for key, value in inputs.items()
    }
    assert hidden.any()
    result = replay(system, kind, case["function"], case["config"], spoilt)
    assert result["loss"] == clean["loss"]
    np.testing.assert_array_equal(result["grad_logprobs"], clean["grad_logprobs"])
    assert not result["grad_logprobs"][hidden].any()


@pytest.mark.parametrize(("system", "kind", "name"), FIRST)
def test_tensors_give_tensors_and_arrays_arrays(system, kind, name):
    case, inputs = arguments(system, name)
    arrays = replay(system, kind, case["function"], case["config"], inputs)
    tensors = replay(
        system, kind, case["function"], case["config"], {key: torch.as_tensor(value) for key, value in inputs.items()}
    )
    assert arrays.keys() == tensors.keys()
    numbers = [key for key in arrays if key != "metrics"]
    assert {type(arrays[key]) for key in numbers} <= {np.ndarray, np.float64}
    for key in numbers:
        assert isinstance(tensors[key], torch.Tensor), key
        np.testing.assert_array_equal(tensors[key].numpy(), arrays[key])
        assert not tensors[key].requires_grad, key
    assert all(type(value) is float for value in arrays["metrics"].values())


def test_a_gradient_is_scaled_and_added_to_the_existing_one():
    case, inputs = arguments("fast_llm", "000_grpo_onpolicy")
    config = {key: value for key, value in case["config"].items() if key != "grad_output"}
    plain = replay("fast_llm", case["kind"], case["function"], config, inputs)
    before = np.full_like(inputs["logits"], 0.25)
    result = replay(
        "fast_llm", case["kind"], case["function"], config | {"grad_output": 3.0}, inputs | {"grad_logits_in": before}
    )
    np.testing.assert_allclose(result["grad_logits"], before + 3 * plain["grad_logits"], rtol=1e-12, atol=1e-15)
    assert result["loss"] == plain["loss"]
    none = replay("fast_llm", case["kind"], case["function"], config | {"grad_output": 0.0}, inputs)
    assert not none["grad_logits"].any()


def test_entropies_without_a_cotangent_have_no_gradient():
    logits = np.array([[0.5, 1.0, -1.0]])
    inputs = {"logits": logits, "targets": np.array([1]), "cotangent_logprobs": np.array([2.0])}
    result = replay("prime_rl", "logprobs", "f", {}, inputs)
    halved = replay("prime_rl", "logprobs", "f", {"temperature": 0.5}, inputs | {"logits": logits / 2})
    np.testing.assert_allclose(halved["logprobs"], result["logprobs"])
    np.testing.assert_allclose(halved["grad_logits"], 2 * result["grad_logits"])
    probability = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(result["logprobs"], np.log(probability[:, 1]))
    np.testing.assert_allclose(result["entropy"], -(probability * np.log(probability)).sum(1))
    np.testing.assert_allclose(result["grad_logits"], 2 * (np.array([[0, 1, 0]]) - probability))


def test_values_are_summed_with_the_weights_of_a_spec():
    from workbench.systems.case import Case

    values, mask = np.array([[1.0, 2, np.nan], [4, 5, 6]]), np.array([[1, 1, 0], [1, 0, 0]])
    case = Case.of("verl", "aggregation", "f", {}, {"values": values, "mask": mask})
    result = aggregation(case, LossSpec(denominator="document"))
    assert float(result["loss"]) == pytest.approx((1.5 + 4) / 2)
    assert result["grad_values"].tolist() == [[0.25, 0.25, 0], [0.5, 0, 0]]


def test_a_mean_over_rows_sees_nothing_under_the_mask():
    values, mask = np.array([[1.0, 2, np.nan], [4, 5, np.inf]]), np.array([[1, 1, 0], [1, 0, 0]])
    result = replay(
        "nous_torchtitan", "aggregation", "masked_mean", {"per_seq": True}, {"values": values, "mask": mask}
    )
    assert float(result["result"]) == pytest.approx((1.5 + 4) / 2)
    assert result["grad_values"].tolist() == [[0.25, 0.25, 0], [0.5, 0, 0]]


def test_an_unknown_kind_is_refused_with_the_valid_names():
    with pytest.raises(SpecError, match="replay of 'lunch' of verl") as caught:
        replay("verl", "lunch", "f", {}, {})
    assert "policy_loss_packed" in str(caught.value)
