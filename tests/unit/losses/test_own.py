"""Losses in a user's own file: both forms, settings, errors."""

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.own import TrainerLoss
from workbench.losses.terms import LossInputs
from workbench.specs.losses import LossSpec

LOSSES = """import torch
from workbench.losses.terms import Term


def values(inputs, *, scale=1.0):
    return -scale * inputs.advantages_T * inputs.policy_logprobs_T


def term(inputs):
    return Term(values(inputs), coefficient=2.0)


def terms(inputs):
    return {"policy": Term(values(inputs)), "own_kl": Term(inputs.policy_logprobs_T, coefficient=0.1)}


def narrow(inputs):
    return (inputs.policy_logprobs_T.float() * 3).double()


def number(inputs):
    return inputs.policy_logprobs_T.sum()


def taken(inputs):
    return {"kl": Term(inputs.policy_logprobs_T)}


def fails(inputs):
    return inputs.no_such_field


def needs(inputs, *, clip):
    return inputs.policy_logprobs_T


def trainer(batch, outputs, totals, *, scale=1.0):
    return scale * outputs.policy_logprobs_T.sum()


constant = 3
"""


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "my.py").write_text(LOSSES)
    return lambda name, **more: LossSpec(name=f"{tmp_path / 'my.py'}:{name}", **more)


def inputs(dtype=torch.float64):
    policy_T = torch.tensor([-1.0, -0.5, -2.0], dtype=dtype, requires_grad=True)
    return LossInputs(policy_T, policy_T.detach(), torch.tensor([1.0, -2.0, 0.5], dtype=dtype))


def test_values_are_the_policy_term(spec):
    (policy,) = build_loss(spec("values", settings={"scale": 3.0}))(inputs()).values()
    assert policy.values_T.tolist() == [3.0, -3.0, 3.0]
    assert policy.coefficient == 1.0


def test_the_parts_of_a_spec_act_on_it_too(spec):
    kl = {"coefficient": 0.5, "against": "old"}
    terms = build_loss(spec("term", surrogate={"coefficient": 3.0}, kl=kl, entropy_coefficient=0.0))(inputs())
    assert list(terms) == ["policy", "kl"]
    assert terms["policy"].coefficient == 6.0


def test_terms_keep_their_names(spec):
    terms = build_loss(spec("terms"))(inputs())
    assert {name: term.coefficient for name, term in terms.items()} == {"policy": 1.0, "own_kl": 0.1}


def test_in_float64_casts_stay_wide(spec):
    actual = build_loss(spec("narrow"))(inputs())["policy"].values_T
    assert torch.equal(actual, inputs().policy_logprobs_T.detach() * 3)
    third = torch.full((1,), 1 / 3, dtype=torch.float64)
    assert build_loss(spec("narrow"))(LossInputs(third, third, third))["policy"].values_T == third * 3


def test_a_relative_path_begins_at_the_project(spec, tmp_path):
    assert "policy" in build_loss(LossSpec(name="my.py:values"), tmp_path)(inputs())


@pytest.mark.parametrize(
    ("name", "more", "parts"),
    [
        ("number", {}, ["a Tensor of shape []", "loss.engine"]),
        ("taken", {}, ["a term named 'kl'", "own_kl"]),
        ("fails", {}, ["AttributeError", "no_such_field", "of my.py: return inputs.no_such_field"]),
    ],
)
def test_what_a_function_returns_or_raises_is_named(spec, name, more, parts):
    loss = build_loss(spec(name, **more))
    with pytest.raises(SpecError) as caught:
        loss(inputs())
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("name", "more", "parts"),
    [
        ("valuse", {}, ["no valuse", "did you mean 'values'?"]),
        ("values", {"settings": {"scael": 1}}, ["no setting 'scael' (did you mean 'scale'?)"]),
        ("needs", {}, ["clip", "loss.settings"]),
        ("constant", {}, ["constant is a int"]),
        ("trainer", {}, ["outputs", "loss.engine sum or mean"]),
        ("values", {"engine": "mean"}, ["batch, outputs, totals"]),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_step(spec, name, more, parts):
    with pytest.raises(SpecError) as caught:
        build_loss(spec(name, **more))
    assert all(part in str(caught.value) for part in parts)


def test_a_trainers_function_has_no_terms(spec):
    loss = build_loss(spec("trainer", engine="mean", settings={"scale": 2.0}))
    assert isinstance(loss, TrainerLoss)
    assert loss.engine == "mean"
    with pytest.raises(SpecError, match="one number for a micro-batch"):
        loss(inputs())
