"""Arrays of a case: unused ones are refused; as a row they have its shapes and masks, and no masked values."""

import numpy as np
import pytest
import torch

from tests.unit.systems.test_cases import ALL, index
from tests.unit.systems.test_replays import FIRST, arguments
from workbench.errors import ShapeError, SpecError
from workbench.reduction.evaluate import CORRECTION_WEIGHTS
from workbench.systems import replay
from workbench.systems.case import Case, inputs_of, logprobs_only
from workbench.systems.registry import SYSTEMS, load_system
from workbench.systems.replays import COMMON


def case(**inputs):
    return Case.of("verl", "policy_loss", "f", {"a": 1}, inputs)


MASK = np.array([[1.0, 1, 0], [0, 0, 0]])
LOGPROBS = np.array([[-1.0, -2, np.nan], [np.inf, -5, -6]])


def test_rows_of_a_rectangle_are_documents_and_garbage_is_left_behind():
    row = case(logprobs=LOGPROBS, old_logprobs=LOGPROBS, mask=MASK, advantages=np.array([2.0, np.nan])).row()
    assert row.document_ids_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.loss_mask_T.tolist() == [True, True, False, False, False, False]
    assert row.old_logprobs_T.tolist() == [-1, -2, 0, 0, 0, 0]
    assert row.advantages_T.tolist() == [2, 2, 0, 0, 0, 0]
    assert row.lengths_T.tolist() == [2, 2, 2, 1, 1, 1]
    assert row.sampler_logprobs_T is None
    assert row.old_logprobs_T.dtype == torch.float64


@pytest.mark.parametrize(
    "form",
    [
        lambda values: values.tolist(),
        lambda values: values[::-1].copy()[::-1],
        torch.as_tensor,
        lambda values: np.broadcast_to(values, values.shape),
    ],
    ids=["lists", "backwards", "tensors", "read-only"],
)
def test_values_come_in_any_form_with_every_digit(form):
    values, index = np.array([0.1, -1 / 3, 0.7]), np.array([0, 0, 1])
    result = case(logprobs=form(values), document_index=form(index))
    assert result["logprobs"].tolist() == values.tolist()
    assert result["document_index"].dtype == torch.int64


def test_packed_rows_have_an_index():
    result = case(logprobs=np.zeros(3), document_index=np.array([0, 0, 2], dtype=np.int32), mask=np.array([0, 1, 1]))
    assert result.row().document_ids_T.tolist() == [0, 0, 2]
    assert result.row().lengths_T.tolist() == [1, 1, 1]
    assert case(logprobs=np.zeros(3)).row().document_ids_T.tolist() == [0, 0, 0]


def test_a_sample_mask_and_a_negative_target_take_tokens_out():
    result = case(targets=np.array([[3, -1, 5], [1, 2, 3]], dtype=np.int32), sample_mask=np.array([1.0, 0.0]))
    assert result.loss_mask_T.tolist() == [True, False, True, False, False, False]
    assert result.targets_T.tolist() == [3, 0, 5, 1, 2, 3]
    assert result.row().targets_T.tolist() == [3, 0, 5, 1, 2, 3]


def test_lengths_that_came_with_the_batch_win():
    result = case(targets=np.array([1, 2]), label_counts=np.array([7, 0]))
    assert result.row().lengths_T.tolist() == [7, 1]


def test_ready_made_weights_and_further_fields():
    result = case(logprobs=LOGPROBS, mask=MASK, is_weights=np.array([[0.5], [2.0]]), rewards=np.array([1.0, 3.0]))
    row = result.row(old_logprobs_T=torch.full((6,), -9.0))
    assert row.extensions[CORRECTION_WEIGHTS].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert row.rewards_T.tolist() == [1, 1, 1, 3, 3, 3]
    assert row.old_logprobs_T.tolist() == [-9.0] * 6


