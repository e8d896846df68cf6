"""A spec of a loss: explicit, refused in words, and free of torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from pydantic import ValidationError

from workbench.errors import SpecError
from workbench.specs.losses import PRESETS, SURROGATES, LossSpec, parse_surrogate
from workbench.specs.run import RunSpec, merge, parse_spec

VARIED = [{"name": name} for name in PRESETS] + [
    {"name": "dapo", "surrogate": {"kind": "gspo", "clip_low": 0.2}},
    {"name": "dapo", "surrogate": {"kind": "cispo", "clip_low": 0.2}},
    {"name": "dual_clip", "surrogate": {"dual_clip": None}},
    {"name": "prime_rl", "kl": {"coefficient": 0.0}, "surrogate": {"threshold_high": 0.3}},
    {"name": "dapo", "correction": {"kind": "tis", "ratio_high": None}},
    {"name": "grpo", "denominator": "constant", "denominator_constant": 8.0, "entropy_coefficient": 0.1},
]


@pytest.mark.parametrize("kind", SURROGATES)
def test_settings_and_mathematics_of_a_surrogate_are_paired(kind):
    """One name, one module name, the same parameters with the same defaults."""
    from workbench.losses.surrogates import SURROGATES as FUNCTIONS

    settings, function = SURROGATES[kind], FUNCTIONS[kind]
    assert settings.__module__.rpartition(".")[2] == function.__module__.rpartition(".")[2]
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    computed = {"log_correction_T"}  # not a setting: what a correction hands on
    assert {p.name: p.default for p in keywords if p.name not in computed} == parse_surrogate(kind=kind).parameters
    assert all(field.description for name, field in settings.model_fields.items() if name != "kind")


def test_every_surrogate_has_settings():
    from workbench.losses.surrogates import SURROGATES as FUNCTIONS

    assert list(FUNCTIONS) == list(SURROGATES)


@pytest.mark.parametrize(
    ("kind", "given", "users"),
    [
        ("ppo", {"tau_positive": 1.0}, "sapo"),
        ("reinforce", {"clip_low": 0.1}, "ppo, cispo, gspo"),
        ("gmpo", {"delta": 2.0}, "ppo, gspo, luspo"),
        ("sft", {"beta": 0.1}, "dro, dpo"),
    ],
)
def test_a_parameter_of_another_kind_is_refused_with_those_that_use_it(kind, given, users):
    with pytest.raises(
        ValidationError, match=f"{next(iter(given))} is not used by the surrogate '{kind}'; it belongs to {users}"
    ):
        parse_surrogate(kind=kind, **given)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "grop"}, r"loss: no preset 'grop' \(did you mean 'grpo'\?\)"),
        ({"surrogate": {"kind": "gmpo", "delta": 2.0}}, "loss.surrogate: delta is not used by the surrogate 'gmpo'"),
        ({"surrogate": {"kind": "pop"}}, "loss.surrogate.kind = 'pop'"),
        ({"surrogate": {"clip_hihg": 2.0}}, r"unknown key 'loss.surrogate.clip_hihg' \(did you mean 'clip_high'\?\)"),
        ({"surrogate": {"dual_clip": 1.0}}, "loss.surrogate.dual_clip = 1.0: .*greater than 1"),
        ({"surrogate": {"kind": "gspo", "level": "token"}}, "level 'token' is not used by the surrogate 'gspo'"),
        ({"clip_low": 0.2}, "unknown key 'loss.clip_low'"),
    ],
)
def test_mistakes_are_said_in_words(loss, words):
    with pytest.raises(SpecError, match=words):
        parse_spec(RunSpec, {"loss": loss}, where="here")


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_a_share_of_the_tokens_is_at_most_all_of_them(kind):
    assert LossSpec(surrogate={"kind": kind, "cov_fraction": 1.0}).surrogate.cov_fraction == 1.0
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        LossSpec(surrogate={"kind": kind, "cov_fraction": 1.01})


@pytest.mark.parametrize("settings", VARIED, ids=str)
def test_a_stored_spec_reads_back_as_itself_and_so_do_its_overrides(settings):
    spec = LossSpec(**settings)
    assert LossSpec(**spec.model_dump()) == spec
    assert LossSpec(**spec.overrides()) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_overrides_nothing(name):
    assert LossSpec(name=name).overrides() == {"name": name}


def test_what_is_given_wins_over_the_preset():
    spec = LossSpec(name="dapo", surrogate={"clip_low": 0.1}, denominator="document")
    assert (spec.surrogate.clip_low, spec.surrogate.clip_high, spec.denominator) == (0.1, 0.28, "document")


def test_another_kind_takes_nothing_from_the_presets_surrogate():
    spec = LossSpec(name="dapo", surrogate={"kind": "gspo"})
    assert spec.surrogate == parse_surrogate(kind="gspo")


def test_another_name_brings_its_own_settings_and_keeps_what_was_changed():
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
def test_a_setting_meant_for_one_kind_does_not_slip_into_another(base, changes, stays):
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
def test_what_means_the_same_or_is_given_anew_may_stay(base, changes):
    merged = merge({"loss": base}, {"loss": changes})["loss"]
    assert LossSpec(**merged).name == changes["name"]


def test_another_correction_brings_its_own_settings():
    before = RunSpec(loss={"correction": {"kind": "icepop"}})
    after = before.merged({"loss": {"correction": {"kind": "tis"}}})
    assert after.loss.correction == LossSpec(correction={"kind": "tis"}).correction


def test_almost_every_loss_breaks_no_law_and_those_that_do_declare_it():
    broken = {name: LossSpec(name=name).breaks for name in PRESETS if LossSpec(name=name).breaks}
    assert set(broken) == {"bnpo", "clip_cov", "kl_cov"}
    assert all("micro_batch" in invariants and "dp" in invariants for invariants in broken.values())
    assert "cp" in broken["clip_cov"]


def test_importing_the_spec_costs_no_torch():
    code = "import sys, workbench.specs.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


def test_counting_all_documents_breaks_a_law_only_where_documents_are_counted():
    assert LossSpec(denominator="document", documents_counted="all").breaks == ("masked_rows",)
    assert LossSpec(denominator="token", documents_counted="all").breaks == ()
    twice = LossSpec(denominator="token", documents_counted="all", normalize_by_documents=True)
    assert twice.breaks == ("masked_rows",)


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
    with pytest.raises(ValidationError, match="'ppo' has no sequence weight"):
        LossSpec(name="grpo", correction=entering)
