import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing, packed
from tests.oracles.systems import slime as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.slime import SYSTEM
from workbench.systems.translate import translation

FUNCTIONS = {
    "grpo": "compute_policy_loss + get_sum_of_sample_mean",
    "gspo": "compute_gspo_kl + compute_policy_loss + get_sum_of_sample_mean",
    "cispo": "compute_cispo_loss + get_sum_of_sample_mean",
}
PLAIN = {
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "opsm_delta": None,
    "kl_loss_type": None,
    "kl_loss_coef": 0.0,
    "calculate_per_token_loss": False,
}
CHANGES = [
    {},
    {"eps_clip_high": None},
    {"eps_clip": 1.0, "eps_clip_high": 0.5},
    {"eps_clip_c": 1.5},
    {"opsm_delta": 0.02},
    {"opsm_delta": -0.5},
    *({"kl_loss_type": kind, "kl_loss_coef": 0.1} for kind in ("k1", "k2", "k3", "low_var_kl")),
    {"kl_loss_type": "k3", "kl_loss_coef": 0.3, "use_unbiased_kl": True},
    {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    {"use_rollout_logprobs": True, "use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0},
    {
        "opsm_delta": 0.01,
        "eps_clip_c": 1.3,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.2,
        "eps_clip": 0.05,
        "eps_clip_high": 0.06,
    },
    {"kl_loss_type": "low_var_kl"},
    {"kl_loss_type": "k3", "use_unbiased_kl": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize(("estimator", "per_token"), list(itertools.product(FUNCTIONS, (False, True))))
def test_the_loss_matches_slime(estimator, per_token, change):
    config = {**PLAIN, **change, "calculate_per_token_loss": per_token}
    for seed, spread in ((1, 0.05), (2, 0.4), (3, 3.0)):
        batch = packed(seed, spread=spread)
        result = replay("slime", "policy_loss_packed", FUNCTIONS[estimator], config, batch)
        assert differing(result, oracle.policy_loss({**config, "advantage_estimator": estimator}, batch)) == []


def test_a_policy_without_a_past_is_compared_with_itself():
    batch = {name: value for name, value in packed(5).items() if name != "old_logprobs"}
    same = {**batch, "old_logprobs": batch["logprobs"]}
    expected = oracle.policy_loss({**PLAIN, "advantage_estimator": "grpo"}, same)
    assert differing(replay("slime", "policy_loss_packed", FUNCTIONS["grpo"], PLAIN, batch), expected) == []


@pytest.mark.parametrize(("keep_mask", "entropy_grad"), list(itertools.product((False, True), repeat=2)))
def test_log_probabilities_on_a_truncated_support(keep_mask, entropy_grad):
    rng = np.random.default_rng(7)
    arrays = {
        "logits": rng.standard_normal((6, 8)),
        "targets": rng.integers(0, 8, 6),
        "cotangent_logprobs": rng.standard_normal(6),
        "cotangent_entropy": rng.standard_normal(6),
    }
    if keep_mask:
        arrays["keep_mask"] = rng.random((6, 8)) < 0.4
    config = {"keep_mask": keep_mask, "entropy_grad": entropy_grad}
    result = replay("slime", "logprobs", "_VocabParallelLogProbEntropy (single rank)", config, arrays)
    assert differing(result, oracle.logprobs(config, arrays)) == []


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_generalised_advantages(gamma, lam):
    rng = np.random.default_rng(8)
    arrays = {"token_rewards": rng.standard_normal((3, 7)), "values": rng.standard_normal((3, 7))}
    config = {"gamma": gamma, "lam": lam}
    result = replay("slime", "advantage", "vanilla_gae", config, arrays)
    assert differing(result, oracle.gae(config, arrays)) == []


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("slime", {})
    assert (spec.surrogate.kind, spec.surrogate.clip_high, spec.denominator) == ("ppo", 0.2, "document")
    assert not spec.kl.coefficient
    assert not spec.correction.acts


@pytest.mark.parametrize("change", [*CHANGES[:4], *CHANGES[6:], {"use_opsm": True, "opsm_delta": 0.1}], ids=str)
@pytest.mark.parametrize("estimator", FUNCTIONS)
def test_there_and_back(estimator, change):
    settings = {
        **PLAIN,
        "kl_loss_type": "k1",
        **change,
        "advantage_estimator": estimator,
        "use_kl_loss": "kl_loss_type" in change,
    }
    spec = loss_spec("slime", settings)
    assert loss_spec("slime", settings_for("slime", spec)) == spec


def test_unsupported_settings_are_refused():
    with pytest.raises(SpecError, match="surrogate 'sapo'"):
        settings_for("slime", LossSpec(name="sapo"))
    with pytest.raises(SpecError, match="denominator"):
        settings_for("slime", LossSpec(name="grpo", denominator="raw"))
    with pytest.raises(SpecError, match="custom_tis_function_path"):
        loss_spec("slime", {"custom_tis_function_path": "mine.py:f"})
    with pytest.raises(SpecError, match="tis_clip_low is above tis_clip"):
        loss_spec("slime", {"tis_clip": 1.0, "tis_clip_low": 1.5})
    with pytest.raises(SpecError, match="did you mean 'eps_clip_high'"):
        loss_spec("slime", {"eps_clip_hihg": 0.3})


def test_implicit_behaviour_is_noted():
    assert any(
        "ignored by cispo" in note
        for note in translation("slime", {"advantage_estimator": "cispo", "eps_clip_c": 3.0}).notes
    )
    assert set(SYSTEM.scaling) == {"per sample", "per token"}


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("estimator", FUNCTIONS)
def test_denominators_that_are_given_stand_for_the_samples_own(estimator, change):
    """Sample by sample, because a step is a sum over samples: each sample's own value, times its tokens / given."""
    config = {**PLAIN, **change, "calculate_per_token_loss": False}
    batch, given = packed(2), np.array([9.0, 9.0, 0.0, 4.0, 0.5])
    arrays = batch | {"sample_denominators": given}
    if estimator == "gspo" and change.get("use_tis"):
        with pytest.raises(SpecError, match="gspo with use_tis and sample_denominators"):
            replay("slime", "policy_loss_packed", FUNCTIONS[estimator], config, arrays)
        return
    result = replay("slime", "policy_loss_packed", FUNCTIONS[estimator], config, arrays)
    total, gradient, metrics = 0.0, np.zeros(len(batch["mask"])), {}
    for document in range(5):
        own = batch["document_index"] == document
        if not batch["mask"][own].any():
            continue
        alone = {name: values[own] for name, values in batch.items()} | {"document_index": np.zeros(own.sum(), int)}
        text = oracle.policy_loss({**config, "advantage_estimator": estimator}, alone)
        share = alone["mask"].sum() / max(given[document], 1)
        total += share * float(text["loss"])
        gradient[own] = share * np.asarray(text["grad_logprobs"])
        for name, value in text["metrics"].items():
            metrics[name] = metrics.get(name, 0.0) + share * float(value)
    if "opsm_clipfrac" in metrics:  # of the samples' own tokens as before
        plain = replay("slime", "policy_loss_packed", FUNCTIONS[estimator], config, batch)
        metrics["opsm_clipfrac"] = plain["metrics"]["opsm_clipfrac"]
    assert float(result["loss"]) == pytest.approx(total, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(result["grad_logprobs"], gradient, rtol=1e-10, atol=1e-12)
    assert metrics.keys() <= result["metrics"].keys()
    for name, value in metrics.items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_a_loss_of_tokens_takes_no_denominators_and_own_ones_change_nothing():
    batch = packed(2)
    own = np.bincount(batch["document_index"], weights=batch["mask"])
    for per_token, given in ((True, own + 7), (False, own)):
        config = {**PLAIN, "calculate_per_token_loss": per_token}
        plain = replay("slime", "policy_loss_packed", FUNCTIONS["grpo"], config, batch)
        result = replay(
            "slime", "policy_loss_packed", FUNCTIONS["grpo"], config, batch | {"sample_denominators": given}
        )
        assert differing(result, plain) == []
