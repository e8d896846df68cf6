"""Differences between two records, step by step."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone, tokens
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.record import Record, RecordedStep


def test_a_record_is_equal_to_itself(right):
    comparison = compare_records(right, make_record())
    assert comparison.first.differs == ()
    assert comparison.first.known == ("loss", "gradient", "metrics", "tokens")
    assert comparison.first.factor == pytest.approx(1)


@pytest.mark.parametrize("only_norms", [False, True])
def test_one_factor_on_everything(right, only_norms):
    wrong = make_record(scale=0.25)
    records = (norms_alone(right), norms_alone(wrong)) if only_norms else (right, wrong)
    step = compare_records(*records).first
    assert step.differs == ("gradient",)
    assert step.factor == pytest.approx(0.25, rel=1e-12)
    assert step.parallel
    assert (step.cosine is None) == only_norms


def test_the_rounding_tolerance_does_not_depend_on_the_total_gradient():
    """A loss in other units, such as one that is divided by a million tokens, has as many digits."""
    bf16 = {"precision": "bfloat16"}
    results = [
        compare_records(make_record(bf16, scale=size), make_record(bf16, scale=2 * size)).first
        for size in (1.0, 2.0**-10, 2.0**10)
    ]
    assert [step.noise for step in results] == [results[0].noise] * 3
    assert [step.gradient_same for step in results] == [False] * 3


def test_cancelling_losses_are_compared_with_the_gradient():
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
def test_one_token_in_twenty_may_drift_after_an_update(steps, differs):
    laid = {"trained": torch.ones(40).bool(), "policy_logprobs": torch.zeros(40)}
    moved = laid | {"policy_logprobs": torch.zeros(40).index_fill(0, torch.tensor([7, 9]), 0.5)}
    before = [RecordedStep(number, loss=1.0) for number in range(steps)]
    one, two = (Record({}, (*before, RecordedStep(steps, tokens=tokens))) for tokens in (laid, moved))
    assert bool(compare_records(one, two).first.differs) == differs
    three = Record({}, (*before, RecordedStep(steps, tokens=laid | {"policy_logprobs": torch.ones(40)})))
    assert compare_records(one, three).first.differs == ("tokens",)


def test_a_nan_is_named(right):
    name = "lm_head.weight"
    step = compare_records(right, make_record(loss=math.nan, changes={name: torch.full((40,), math.nan)})).first
    assert step.not_finite == ("loss", name)
    assert "gradient" in step.differs


def test_the_first_differing_step_is_returned(right):
    def steps(*losses):
        return replace(right, steps=tuple(RecordedStep(number, loss=loss) for number, loss in enumerate(losses)))

    comparison = compare_records(steps(1.0, 2.0, 3.0), steps(1.0, 2.5, 9.0))
    assert comparison.first.number == 1
    assert [step.loss for step in comparison.pair] == [2.0, 2.5]
    assert len(compare_records(steps(1.0, 2.0), steps(1.0)).steps) == 1


def test_metrics_that_differ(right):
    changed = {"loss/policy": 0.2, "loss/kl": 0.1, "ratio/policy_old/mean": 1.0, "of/mine": 3.0}
    step = compare_records(right, make_record(metrics=changed)).first
    assert step.metrics == {"loss/kl": (0.05, 0.1)}
    assert step.compared_metrics == 3


def bf16(**how):
    return make_record({"precision": "bfloat16"}, **how)


def noisy(size):
    return {name: values * (1 + size) for name, values in gradients().items()}


@pytest.mark.parametrize(("agreeing", "apart"), [(1e-6, True), (0.01, False)])
def test_a_group_that_stands_out_differs_as_a_whole(agreeing, apart):
    close, far = "model.layers.0.input_layernorm.weight", "model.norm.weight"
    wrong = noisy(agreeing) | {close: gradients()[close] * 1.025, far: gradients()[far] * 1.5}
    step = compare_records(bf16(), bf16(changes=wrong)).first
    assert not step.parameters[far].same
    assert step.parameters[close].same != apart
    assert sum(not p.same for p in step.parameters.values()) == (2 if apart else 1)


def test_tokens_are_judged_by_those_that_are_the_same_to_the_last_bit():
    few, all_ = tokens(), tokens()
    few["policy_logprobs"][[3, 9]] += torch.tensor([1.0, 0.05], dtype=torch.float64)
    all_["policy_logprobs"] += 0.05
    all_["policy_logprobs"][3] += 1.0
    assert int(compare_records(bf16(), bf16(tokens=few)).first.tokens["policy_logprobs"].sum()) == 2
    assert int(compare_records(bf16(), bf16(tokens=all_)).first.tokens["policy_logprobs"].sum()) == 1


def test_clip_decisions_count_where_they_hang_on_the_same_numbers():
    mine, theirs, rounded = (tokens() | {"clipped": torch.zeros(18).bool()} for _ in range(3))
    for turned in (theirs, rounded):
        turned["clipped"][8] = True
    rounded["policy_logprobs"] = rounded["policy_logprobs"] + 0.01
    right, other = bf16(tokens=mine), noisy(0.9)
    text = compare_records(right, bf16(tokens=theirs, changes=other)).first
    assert int(text.tokens["clipped"].sum()) == 1
    assert text.differs == ("gradient", "tokens")
    hanging = compare_records(right, bf16(tokens=rounded, changes=other)).first
    assert "clipped" not in hanging.tokens
    assert hanging.differs == ()
    assert compare_records(right, bf16(tokens=rounded | {"clipped": mine["clipped"]}, changes=other)).first.differs == (
        "gradient",
    )


def test_a_shrunken_gradient_is_compared_with_its_earlier_size():
    def two(size, wrong):
        first = bf16()
        later = replace(
            bf16(changes={name: size * each for name, each in noisy(wrong).items()}).steps[0], number=1, tokens={}
        )
        return replace(first, steps=(first.steps[0], later))

    assert compare_records(two(1.0, 0), two(1.0, 1.0)).steps[1].differs == ("gradient",)
    assert compare_records(two(0.1, 0), two(0.1, 1.0)).steps[1].differs == ()


def test_a_cancelling_loss_is_compared_with_its_summands():
    one, far = (
        make_record(
            {"precision": "float32"}, loss=loss, changes={name: 0 * values for name, values in gradients().items()}
        )
        for loss in (1e-4, 2e-4)
    )
    near = replace(one, steps=(replace(one.steps[0], loss=1e-4 + 2e-6),))
    assert compare_records(one, near).first.loss_same
    assert compare_records(one, far).first.loss_same is False
    bare, apart = (
        replace(
            record,
            steps=(
                replace(record.steps[0], tokens={name: each for name, each in tokens().items() if name != "losses"}),
            ),
        )
        for record in (one, near)
    )
    assert compare_records(bare, apart).first.loss_same is False, "what it sums is not known"


@pytest.mark.parametrize(("turned", "compared"), [((8, 9, 10), 1), ((), 2)])
def test_weights_after_a_step_that_rounding_made_another_are_not_compared(turned, compared):
    def two(clipped, moved, later):
        text = tokens() | {"clipped": torch.isin(torch.arange(18), torch.tensor(clipped).long())}
        text["policy_logprobs"] = text["policy_logprobs"] + moved
        first = bf16(tokens=text)
        return replace(
            first, steps=(first.steps[0], replace(first.steps[0], number=1, metrics={"reward/all/mean": later}))
        )

    comparison = compare_records(two((), 0.0, 1.0), two(turned, 0.01, 5.0))
    assert len(comparison.steps) == compared
    assert (comparison.first.differs == ("metrics",)) == (compared == 2)


@pytest.mark.parametrize(("rows", "compared"), [([0] * 9 + [1] * 9, 3), ([0] * 12 + [1] * 6, 2)])
def test_a_metric_of_parts_is_compared_where_both_runs_divide_their_steps_alike(rows, compared):
    of_parts = tokens() | {"rows": torch.tensor([0] * 9 + [1] * 9)}
    right = make_record(tokens=of_parts, partial_metrics=("loss/kl",))
    metrics = right.steps[0].metrics | {"loss/kl": 0.08}
    other = make_record(tokens=of_parts | {"rows": torch.tensor(rows)}, metrics=metrics, partial_metrics=("loss/kl",))
    step = compare_records(right, other).first
    assert step.compared_metrics == compared
    assert ("loss/kl" in step.metrics) == (compared == 3)


def test_a_metric_of_a_part_is_not_compared_with_one_of_the_step():
    of_parts = tokens() | {"rows": torch.tensor([0] * 9 + [1] * 9)}
    right = make_record(tokens=of_parts, partial_metrics=("loss/kl",))
    of_step = make_record(tokens=of_parts, metrics=right.steps[0].metrics | {"loss/kl": 0.08})
    assert not compare_records(right, of_step).first.differs


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "sampler_logprobs"])
@pytest.mark.parametrize(("moved", "told"), [(0.01, False), (2.0, True)])
def test_other_forward_passes_may_be_rounded_where_policies_agree_bit_for_bit(name, moved, told):
    torch.manual_seed(0)
    text = tokens() | {
        "ref_logprobs": tokens()["policy_logprobs"] - 0.3,
        "sampler_logprobs": tokens()["policy_logprobs"],
    }
    turned = text | {name: text[name] + moved * torch.randn(len(text[name])).to(text[name].dtype)}
    step = compare_records(bf16(tokens=text), bf16(tokens=turned, loss=0.5003)).first
    assert bool(step.differs) == told, step.differs
    assert step.noise.same_forward == told


def test_many_small_changes_of_a_reference_are_no_rounding():
    """Each is within the tolerance of a token, and all of them are beyond what rounding is on average."""
    text = tokens() | {"ref_logprobs": tokens()["policy_logprobs"] - 0.3}
    moved = text["ref_logprobs"] * 1.0 - 0.05 * (1 + text["ref_logprobs"].abs())
    step = compare_records(bf16(tokens=text), bf16(tokens=text | {"ref_logprobs": moved})).first
    assert int(step.tokens["ref_logprobs"].sum()) > len(moved) / 2


def test_values_of_a_critic_may_be_rounded_where_policies_agree_bit_for_bit():
    """A term that was computed from nothing that was noted has the noise of its own forward pass."""
    text = tokens() | {"losses": tokens()["policy_logprobs"] * 0.1}
    rounded = text | {"losses": text["losses"] * 1.001}
    metrics = {"loss/value": 0.3}
    right = bf16(tokens=text, metrics=metrics)
    assert not compare_records(right, bf16(tokens=rounded, metrics={"loss/value": 0.3003})).first.differs
    assert "metrics" in compare_records(right, bf16(tokens=rounded, metrics={"loss/value": 0.33})).first.differs
    assert "metrics" in compare_records(right, bf16(tokens=text, metrics={"loss/value": 0.3003})).first.differs


def test_a_likelihood_has_no_old_policy_and_no_advantages():
    def made(**other):
        tokens_of = {name: values for name, values in tokens().items() if name != "old_logprobs"}
        return make_record(tokens=tokens_of | {"losses": -tokens()["policy_logprobs"]} | other)

    names = ("policy_logprobs", "old_logprobs", "advantages")
    assert compare_records(made(), made()).not_recorded(names) == []
    weighed = made(losses=-1.5 * tokens()["policy_logprobs"])
    assert compare_records(made(), weighed).not_recorded(names) == ["old_logprobs", "advantages"]
