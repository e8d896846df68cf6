"""A spec of a loss: explicit, validated, and free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from workbench.errors import SpecError
from workbench.losses import build_loss
from workbench.specs.losses import PRESETS, SURROGATES, LossSpec, parse_surrogate
from workbench.specs.reading import merge, parse_spec
from workbench.specs.run import RunSpec

VARIED = [{"name": name} for name in PRESETS] + [
    {"name": "dapo", "surrogate": {"kind": "gspo", "clip_low": 0.2}},
    {"name": "dapo", "surrogate": {"kind": "cispo", "clip_low": 0.2}},
    {"name": "dual_clip", "surrogate": {"dual_clip": None}},
    {"name": "prime_rl", "kl": {"coefficient": 0.0}, "surrogate": {"threshold_high": 0.3}},
    {"name": "dapo", "correction": {"kind": "tis", "ratio_high": None}},
    {"name": "grpo", "denominator": "constant", "denominator_constant": 8.0, "entropy_coefficient": 0.1},
]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "grop"}, r"loss: no preset 'grop' \(did you mean 'grpo'\?\)"),
        ({"surrogate": {"kind": "gmpo", "delta": 2.0}}, "loss.surrogate: delta is not used by the surrogate 'gmpo'"),
        ({"surrogate": {"kind": "pop"}}, r"loss.surrogate: no surrogate 'pop' \(did you mean 'ppo'\?\)"),
        ({"surrogate": {"clip_hihg": 2.0}}, r"unknown key 'loss.surrogate.clip_hihg' \(did you mean 'clip_high'\?\)"),
        ({"surrogate": {"dual_clip": 1.0}}, "loss.surrogate.dual_clip = 1.0: .*greater than 1"),
        ({"surrogate": {"kind": "gspo", "level": "token"}}, "level 'token' is not used by the surrogate 'gspo'"),
        ({"clip_low": 0.2}, "unknown key 'loss.clip_low'"),
    ],
)
def test_user_errors_are_refused(loss, words):
    with pytest.raises(SpecError, match=words):
        parse_spec(RunSpec, {"loss": loss}, where="here")


@pytest.mark.parametrize("settings", VARIED, ids=str)
def test_a_stored_spec_reads_back_as_itself_and_so_do_its_overrides(settings):
    spec = LossSpec(**settings)
    assert LossSpec(**spec.model_dump()) == spec
    assert LossSpec(**spec.overrides()) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_overrides_nothing(name):
    assert LossSpec(name=name).overrides() == {"name": name}


def test_explicit_values_override_the_preset():
    spec = LossSpec(name="dapo", surrogate={"clip_low": 0.1}, denominator="document")
    assert (spec.surrogate.clip_low, spec.surrogate.clip_high, spec.denominator) == (0.1, 0.28, "document")


def test_another_kind_takes_nothing_from_the_presets_surrogate():
    spec = LossSpec(name="dapo", surrogate={"kind": "gspo"})
    assert spec.surrogate == parse_surrogate(kind="gspo")


def test_another_name_brings_its_settings_and_keeps_changed_ones():
    before = RunSpec(loss={"name": "dapo", "denominator": "document_sum", "kl": {"coefficient": 0.1}})
    after = before.merged({"loss": {"name": "sapo"}}).loss
    assert after.surrogate == LossSpec(name="sapo").surrogate
    assert (after.denominator, after.kl.coefficient) == ("document_sum", 0.1)


def test_a_change_that_the_new_name_cannot_use_is_refused_and_not_dropped():
    before = RunSpec(loss={"name": "dapo", "surrogate": {"clip_low": 0.1}})
    with pytest.raises(SpecError, match=r"clip_low = 0\.1, given for 'ppo'"):
        before.merged({"loss": {"name": "sapo"}})


@pytest.mark.parametrize(
    ("base", "changes", "stays"),
    [
        ({"surrogate": {"clip_high": 0.28}}, {"name": "gspo"}, "clip_high = 0.28, given for 'ppo'"),
        ({"surrogate": {"clip_high": 0.28}}, {"surrogate": {"kind": "cispo"}}, "the surrogate 'cispo' over 'ppo'"),
        (
            {"name": "gspo", "surrogate": {"clip_low": 0.1, "clip_high": 0.2}},
            {"name": "luspo", "surrogate": {"clip_low": 0.3}},
            "clip_high = 0.2, given for 'gspo'",
        ),
        (
            {"correction": {"kind": "icepop", "ratio_low": 0.1}},
            {"correction": {"kind": "tis"}},
            "ratio_low = 0.1, given for 'icepop'",
        ),
    ],
)
def test_settings_of_one_kind_do_not_apply_to_another(base, changes, stays):
    with pytest.raises(SpecError, match=stays):
        merge({"loss": base}, {"loss": changes})


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({"surrogate": {"clip_high": 0.28}}, {"name": "dapo"}),  # of the same kind
        ({"surrogate": {"clip_high": 0.28}}, {"name": "gspo", "surrogate": {"clip_high": 4e-4}}),
        ({"surrogate": {"coefficient": 2.0}}, {"name": "gspo"}),
        ({"denominator": "document"}, {"name": "gspo"}),
    ],
)
def test_equivalent_or_repeated_settings_are_accepted(base, changes):
    merged = merge({"loss": base}, {"loss": changes})["loss"]
    assert LossSpec(**merged).name == changes["name"]


def test_another_correction_brings_its_own_settings():
    before = RunSpec(loss={"correction": {"kind": "icepop"}})
    after = before.merged({"loss": {"correction": {"kind": "tis"}}})
    assert after.loss.correction == LossSpec(correction={"kind": "tis"}).correction


def test_most_losses_keep_every_invariant_and_the_rest_declare_breaks():
    broken = {name: LossSpec(name=name).breaks for name in PRESETS if LossSpec(name=name).breaks}
    assert set(broken) == {"bnpo", "clip_cov", "kl_cov"}
    assert all("micro_batch" in invariants and "dp" in invariants for invariants in broken.values())
    assert "cp" in broken["clip_cov"]


def test_importing_the_spec_costs_no_torch():
    code = "import sys, workbench.specs.losses, workbench.specs.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"kind": "ppo", "clip_high": None}, "clip_high of the surrogate 'ppo' cannot be None"),
        ({"kind": "cispo", "clip_high": None}, "clip_high of the surrogate 'cispo' cannot be None"),
        ({"kind": "cispo", "bounds": "absolute", "clip_low": 0.8, "clip_high": 0.2}, "clip_low is above clip_high"),
        ({"kind": "clip_cov", "cov_low": 7.0}, "cov_low is above cov_high"),
    ],
)
def test_a_setting_that_would_be_replaced_or_do_nothing_is_refused(settings, rule):
    with pytest.raises(ValidationError, match=rule):
        parse_surrogate(**settings)


def test_a_weight_enters_the_sequence_weight_of_vespo_alone():
    entering = {"ratio": "token", "enters": "sequence_weight"}
    assert LossSpec(name="vespo", correction=entering).correction.enters == "sequence_weight"
    with pytest.raises(SpecError, match="'ppo' has no sequence weight"):
        LossSpec(name="grpo", correction=entering)


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
    assert {preset["surrogate"]["kind"] for preset in PRESETS.values()} == set(SURROGATES) - {"own"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_finite_on_an_adversarial_batch(name, dtype):
    documents = nasty_documents(0)
    if name == "dpo":
        documents = [document for document in documents if sum(document["mask"])][:6]
        documents = [document | {"group": d // 2, "reward": float(d % 2)} for d, document in enumerate(documents)]
    policy_T, inputs = packed(documents, dtype=dtype)
    total = sum(
        term.coefficient * weighted_total(term, inputs, random_weights(documents, 0))
        for term in build_loss(LossSpec(name=name))(inputs).values()
    )
    total.backward()
    assert total.isfinite()
    assert policy_T.grad.isfinite().all()
    assert policy_T.grad[inputs.loss_mask_T].abs().max() > 1e-6
    assert not policy_T.grad[~inputs.loss_mask_T].any()
