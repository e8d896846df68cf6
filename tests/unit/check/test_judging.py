"""A right step agrees; each planted mistake is named first, at its stage; what a dump cannot decide is listed."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.dumped_step import ADVANTAGES, GROUPS, REWARDS, SETTINGS, advantages, dump, inputs
from workbench.check import check_step, judging
from workbench.check.alternatives import loss_alternatives
from workbench.check.reading import Reading
from workbench.dumps.step import StepDump
from workbench.specs.losses import LossSpec

VALUES, MASK = inputs(), inputs()["loss_mask"]


def statuses(check):
    return {stage.name: stage.status for stage in check.stages}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_right_step_agrees(dtype):
    check = check_step(dump(dtype=dtype))
    assert check.verdict == "agrees", str(check)
    assert check.ok
    assert not check.causes
    assert [name for name, status in statuses(check).items() if status == "agrees"] == [
        "advantages",
        "coefficients",
        "loss",
    ]


def rolled(name):
    return {name: VALUES[name].roll(1, 1)}


def without_last():
    lengths = MASK.long().cumsum(1)
    return MASK & (lengths < lengths[:, -1:])


MISTAKES = {
    "denominator of documents": (
        lambda: dump(weights=MASK.double() / MASK.sum(1, keepdim=True) / len(MASK)),
        "coefficients",
        "denominator",
        "by documents, each over its own tokens",
    ),
    "no denominator": (lambda: dump(weights=MASK.double()), "coefficients", "denominator", "by nothing"),
    "tool tokens train": (
        lambda: dump({"loss_mask": VALUES["token_mask"]}),
        "coefficients",
        "mask",
        "every token of a completion trains",
    ),
    "the end of a document does not train": (
        lambda: dump({"loss_mask": without_last()}),
        "coefficients",
        "mask",
        "the last trained token of each document does not train",
    ),
    "old log-probabilities of the token before": (
        lambda: dump(rolled("old_logprobs")),
        "coefficients",
        "shift",
        "old_logprobs of the token before",
    ),
    "the sampler's as the old ones": (
        lambda: dump({"old_logprobs": VALUES["sampler_logprobs"]}),
        "coefficients",
        "stale",
        "sampler_logprobs in the place of old_logprobs",
    ),
    "rounded old log-probabilities": (
        lambda: dump({"old_logprobs": VALUES["old_logprobs"].bfloat16().double()}),
        "coefficients",
        "rounded",
        "old_logprobs rounded to bfloat16",
    ),
    "documents in reverse": (
        lambda: dump({"old_logprobs": VALUES["old_logprobs"].flip(0)}),
        "coefficients",
        "order",
        "old_logprobs of other documents (reversed)",
    ),
    "the other sign": (lambda: dump(factor=-1.0), "coefficients", "factor", "the sign is reversed"),
    "another factor": (lambda: dump(factor=1 / 7), "coefficients", "factor", "times 0.1428571"),
    "no correction": (
        lambda: dump({"sampler_logprobs": VALUES["old_logprobs"]}),
        "coefficients",
        "correction",
        "no correction",
    ),
    "undivided advantages": (
        lambda: dump(advantages_B=group_mean(torch.tensor(GROUPS))),
        "advantages",
        "estimator",
        "not divided by a deviation",
    ),
    "wrong groups": (
        lambda: dump(advantages_B=grpo(torch.arange(8) % 2)),
        "advantages",
        "group",
        "a group is every 2. document",
    ),
    "advantages of other documents": (
        lambda: dump(advantages_B=advantages().roll(1)),
        "advantages",
        "order",
        "advantages of other documents (shifted by one)",
    ),
}


def group_mean(groups):
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    out = rewards.clone()
    for group in groups.unique():
        out[groups == group] -= rewards[groups == group].mean()
    return out


def grpo(groups):
    out = group_mean(groups)
    for group in groups.unique():
        own = torch.tensor(REWARDS, dtype=torch.float64)[groups == group]
        out[groups == group] /= own.std() + ADVANTAGES["epsilon"]
    return out


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named_first_at_its_stage(name):
    make, stage, kind, text = MISTAKES[name]
    check = check_step(make())
    assert check.verdict == "differs"
    assert check.first.name == stage
    first = [cause for cause in check.causes if cause.stage == stage]
    assert first, str(check)
    descriptions = {(cause.kind, cause.description) for cause in first if cause.differs == first[0].differs}
    assert any(own == kind and text in description for own, description in descriptions), str(check)
    by_a_size = ("factor", "denominator")  # no denominator at all is a factor, too
    assert kind in by_a_size or not [cause for cause in check.causes if cause.kind == "factor"], str(check)


def test_document_and_token_of_a_single_difference():
    right = dump()
    coefficients = right.tokens["coefficients"].clone()
    coefficients[4 * 7 + 3] *= 1.5
    check = check_step(right.with_tokens(coefficients=coefficients))
    assert check.first.name == "coefficients"
    assert "coefficients at document 4, token 3" in check.places[0]
    assert check.places[1] == "1 of 56 tokens differ: only of document 4"
    assert not check.causes
    assert "no known mistake explains it" in str(check)


def test_a_wrong_advantage_does_not_make_its_coefficient_wrong():
    check = check_step(dump(advantages_B=group_mean(torch.tensor(GROUPS))))
    assert statuses(check)["advantages"] == "differs"
    assert statuses(check)["coefficients"] == statuses(check)["loss"] == "agrees"


def test_two_mistakes_at_two_stages_are_both_named():
    weights = MASK.double() / MASK.sum(1, keepdim=True) / len(MASK)
    check = check_step(dump(advantages_B=group_mean(torch.tensor(GROUPS)), weights=weights))
    assert {cause.stage: cause.kind for cause in reversed(check.causes)} == {
        "advantages": "estimator",
        "coefficients": "denominator",
    }


def test_a_loss_alone_names_the_denominator():
    weights = MASK.double() / MASK.sum(1, keepdim=True) / len(MASK)
    check = check_step(dump(weights=weights, only=("losses",)))
    assert check.first.name == "loss"
    assert check.causes[0].kind == "denominator"


def test_what_was_not_recorded_cannot_be_decided():
    right = dump()
    bare = replace(
        right,
        tokens={
            name: value for name, value in right.tokens.items() if name not in ("coefficients", "sampler_logprobs")
        },
        losses={},
        settings={**SETTINGS, "correction": {}},
    )
    check = check_step(bare)
    assert check.verdict == "agrees"  # the advantages do
    text = "\n".join(check.undecided)
    assert "coefficients, loss, metrics: not recorded" in text
    assert "denominator: the same numbers if the loss is divided by documents" in text
    assert "denominator: the same" not in "\n".join(check_step(right).undecided)


@pytest.mark.parametrize("change", ["nothing trains", "silent", "nothing recorded"])
def test_what_could_not_have_differed_is_vacuous(change):
    if change == "nothing trains":
        step = dump()
        step = step.with_tokens(loss_mask=torch.zeros_like(step.loss_mask_T), coefficients=torch.zeros(56).double())
        step = replace(step, losses={"total": 0.0})
    elif change == "silent":
        step = dump(advantages_B=torch.zeros(8).double(), settings={**SETTINGS, "kl": {}})
        documents = {**step.documents, "rewards": torch.ones(8).double()}
        gone = step.with_tokens(coefficients=torch.zeros(56).double())
        step = replace(gone, documents=documents, losses={"policy": 0.0})
    else:
        tokens = {"loss_mask": MASK}
        step = StepDump.from_rectangle(tokens, settings=SETTINGS)
    assert check_step(step).verdict == "vacuous"


def test_rounding_of_the_trainer_is_no_difference():
    """The same loss in float32, from float32 values, is within the tolerance; in bfloat16 it is not."""
    right = dump(dtype="float32")
    single = {name: value.float().double() for name, value in right.tokens.items() if value.is_floating_point()}
    assert check_step(right.with_tokens(coefficients=single["coefficients"])).ok
    narrow = right.tokens["coefficients"].bfloat16().double()
    assert not check_step(right.with_tokens(coefficients=narrow)).ok


def test_a_clip_decision_that_rounding_could_flip_is_no_difference():
    values = {**VALUES, "policy_logprobs": VALUES["policy_logprobs"].clone()}
    bound = torch.log(torch.tensor(1.2, dtype=torch.float64))
    row = int(advantages().argmax())
    values["policy_logprobs"][row, 0] = values["old_logprobs"][row, 0] + bound + 1e-9  # clipped, barely
    step = dump(recorded=values, dtype="float32")
    inside = {**values, "policy_logprobs": values["policy_logprobs"].clone()}
    inside["policy_logprobs"][row, 0] -= 2e-9
    other = dump(inside, recorded=values, dtype="float32")
    assert (step.tokens["coefficients"] - other.tokens["coefficients"]).abs().max() > 1e-3
    assert check_step(step).ok
    assert check_step(other).ok


@pytest.mark.parametrize("garbage", [float("nan"), 3.0])
def test_what_padding_holds_is_of_no_account(garbage):
    """Readings that move values of padding onto tokens are no causes, and no error."""
    values = {name: torch.where(VALUES["token_mask"], v, garbage) for name, v in VALUES.items() if name[-1] == "s"}
    late = VALUES["old_logprobs"].roll(1, 1)
    late[:, 0] = 0  # not what padding holds
    step = dump({"old_logprobs": late})
    names = ("policy_logprobs", "old_logprobs", "sampler_logprobs", "ref_logprobs")
    garbled = step.with_tokens(**{name: values[name].reshape(-1) for name in names})
    check = check_step(garbled)
    assert check.causes
    assert check.causes[0].kind == "shift"
    right = dump()
    assert check_step(right.with_tokens(**{name: values[name].reshape(-1) for name in names})).ok


def test_coefficients_that_are_all_zero_are_a_factor_of_zero():
    check = check_step(dump(factor=0.0))
    assert (check.first.name, check.causes[0].description) == ("coefficients", "coefficients times 0")


def test_values_that_are_the_same_where_tokens_train_are_tried_once(monkeypatch):
    """Every sentence that has these values is listed all the same."""
    step, counts, results = dump({"old_logprobs": VALUES["old_logprobs"].roll(4, 0)}), [], []
    recompute = judging.recompute_loss
    for key in (judging._values_key, lambda changed, reading: None):
        calls = []
        monkeypatch.setattr(judging, "_values_key", key)
        monkeypatch.setattr(judging, "recompute_loss", lambda *a, c=calls, **k: c.append(1) or recompute(*a, **k))
        results.append(check_step(step).as_json())
        counts.append(len(calls))
    assert results[0] == results[1]
    orders = [cause["description"] for cause in results[0]["causes"] if cause["kind"] == "order"]
    assert "old_logprobs of other documents (shifted by one group)" in orders
    assert "old_logprobs of other documents (shifted back by one half)" in orders
    assert counts[1] - counts[0] == len(others := other_values(step)) - len(set(others)) > 30


def other_values(step):
    """Names and values, where tokens train, of each mistake that changes values alone."""
    own = Reading(step, LossSpec(**SETTINGS))
    readings = [one.reading for one in loss_alternatives(own)]
    return [
        tuple(
            (name, tuple(value_T[step.loss_mask_T].tolist()))
            for name, value_T in sorted(reading.dump.tokens.items())
            if value_T is not step.tokens.get(name)
        )
        for reading in readings
        if replace(reading, dump=step) == own and reading.dump.loss_mask_T is step.loss_mask_T
    ]