def test_values_return_in_their_original_shape():
    result = case(logprobs=LOGPROBS)
    assert result.shaped(torch.arange(6.0, requires_grad=True)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not result.shaped(torch.arange(6.0, requires_grad=True)).requires_grad


def test_missing_and_mismatched_arrays_are_reported():
    with pytest.raises(SpecError, match="input 'advantages'"):
        case(logprobs=LOGPROBS)["advantages"]
    with pytest.raises(SpecError, match="the shape of its tokens"):
        _ = case(rewards=np.zeros(2)).shape
    with pytest.raises(ShapeError, match="one value per token or one per row"):
        case(logprobs=LOGPROBS, advantages=np.zeros(4)).row()


def test_a_logprobs_only_head_has_no_other_outputs():
    text = logprobs_only(torch.zeros(2))
    assert (text.entropy_T, text.logsumexp_T) == (None, None)
    assert logprobs_only(torch.zeros(2), torch.ones(2)).entropy_T.tolist() == [1, 1]


@pytest.mark.parametrize(("system", "kind", "name"), FIRST)
def test_an_array_that_nothing_uses_is_refused_by_name(system, kind, name):
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError) as caught:
        replay(system, kind, case["function"], case["config"], inputs | {"lunch_break": np.ones(3)})
    assert caught.value.parts["requested"] == f"replay of {kind} of {system} with 'lunch_break'"
    assert "uses lunch_break" in caught.value.parts["found"]
    for taken in inputs:
        assert taken in caught.value.parts["rule"]


@pytest.mark.parametrize(("system", "kind", "name"), FIRST)
def test_an_option_that_nothing_uses_is_refused_by_name(system, kind, name):
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError, match="lunch_break"):
        replay(system, kind, case["function"], case["config"] | {"lunch_break": 0.5}, inputs)


def test_the_nearest_name_that_is_not_given_is_offered():
    case, inputs = arguments("areal", "000_ppo_mild")
    inputs["old_logprob"] = inputs.pop("old_logprobs")
    with pytest.raises(SpecError, match="did you mean 'old_logprobs' for 'old_logprob'"):
        replay("areal", case["kind"], case["function"], case["config"], inputs)


@pytest.mark.parametrize(
    ("system", "unused"),
    [
        ("openrlhf", "ref_logprobs"),
        ("openrlhf", "entropies"),
        ("verl", "sample_mask"),
        ("slime", "is_weights"),
        ("prime_rl", "old_logprobs"),
        ("trl", "label_counts"),
        ("areal", "logprobs_unfiltered"),
    ],
)
def test_arrays_of_another_system_are_not_ignored(system, unused):
    name = next(name for each, name in ALL if each == system and index(system)[name]["kind"].startswith("policy_loss"))
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError, match=f"with '{unused}'"):
        replay(system, case["kind"], case["function"], case["config"], inputs | {unused: inputs["logprobs"]})


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_kind_lists_its_arrays(system):
    for kind in {**COMMON, **load_system(system).replays}:
        taken = inputs_of(system, kind)
        assert len(set(taken)) == len(taken) >= 2
    with pytest.raises(SpecError, match="one of policy_loss"):
        inputs_of(system, "lunch")


def test_support_flags_may_have_any_name_and_are_refused_if_unused():
    logits = np.array([[0.5, 1.0, -1.0]])
    inputs = {"logits": logits, "targets": np.array([0]), "cotangent_logprobs": np.ones(1)}
    kept = {"top_p": np.array([[1, 1, 0]])}
    result = replay("slime", "logprobs", "f", {"keep_mask": True}, inputs | kept)
    assert result["logprobs"] == pytest.approx(0.5 - np.log(np.exp(0.5) + np.exp(1.0)))
    with pytest.raises(SpecError, match="with 'top_p'"):
        replay("slime", "logprobs", "f", {}, inputs | kept)
    with pytest.raises(SpecError, match="with 'keep_mask'"):
        replay("slime", "logprobs", "f", {}, inputs | {"keep_mask": kept["top_p"]})
