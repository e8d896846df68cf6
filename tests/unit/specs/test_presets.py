"""Named losses: the field's names and defaults, and every preset makes a loss."""

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from workbench.losses import make_loss
from workbench.specs.losses import PARAMETERS, PRESETS, LossSpec


@pytest.mark.parametrize(
    ("name", "surrogate", "others"),
    [
        ("grpo", {"kind": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}, {"denominator": "token"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28}, {"denominator": "token"}),
        ("dr_grpo", {"clip_low": 0.2}, {"denominator": "constant"}),
        ("dual_clip", {"dual_clip": 3.0}, {}),
        ("two_sided", {"delta": 4.0}, {}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, {"denominator": "document"}),
        ("luspo", {"clip_low": 2e-3, "clip_high": 2.5e-3}, {"denominator": "document"}),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}, {"denominator": "document"}),
        ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}, {"denominator": "document"}),
        ("cispo_absolute", {"bounds": "absolute", "clip_low": None, "clip_high": 5.0}, {}),
        ("dppo_tv", {"anchor": "sampler", "threshold_low": 0.15, "threshold_high": 0.15}, {}),
        ("dppo_kl", {"anchor": "sampler", "threshold_low": 0.05, "threshold_high": 0.05}, {}),
        ("prime_rl", {"kind": "dppo_tv", "anchor": "sampler", "threshold_low": 0.2, "threshold_high": 0.2}, {}),
        ("vapo", {"clip_high": 0.28}, {"positive_nll_coefficient": 0.1}),
    ],
)
def test_defaults_of_the_field(name, surrogate, others):
    spec = LossSpec(name=name)
    assert {key: getattr(spec.surrogate, key) for key in surrogate} == surrogate
    assert {key: getattr(spec, key) for key in others} == others


def test_prime_rl_pulls_to_the_sampler_with_the_plain_square():
    kl = LossSpec(name="prime_rl").kl
    assert (kl.estimator, kl.against, kl.coefficient) == ("squared", "sampler", 1e-3)


def test_every_kind_has_a_preset():
    assert {preset["surrogate"]["kind"] for preset in PRESETS.values()} == set(PARAMETERS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_finite_on_a_nasty_batch_and_moves_only_what_counts(name, dtype):
    documents = nasty_documents(0)
    if name == "dpo":
        documents = [document for document in documents if sum(document["mask"])][:6]
        documents = [document | {"group": d // 2, "reward": float(d % 2)} for d, document in enumerate(documents)]
    policy_T, inputs = packed(documents, dtype=dtype)
    total = sum(
        term.coefficient * weighted_total(term, inputs, random_weights(documents, 0))
        for term in make_loss(LossSpec(name=name))(inputs).values()
    )
    total.backward()
    assert total.isfinite()
    assert policy_T.grad.isfinite().all()
    assert policy_T.grad[inputs.loss_mask_T].abs().max() > 1e-6
    assert not policy_T.grad[~inputs.loss_mask_T].any()
