"""Gradients of one step in two records: factors, directions, and parameters that differ."""

import pytest
import torch

from tests.helpers.hand_records import gradients, make_record, norms_alone
from workbench.diagnose.evidence import compare_records


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


def test_a_tiny_gradient_is_compared_with_a_floor():
    name = "model.norm.weight"
    nothing, else_ = (
        make_record({"precision": "float32"}, changes={name: gradients()[name] * size}) for size in (1e-12, 2e-12)
    )
    assert compare_records(nothing, else_).first.differs == ()
    assert compare_records(nothing, make_record({"precision": "float32"})).first.differs == ("gradient",)


@pytest.mark.parametrize(("elements", "same"), [(1, True), (8, False)])
def test_the_gradient_of_a_single_element_may_cancel(elements, same):
    bf16 = {"precision": "bfloat16"}
    bias = torch.full((elements,), gradients()["lm_head.weight"].norm() / 40**0.5).double()
    right, wrong = (make_record(bf16, changes={"value.bias": bias * times}, tokens={}) for times in (1.0, 2.0))
    assert compare_records(right, wrong).first.parameters["value.bias"].same == same
