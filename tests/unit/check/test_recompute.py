"""The recomputation is the trainer's arithmetic, in any split into ranks and micro-batches."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.dumped_step import SETTINGS, advantages, dump, inputs, loss
from workbench.check.alternatives import loss_alternatives
from workbench.check.memo import Memo
from workbench.check.reading import Reading, Whole
from workbench.check.recompute import can_evaluate, recompute_advantages, recompute_loss
from workbench.errors import SpecError, WorkbenchError
from workbench.specs.losses import LossSpec

SPEC = LossSpec(**SETTINGS)


def reading(step=None, **changes):
    return replace(Reading(step or dump(), SPEC, ("grpo", {"epsilon": 1e-4})), **changes)


def test_loss_terms_and_coefficients_are_those_of_plain_arithmetic():
    values = inputs()
    leaf = values["policy_logprobs"].clone().requires_grad_()
    total, terms = loss({**values, "policy_logprobs": leaf}, advantages())
    total.backward()
    result = recompute_loss(reading())
    assert result["losses/total"] == pytest.approx(float(total.detach()), abs=1e-14)
    assert result["losses/kl"] == pytest.approx(float(terms["kl"].detach()), abs=1e-14)
    assert result["losses/kl_without_coefficient"] == pytest.approx(float(terms["kl"].detach()) / 0.1, abs=1e-13)
    torch.testing.assert_close(result["coefficients"], leaf.grad.reshape(-1), atol=1e-14, rtol=0)
    parts = recompute_loss(reading(), by_term=True)
    torch.testing.assert_close(parts["parts/policy"] + parts["parts/kl"], result["coefficients"], atol=1e-15, rtol=0)
    assert result["counts/tokens"] == 33
    ratio = (values["policy_logprobs"] - values["old_logprobs"]).exp()[values["loss_mask"]]
    torch.testing.assert_close(result["ratios"][values["loss_mask"].reshape(-1)], ratio)


def test_advantages_are_those_of_plain_arithmetic():
    mask = inputs()["loss_mask"]
    torch.testing.assert_close(
        recompute_advantages(reading()), (advantages()[:, None] * mask).reshape(-1), atol=1e-12, rtol=0
    )
    assert recompute_advantages(reading(estimator=None)) is None
    assert recompute_advantages(reading(replace(dump(), documents={}))) is None


@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 0, 1, 2, 3), (3, 3, 2, 2, 1, 1, 1, 1)])
def test_the_split_changes_nothing_of_an_exact_contract(rows):
    """Also with a micro-batch that has no document."""
    step = dump(layout={"dp": 2, "micro_batches": 2}, documents={"rows": torch.tensor(rows)})
    whole, split = recompute_loss(reading()), recompute_loss(reading(step))
    assert split["losses/total"] == pytest.approx(whole["losses/total"], abs=1e-14)
    torch.testing.assert_close(split["coefficients"], whole["coefficients"], atol=1e-14, rtol=0)
    name = "metrics/ratio/policy_old/mean"
    assert split[name] == pytest.approx(whole[name], abs=1e-12)


def test_means_of_micro_batches_divide_by_their_own_tokens():
    rows = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    step = dump(layout={"micro_batches": 2}, documents={"rows": rows})
    local = {"scaling": {"counts": "micro_batch", "divided_by": ("micro_batches",)}}
    result = recompute_loss(reading(step).changed(compat=local))
    values = inputs()
    mask, of_rows = values["loss_mask"], (rows == 0)[:, None]
    first, second = (mask & of_rows).sum(), (mask & ~of_rows).sum()
    weights = torch.where(of_rows, mask.double() / first, mask.double() / second) / 2
    assert result["losses/total"] == pytest.approx(float(loss(values, advantages(), weights)[0]), abs=1e-14)


def test_a_missing_policy_is_the_old_one_only_if_that_is_stated():
    step = dump().with_tokens(policy_logprobs=None)
    assert not can_evaluate(step)
    with pytest.raises(SpecError, match="no policy_logprobs"):
        recompute_loss(reading(step))
    result = recompute_loss(reading(replace(step, on_policy=True)))
    assert set(result["ratios"].tolist()) == {0.0, 1.0}
    with pytest.raises(SpecError, match="no advantages"):
        recompute_loss(reading(replace(dump(), documents={})))


def test_settings_change_key_by_key_or_as_a_whole():
    changed = reading().changed(correction={"ratio_high": 3.0})
    assert (changed.spec.correction.ratio, changed.spec.correction.ratio_high) == ("token", 3.0)
    assert not reading().changed(correction=Whole({"kind": "none"})).spec.correction.acts


def test_results_shared_with_other_readings_are_those_of_each_alone():
    """Every mistake, right before and after another one: what is kept depends on all that it is computed from."""
    step = dump()
    step = step.with_tokens(entropies=step.tokens["policy_logprobs"].abs())
    alone = reading(step, spec=LossSpec(**SETTINGS, entropy_coefficient=0.1))
    shared = replace(alone, memo=Memo())
    for one in [shared, *(one.reading for one in loss_alternatives(shared)), shared]:
        for named in ({}, {"shift": 1e-3}, {"by_entropy": True, "by_term": True}) if one is shared else ({},):
            try:
                expected = recompute_loss(replace(one, memo=None), metrics=False, **named)
            except WorkbenchError:
                continue
            values = recompute_loss(one, metrics=False, **named)
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(torch.as_tensor(values[name]), torch.as_tensor(value)), name
