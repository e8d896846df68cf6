"""Two systems on one batch: the first recorded, recomputed and set difference, whatever the order of documents."""

import json
from dataclasses import replace

import pytest
import torch

import workbench as wb
from tests.helpers.dumped_step import ADVANTAGES, LENGTHS, SETTINGS, WIDTH, dump, inputs
from workbench.check.against import compare_steps
from workbench.check.numbers import recompute_numbers
from workbench.check.reading import Reading
from workbench.dumps.step import StepDump
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec


def reordered(step, order, pad=0, **more):
    """The same step with its documents in another order, and wider padding."""

    def rows(value):
        value = value.reshape(8, WIDTH)[list(order)]
        return torch.cat([value, value.new_zeros(8, pad)], dim=1)

    tokens = {name: rows(value) for name, value in step.tokens.items()}
    documents = {name: value[list(order)] for name, value in step.documents.items()}
    about = {name: getattr(step, name) for name in ("settings", "advantages", "losses", "dtype")}
    return StepDump.from_rectangle(tokens, documents, **{**about, **more})


def with_ids(step):
    ids_T = torch.arange(len(step.document_ids_T)) * torch.as_tensor(step.tokens["token_mask"])
    return step.with_tokens(token_ids=ids_T)


def compared(*steps):
    """Compare two steps as `check_step` does, without its search for the causes of either, which takes a second."""
    estimator = (ADVANTAGES["name"], {"epsilon": ADVANTAGES["epsilon"]})
    return compare_steps(
        *(recompute_numbers(Reading(step, LossSpec.model_validate(step.settings), estimator)) for step in steps)
    )


def test_the_same_step_agrees():
    check = wb.check_step(dump(), against=dump())
    assert check.ok
    assert check.against.verdict == "agree"
    assert not check.against.settings


def test_documents_in_another_order_with_other_padding_are_matched_by_their_tokens():
    step = with_ids(dump())
    other = reordered(step, (3, 1, 0, 2, 7, 6, 5, 4), pad=4)
    result = compared(step, other)
    assert result.ok, str(result)
    assert result.documents == f"8 documents and {sum(LENGTHS)} tokens of both, matched by token ids"


def test_one_wrong_value_is_located_in_both_dumps():
    step = with_ids(dump())
    other = reordered(step, (3, 1, 0, 2, 7, 6, 5, 4))
    old_T = other.tokens["old_logprobs"].clone()
    old_T[2 * WIDTH + 4] -= 0.5  # document 0 of the first
    result = compared(step, other.with_tokens(old_logprobs=old_T))
    assert result.first("recorded").quantity == "old_logprobs"
    assert result.first("recorded").place == "document 0, token 4 | document 2, token 4"
    assert result.first("recorded").tokens == 1
    assert result.first("settings") is None
    assert result.first("recomputed").quantity == "ratios"


def test_settings_that_differ_are_named_with_their_effect():
    values = inputs()
    settings = {**SETTINGS, "denominator": "document", "surrogate": {"clip_low": 0.2, "clip_high": 9.0}}
    weights = values["loss_mask"] / values["loss_mask"].sum(1, keepdim=True) / 8
    tame = {"policy_logprobs": values["old_logprobs"] + 0.01}  # no ratio reaches a bound
    left = dump(tame, recorded=tame)
    right = dump(tame, recorded=tame, weights=weights, settings=settings)
    check = wb.check_step(left, against=right)
    assert check.verdict == "agrees"
    result = check.against
    assert result.verdict == "differ"
    assert not check.ok
    assert result.first("settings").quantity == "loss_weights"
    assert result.first("recorded").quantity == "coefficients"
    acts = {setting.name: setting.acts for setting in result.settings}
    assert acts == {"surrogate": False, "denominator": True}
    assert "no effect on this batch" in str(result)


def test_a_trainer_that_does_not_do_what_its_settings_say_is_told_apart():
    wrong = dump(factor=2.0)
    result = compared(dump(), wrong)
    first = result.first("recorded")
    assert (first.quantity, first.recomputed, first.settings) == ("coefficients", True, True)
    assert "check each alone" in str(result)


def test_a_mask_that_differs_is_the_first_difference():
    step = with_ids(dump())
    mask_T = step.loss_mask_T.clone()
    mask_T[int(torch.nonzero(mask_T)[-1])] = False
    other = step.with_tokens(loss_mask=mask_T)
    assert compared(step, other).first("recorded").quantity == "loss_mask"
    bare = [one.with_tokens(token_mask=None) for one in (step, other)]  # documents end at their last trained token
    assert compared(*bare).first("recorded").quantity == "loss_mask"


def test_groups_under_other_numbers_are_the_same_and_other_groups_are_not():
    step = dump()
    renamed = replace(step, documents={**step.documents, "group_ids": 7 - step.documents["group_ids"]})
    assert compared(step, renamed).ok
    moved = step.documents["group_ids"].roll(1)
    other = replace(step, documents={**step.documents, "group_ids": moved})
    assert compared(step, other).first("recorded").quantity == "group_ids"


def test_documents_of_one_dump_only_are_a_difference():
    step = with_ids(dump())
    ids_T = step.tokens["token_ids"].clone()
    ids_T[:WIDTH] += 1000 * step.tokens["token_mask"][:WIDTH]
    result = compared(step, step.with_tokens(token_ids=ids_T))
    assert result.first("recorded").quantity == "documents"
    assert len(result.differences) == 2
    assert "1 documents only in" in str(result)


def test_another_batch_is_an_error():
    step = dump()
    half = slice(0, 4 * WIDTH)
    documents = {name: value[:4] for name, value in step.documents.items()}
    tokens = {name: value[half] for name, value in step.tokens.items()}
    other = StepDump(step.document_ids_T[half], tokens, documents, settings=SETTINGS)
    with pytest.raises(SpecError, match="token_ids in at most one"):
        compared(step, other)
    ids = with_ids(step)
    with pytest.raises(SpecError, match="none has the same tokens"):
        compared(ids, ids.with_tokens(token_ids=ids.tokens["token_ids"] + 1))


def test_the_comparison_is_json():
    check = wb.check_step(dump(), against=dump(factor=2.0))
    answer = json.loads(json.dumps(check.as_json()))
    assert answer["against"]["first"] == {"recorded": "coefficients", "recomputed": None, "settings": None}
    assert "numbers" not in answer
