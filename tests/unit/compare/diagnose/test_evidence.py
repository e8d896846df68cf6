"""What differs between two records, step by step."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone, tokens
from workbench.compare.diagnose.evidence import compare_records
from workbench.compare.diagnose.record import Record, RecordedStep


def test_a_record_is_equal_to_itself(right):
    found = compare_records(right, make_record())
    assert found.first.differs == ()
    assert found.first.known == ("loss", "gradient", "metrics", "tokens")
    assert found.first.factor == pytest.approx(1)


@pytest.mark.parametrize("only_norms", [False, True])
def test_one_factor_on_everything(right, only_norms):
    wrong = make_record(scale=0.25)
    records = (norms_alone(right), norms_alone(wrong)) if only_norms else (right, wrong)
    step = compare_records(*records).first
    assert step.differs == ("gradient",)
    assert step.factor == pytest.approx(0.25, rel=1e-12)
    assert step.parallel
    assert (step.cosine is None) == only_norms


def test_another_direction_is_no_factor(right):
    other = {name: values.flip(0) for name, values in gradients().items()}
    step = compare_records(right, make_record(changes=other)).first
    assert not step.parallel
    assert abs(step.cosine) < 0.2
    from_norms = compare_records(norms_alone(right), norms_alone(make_record(changes=other))).first
    assert from_norms.gradient_same, "norms cannot show a direction"


def test_one_parameter_among_many(right):
    name = "model.layers.0.self_attn.k_proj.weight"
    step = compare_records(right, make_record(changes={name: gradients()[name] / 2})).first
    assert [key for key, p in step.parameters.items() if not p.same] == [name]
    assert step.parameters[name].ratio == pytest.approx(0.5)
    assert step.parameters[name].cosine == pytest.approx(1)


def test_a_gradient_that_is_next_to_nothing_is_held_to_a_floor():
    name = "model.norm.weight"
    nothing, else_ = (make_record({"precision": "float32"}, changes={name: gradients()[name] * size})
                      for size in (1e-12, 2e-12))
    assert compare_records(nothing, else_).first.differs == ()
    assert compare_records(nothing, make_record({"precision": "float32"})).first.differs == ("gradient",)


def test_losses_are_held_to_the_gradient_where_they_cancel():
    one, two = (make_record({"precision": "float32"}, loss=loss) for loss in (1e-9, 3e-6))
    assert compare_records(one, two).first.loss_same
    assert compare_records(one, make_record({"precision": "float32"}, loss=0.25)).first.loss_same is False


def test_tokens_are_compared_where_both_train(right):
    changed = tokens()
    changed["policy_logprobs"][[0, 4]] += 0.5
    changed["trained"][16] = False
    changed["policy_logprobs"][16] = 9.0
    step = compare_records(right, make_record(tokens=changed)).first
    assert step.tokens["policy_logprobs"].nonzero().flatten().tolist() == [4]
    assert step.tokens["trained"].nonzero().flatten().tolist() == [16]
    assert step.token_same("old_logprobs") is True
    assert step.token_same("ratios") is None


def test_a_record_may_end_with_the_last_token_that_it_saw(right):
    short = make_record(tokens={name: values[:17] for name, values in tokens().items()})
    for one, two in ((right, short), (short, right)):
        assert compare_records(one, two).first.differs == ()
        assert compare_records(one, two).first.tokens["policy_logprobs"].shape == (17,)


@pytest.mark.parametrize(("steps", "differs"), [(0, True), (1, False)])
def test_a_token_in_twenty_may_drift_once_weights_have_moved(steps, differs):
    laid = {"trained": torch.ones(40).bool(), "policy_logprobs": torch.zeros(40)}
    moved = laid | {"policy_logprobs": torch.zeros(40).index_fill(0, torch.tensor([7, 9]), 0.5)}
    before = [RecordedStep(number, loss=1.0) for number in range(steps)]
    one, two = (Record({}, (*before, RecordedStep(steps, tokens=tokens))) for tokens in (laid, moved))
    assert bool(compare_records(one, two).first.differs) == differs
    three = Record({}, (*before, RecordedStep(steps, tokens=laid | {"policy_logprobs": torch.ones(40)})))
    assert compare_records(one, three).first.differs == ("tokens",)


def test_what_is_not_a_number_is_named(right):
    name = "lm_head.weight"
    step = compare_records(right, make_record(loss=math.nan, changes={name: torch.full((40,), math.nan)})).first
    assert step.not_finite == ("loss", name)
    assert "gradient" in step.differs


def test_the_first_step_that_differs_is_found(right):
    def steps(*losses):
        return replace(right, steps=tuple(RecordedStep(number, loss=loss) for number, loss in enumerate(losses)))

    found = compare_records(steps(1.0, 2.0, 3.0), steps(1.0, 2.5, 9.0))
    assert found.first.number == 1
    assert [step.loss for step in found.pair] == [2.0, 2.5]
    assert len(compare_records(steps(1.0, 2.0), steps(1.0)).steps) == 1


def test_metrics_that_differ(right):
    changed = {"loss/policy": 0.2, "loss/kl": 0.1, "ratio/policy_old/mean": 1.0, "of/mine": 3.0}
    step = compare_records(right, make_record(metrics=changed)).first
    assert step.metrics == {"loss/kl": (0.05, 0.1)}
    assert step.compared_metrics == 3
