"""Rounding, and what is only reported wrong."""

import pytest
import torch

from tests.helpers.hand_records import (
    gradients,
    make_record,
    values,
)
from workbench.diagnose.diagnosis import diagnose_records


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def test_rounding_is_distinguished_from_a_bug():
    noise = torch.linspace(-1, 1, 18).roll(5) * 0.01
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}
    diagnosis = diagnose_records(
        make_record(),
        make_record(
            {"precision": "float32"},
            loss=0.2501,
            changes=small,
            tokens=values(policy_logprobs=lambda p: p + noise, entropy_nats=lambda h: h + noise.flip(0)),
        ),
    )
    assert diagnosis.causes[0].name == "lower_precision"


def test_a_gradient_in_a_lower_precision():
    rounded = {name: each.bfloat16().double() for name, each in gradients().items()}
    summed = {name: (each + 3).bfloat16().double() - 3 for name, each in gradients().items()}
    near = {name: each * (1 + 0.004 * torch.linspace(-1, 1, 40).roll(9).double()) for name, each in gradients().items()}
    assert first_of(make_record(), make_record(changes=rounded)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=near)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=summed)) == "term_without_gradient"


def test_a_loss_made_of_other_inputs_is_not_reported_wrong():
    old = values(old_logprobs=lambda old: old + torch.linspace(-1, 1, 18) * 0.01)
    diagnosis = diagnose_records(make_record(), make_record(tokens=old, loss=0.3))
    assert [cause.name for cause in diagnosis.causes[:2]] == ["old_logprobs", "loss_alone"]


@pytest.mark.parametrize(
    ("precision", "policy", "name"),
    [("bfloat16", 0.2, "one_term"), ("float64", 0.2, "loss_alone"), ("bfloat16", 0.204, "loss_alone")],
)
def test_rounding_may_hide_a_term_in_the_gradient(precision, policy, name):
    right, wrong = (
        make_record({"precision": precision}, metrics={"loss/policy": first, "loss/kl": second}, loss=first + second)
        for first, second in ((0.2, 0.05), (policy, 0.051))
    )
    assert first_of(right, wrong) == name
