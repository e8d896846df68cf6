"""verl's names for its losses: each has another definition under the same key."""

import pytest
import torch

from workbench.losses import LossInputs, build_loss
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import aliases, as_named_by, settings_of

ADVANTAGES = [1.0, 1.0, -1.0, -1.0, 0.0]
RATIOS = [2.0, 0.5, 4.0, 0.25, 8.0]
UPPER, LOWER, KL = "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"


def named(surrogate, *, ratios=RATIOS, **more):
    policy_T = torch.tensor([-2.0] * len(ratios), dtype=torch.float64)
    old_T = policy_T - torch.tensor(ratios, dtype=torch.float64).log()
    sampler_T = old_T - torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    inputs = LossInputs(policy_T, old_T, torch.tensor(ADVANTAGES, dtype=torch.float64), sampler_logprobs_T=sampler_T)
    spec = LossSpec(surrogate=surrogate, **more)
    slots = DocumentSlots(0, 1)
    settings = settings_of(spec, slots)._replace(only=("actor/",))
    values = as_named_by(
        "verl", inputs, inputs.counts_T, terms=build_loss(spec)(inputs), loss_spec=spec, slots=slots, settings=settings
    )
    return finish_metrics([values], Axis("dp_cp"))


@pytest.mark.parametrize(
    ("surrogate", "upper", "lower"),
    [
        ({"kind": "ppo", "dual_clip": 3.0}, 2, 1),  # 2.0 up, 0.25 down | 4.0
        ({"kind": "cispo", "clip_low": 0.8, "clip_high": 2.0}, 2, 0),  # beyond 0.2 to 3, whatever the sign
        ({"kind": "sapo"}, 0, 0),
        ({"kind": "gmpo", "clip_low": 0.4, "clip_high": 0.8}, 1, 2),  # outside +-: with A > 0 0.5, with A < 0 both
        ({"kind": "dppo_tv", "anchor": "old", "threshold_low": 0.2, "threshold_high": 0.04, "ratio_cap": 3.0}, 2, 2),
        (
            {"kind": "gspo_token", "clip_low": 0.1, "clip_high": 0.2},
            2,
            0,
        ),  # the document's ratio is 1.5: both with A > 0
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else str(value),
)
def test_clipped_tokens_of_each_loss(surrogate, upper, lower):
    metrics = named(surrogate)
    assert (metrics[UPPER], metrics[LOWER]) == pytest.approx((upper / 5, lower / 5), rel=1e-8)


@pytest.mark.parametrize(("ratio", "clipped"), [(1 / 4, 2), (4.0, 2), (1.0, 0)])
def test_a_document_ratio_clips_tokens_that_push_it_outwards_only(ratio, clipped):
    """Below the clip the two with A < 0, above it the two with A > 0; on the bound, which is 1 on both sides, none."""
    metrics = named({"kind": "gspo_token", "clip_low": 0.0, "clip_high": 0.0}, ratios=[ratio] * 5)
    assert (metrics[UPPER], metrics[LOWER]) == pytest.approx((clipped / 5, 0.0), rel=1e-8)


def test_the_distance_is_clamped_for_some_losses_and_absolute_for_one():
    far = [1.0, 1.0, 1.0, 1.0, 2.0**40]
    log = 40 * 0.6931471805599453
    assert named({"kind": "ppo", "dual_clip": 3.0}, ratios=far)[KL] == pytest.approx(-20 / 5, rel=1e-8)
    assert named({"kind": "dro"}, ratios=far)[KL] == pytest.approx(-log / 5, rel=1e-8)
    assert named({"kind": "kl_cov"}, ratios=far)[KL] == pytest.approx(log / 5, rel=1e-8)
    assert named({"kind": "gpg"}, ratios=far) == {}


def test_selected_tokens_are_the_clipped_ones_of_clip_cov():
    metrics = named(
        {"kind": "clip_cov", "cov_fraction": 1.0, "cov_low": -9.0, "cov_high": 9.0, "clip_low": 0.9, "clip_high": 9.0}
    )
    assert metrics[UPPER] == pytest.approx(1.0, rel=1e-8)
    assert LOWER not in metrics


def test_tokens_that_a_gate_rejects_are_not_of_the_population():
    gate = {"gate": "k2", "gate_high": 1.0, "denominator": "gated"}  # of the last token it is 2
    metrics = named({"kind": "ppo", "dual_clip": 3.0}, correction=gate)
    assert (metrics[UPPER], metrics[LOWER]) == pytest.approx((2 / 4, 1 / 4), rel=1e-8)
    assert metrics[KL] == pytest.approx(0.0, abs=1e-12)


def test_no_name_is_called_the_same_number_as_ours():
    for kind in ("ppo", "gspo", "cispo", "sapo"):
        assert not [a for a in aliases("verl", settings_of(LossSpec(surrogate={"kind": kind}))) if a.canonical]
