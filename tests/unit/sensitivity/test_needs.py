"""Needs of faults against the declarations of faults: none is missing where a fault shows, and one where it hides."""

import pytest

from tests.helpers.planted_faults import BASE, documents
from workbench.faults import fault_names, load_fault
from workbench.sensitivity import loss_needs, needs
from workbench.sensitivity.facts import Facts, Observed, step_facts
from workbench.sensitivity.needs import GRADIENT, NEEDS, missing_needs, needs_of
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec

GRADIENTS = [name for name in fault_names() if load_fault(name).changes_gradient]
HIDING = [name for name in GRADIENTS if load_fault(name).hidden_in is not None]


def facts(settings, **observed):
    spec = RunSpec.model_validate(settings)
    batch = documents(spec)
    met = {
        "clipped": 3,
        "clipped_below": 2,
        "ratio_below": 0.7,
        "old_distance": 0.4,
        "largest_norm": 2.0,
        "finite": True,
        "ratios_of_parts": 0.1,
    } | observed
    source = spec.model.source
    experts = 0 if source == "tiny-qwen3" else 4
    temperature = spec.policy.temperature or 1.0
    return Facts(spec, step_facts(batch, spec), Observed(**met), 19, 2, experts, temperature, source == "tiny-gpt-oss")


def shown(name):
    return merge(BASE, load_fault(name).shows_in)


@pytest.mark.parametrize("name", GRADIENTS)
def test_nothing_is_missing_where_a_fault_shows(name):
    assert [need.missing for need in missing_needs(load_fault(name), facts(shown(name)))] == []


@pytest.mark.parametrize("name", HIDING)
def test_a_need_is_missing_where_a_fault_hides_or_its_seam_is_not_called(name):
    fault = load_fault(name)
    missing = missing_needs(fault, facts(merge(shown(name), fault.hidden_in)))
    assert missing or name in SEAM_NOT_CALLED


SEAM_NOT_CALLED = {
    "auxiliary_loss_dropped",
    "clip_never_applied",
    "entropy_without_gradient",
    "leave_one_out_over_zero_deviation",
    "ring_block_normaliser",
    "sequence_ratio_without_gradient",
    "stale_keys_in_ring_backward",
}
"""Faults whose settings in which they hide never call their seam, so that they are not admissible there."""


def test_every_fault_of_a_gradient_has_needs_of_its_own():
    assert set(GRADIENTS) <= set(NEEDS) <= set(fault_names())


def test_a_fault_of_metrics_is_hidden_from_gradients_whatever_the_data():
    assert missing_needs(load_fault("extremes_swapped"), facts(BASE)) == (GRADIENT,)


@pytest.mark.parametrize(("bound", "missing"), [(None, 1), (3.0, 1), (1.0, 0)])
def test_a_wrong_norm_matters_where_it_clips(bound, missing):
    settings = merge(BASE, {"layout": {"dp": 2}, "steps": 2, "optimizer": {"max_grad_norm": bound}})
    lacks = missing_needs(load_fault("clip_of_averaged_gradients"), facts(settings, largest_norm=2.0))
    assert [need.missing for need in lacks] == ["no gradient norm is over the clip"] * missing


def test_a_clip_that_never_acted_hides_its_faults():
    assert not missing_needs(load_fault("clip_never_applied"), facts(BASE))
    (need,) = missing_needs(load_fault("clip_never_applied"), facts(BASE, clipped=0))
    assert need.missing == "no token is clipped"


def test_an_unlisted_fault_is_hidden_in_the_settings_that_it_declares(monkeypatch):
    monkeypatch.setattr(needs, "NEEDS", {})
    fault = load_fault("missing_cp_factor")
    (need,) = needs_of(fault)
    assert need.holds(facts(merge(BASE, {"layout": {"cp": 2}})))
    assert not need.holds(facts(BASE))


@pytest.mark.parametrize("name", ["entropy_in_bfloat16", "entropy_of_vocabulary_shard"])
def test_a_wrong_entropy_shows_where_the_loss_has_a_bonus(name):
    with_bonus = merge(shown(name), {"loss": {"entropy_coefficient": 0.1}})
    assert missing_needs(load_fault(name), facts(with_bonus)) == ()
    assert loss_needs.ENTROPY in missing_needs(load_fault(name), facts(shown(name)))
