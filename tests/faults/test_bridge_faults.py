"""Every fault of two modules shows and hides as declared; parity detects it, and `diagnose` names it.

What does not see scales is the check that is usual: weights after one step of Adam.
"""

import functools

import pytest
import torch

from tests.helpers.bars import assert_float64_parity, distances
from tests.helpers.image_steps import Case, batch_of, problem, simulated
from workbench.diagnose import diagnose
from workbench.diagnose.record import Record, RecordedStep
from workbench.faults import planted_faults
from workbench.faults.bridge import BRIDGE_FAULTS
from workbench.train.encoder_step import IMAGE_FEATURES

SCALES = {
    "encoder_gradient_averaged_over_cp": 1 / 2,
    "encoder_summed_over_policys_cp": 2,
    "encoder_averaged_over_dp": 1 / 4,
}
FOUND = dict.fromkeys(SCALES, "module_scaled") | {
    "encoder_gradient_not_summed_over_cp": "module_reached_wrongly",
    "gradient_of_next_slot": "module_reached_wrongly",
    "one_consumer_of_several": "module_reached_wrongly",
    "denominator_over_dp_only": "uneven_weights",
    "slots_in_reverse_order": "other_features",
    "first_slot_on_later_cp_ranks": "other_features",
}
"""Fault -> the cause of its kind."""


def case_of(settings):
    """Build a case from the settings under which a fault shows."""
    layout = {"tp": 1, "cp": 1, "dp": 1}
    source, destination = ({**layout, **settings[name]} for name in ("encoder", "layout"))
    return Case(
        tuple(source.values()),
        tuple(destination.values()),
        images=8,
        delivery=settings["delivery"],
        shared=settings.get("shared", False),
    )


@functools.cache
def step(case, fault=None):
    with planted_faults([BRIDGE_FAULTS[fault]] if fault else []):
        [result], _ = simulated(case)
    return result


def pair(name, *, hidden=False):
    fault = BRIDGE_FAULTS[name]
    case = case_of(fault.hidden_in if hidden else fault.shows_in)
    return step(case), step(case, name), case


def record_of(found, case, name):
    (tp, cp, dp), (tp_s, cp_s, dp_s) = case.destination, case.source
    batch = batch_of(case, *problem(case)[:2])
    laid = {"documents": batch.document_ids_T, "features": batch.extensions[IMAGE_FEATURES].values}
    return Record(
        {
            "tp": tp,
            "cp": cp,
            "dp": dp,
            "precision": "float64",
            "micro_batches": 1,
            "modules": {"encoder": {"tp": tp_s, "cp": cp_s, "dp": dp_s}},
        },
        (
            RecordedStep(
                0,
                float(found.loss["total"]),
                dict(found.metrics),
                dict(found.norms),
                {"trained_tokens": float(found.totals.tokens), "documents": float(found.totals.documents)},
                dict(found.gradients),
                dict(found.tokens) | laid,
            ),
        ),
        name,
    )


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_a_fault_turns_parity_red(name):
    right, wrong, _ = pair(name)
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(wrong.gradients, right.gradients, context=name)
    policys = {key: gradient for key, gradient in right.gradients.items() if not key.startswith("encoder.")}
    far = max(distances({key: wrong.gradients[key] for key in policys}, policys).values())
    changes_policy = BRIDGE_FAULTS[name].changes_metrics
    assert (far > 1e-6) == changes_policy
    assert (abs(float(wrong.loss["total"]) / float(right.loss["total"]) - 1) > 1e-9) == changes_policy


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_a_fault_hides_as_declared(name):
    right, wrong, _ = pair(name, hidden=True)
    assert_float64_parity(wrong.gradients, right.gradients, context=f"{name}, hidden")


@pytest.mark.parametrize("name", FOUND)
def test_diagnose_finds_it(name):
    right, wrong, case = pair(name)
    diagnosis = diagnose(record_of(right, case, "right"), record_of(wrong, case, "wrong"))
    assert diagnosis.causes[0].name == FOUND[name], str(diagnosis)
    if name in SCALES:
        assert f"encoder is {SCALES[name]:.6g} times" in diagnosis.causes[0].evidence[0]
    assert diagnose(record_of(right, case, "right"), record_of(right, case, "again")).equal


@pytest.mark.parametrize("name", SCALES)
def test_weights_after_one_step_of_adam_do_not_see_a_scale_and_gradients_do(name):
    right, wrong, _ = pair(name)
    key = "encoder.vision.encoder.layers.0.self_attn.q_proj.weight"
    weights = [after_adam(result.gradients[key]) for result in (right, wrong)]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-3)
    assert float((weights[1] - weights[0]).abs().max()) < 1e-6
    factor = float(wrong.gradients[key].norm() / right.gradients[key].norm())
    assert factor == pytest.approx(SCALES[name], rel=1e-12)


def after_adam(gradient):
    """Weights, from zero, after one step of Adam with the usual learning rate."""
    weight = torch.zeros_like(gradient, requires_grad=True)
    weight.grad = gradient
    torch.optim.Adam([weight], lr=1e-4).step()
    return weight.detach()
