import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing
from tests.helpers.verl_batches import AGG_MODES, SPREADS, WHOLE, batch_of, function
from tests.oracles.systems import verl as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.translate import translation
from workbench.systems.verl.settings import ActorSettings

PLAIN = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "loss_agg_mode": "token-mean",
    "policy_loss": {},
    "global_batch_info": {},
}
INFOS = ({}, WHOLE, {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 9}, {"loss_scale_factor": 7})
MODES = {
    "vanilla": {},
    "gspo": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
    "sapo": {"tau_pos": 0.8},
    "gpg": {},
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.3},
    "dro": {"policy_loss": {"dro_beta": 0.3}},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.3},
    "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 5.0},
    "clip_cov": {"policy_loss": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}},
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_matches_verl(mode):
    for number, (agg, info, given, per_token) in enumerate(
        itertools.product(AGG_MODES, INFOS, (False, True), (False, True))
    ):
        batch = batch_of(number, SPREADS[number % 3], given=given, per_token=per_token)
        config = {**PLAIN, "loss_agg_mode": agg, "global_batch_info": info, **MODES[mode]}
        result = replay("verl", "policy_loss", function(mode), config, batch)
        assert differing(result, oracle.policy_loss(mode, config, batch)) == [], (agg, info, given, per_token)
        assert result["metrics"].keys() == oracle.policy_loss(mode, config, batch)["metrics"].keys()


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "sapo", "cispo", "dppo_tv"])
def test_ratios_beyond_the_exp_clamp_of_verl(mode):
    batch = batch_of(4, 0.2)
    batch["advantages"][:3] = [[-1.0], [0.5], [0.7]]
    batch["mask"][2, :3] = 1
    batch["old_logprobs"][:2] -= [[10.5], [23.0]]
    batch["logprobs"][2] -= 23.0
    config = {**PLAIN, "clip_ratio_high": 9.0, "clip_ratio_c": 1e12}
    result = replay("verl", "policy_loss", function(mode), config, batch)
    assert differing(result, oracle.policy_loss(mode, config, batch)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio": 0.1},
        {"clip_ratio_high": 0.28},
        {"clip_ratio_c": 1.2},
        {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "geo_mean", "dppo_tv"])
def test_clip_distances_and_their_substitutes(mode, change):
    batch = batch_of(5, 1.0)
    result = replay("verl", "policy_loss", function(mode), {**PLAIN, **change}, batch)
    assert differing(result, oracle.policy_loss(mode, {**PLAIN, **change}, batch)) == []


@pytest.mark.parametrize("given", [False, True])
def test_reinforce_against_the_rollout_policy(given):
    for seed, agg in enumerate(AGG_MODES):
        batch = batch_of(seed, 1.0, given=given)
        del batch["old_logprobs"]
        result = replay("verl", "policy_loss", "compute_policy_loss_reinforce", {"loss_agg_mode": agg}, batch)
        assert differing(result, oracle.policy_loss("reinforce", {"loss_agg_mode": agg}, batch)) == []
    result = replay("verl", "policy_loss", "compute_policy_loss_reinforce", {}, batch)
    assert differing(result, oracle.policy_loss("reinforce", {"loss_agg_mode": "seq-mean-token-sum"}, batch)) == []


# ---- KL, aggregation, critic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_kl_penalties(kind):
    for seed, agg in enumerate(AGG_MODES):
        batch, config = batch_of(seed, SPREADS[seed % 3]), {"kl_penalty": kind, "loss_agg_mode": agg}
        result = replay("verl", "kl_estimator", "kl_penalty + agg_loss", config, batch)
        assert differing(result, oracle.kl_estimator(config, batch)) == []


@pytest.mark.parametrize("info", INFOS, ids=len)
@pytest.mark.parametrize("agg", AGG_MODES)
def test_aggregation_and_the_critic(agg, info):
    config, batch = {"loss_agg_mode": agg, **info}, batch_of(9, 1.0)
    values = {
        "values": batch["logprobs"],
        "old_values": batch["old_logprobs"],
        "returns": batch["ref_logprobs"],
        "mask": batch["mask"],
    }
    assert (
        differing(replay("verl", "aggregation", "agg_loss", config, values), oracle.aggregation(config, values)) == []
    )
    nested = {"loss_agg_mode": agg, "global_batch_info": info}
    assert (
        differing(replay("verl", "aggregation", "agg_loss", nested, values), oracle.aggregation(config, values)) == []
    )
    config |= {"cliprange_value": 0.3}
    assert (
        differing(replay("verl", "value_loss", "compute_value_loss", config, values), oracle.value_loss(config, values))
        == []
    )


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("verl", {})
    assert (spec.surrogate.kind, spec.surrogate.dual_clip, spec.surrogate.log_clamp) == ("ppo", 3.0, 20.0)
    assert spec.denominator == "token"
    assert not spec.kl.coefficient
    assert not spec.correction.acts
    assert "dual clip 3 is always on" in translation("verl", {}).notes


@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_there_and_back(mode, agg):
    config = {name: value for name, value in MODES[mode].items() if name != "policy_loss"}
    spec = loss_spec(
        "verl",
        {
            **config,
            "loss_agg_mode": agg,
            "loss_scale_factor": 50,
            "policy_loss": {"loss_mode": mode, **MODES[mode].get("policy_loss", {})},
        },
    )
    assert loss_spec("verl", settings_for("verl", spec)) == spec


@pytest.mark.parametrize(
    "settings",
    [
        {"use_kl_loss": True, "kl_loss_type": "k3+", "kl_loss_coef": 0.2, "entropy_coeff": 0.01},
        {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"}},
        {
            "rollout_correction": {
                "rollout_is": "token",
                "rollout_rs": "seq_mean_k2,token_k3",
                "rollout_rs_threshold": "0.1,0.2",
                "rollout_is_batch_normalize": True,
            }
        },
        {"rollout_is_weights": True},
        {"rollout_is_weights": True, "policy_loss": {"loss_mode": "geo_mean"}},
        *(
            {
                "policy_loss": {
                    "loss_mode": "bypass_mode",
                    "rollout_correction": {
                        "loss_type": kind,
                        "rollout_rs": "token_k1,seq_mean_k1",
                        "rollout_rs_threshold": bounds,
                        **weights,
                    },
                }
            }
            for kind, weights, bounds in (
                ("ppo_clip", {}, "0.9_1.1"),
                ("reinforce", {}, "1.3,0.95_1.05"),
                ("reinforce", {"rollout_is": "token", "rollout_is_batch_normalize": True}, "0.5_2.0"),
            )
        ),
    ],
    ids=str,
)
def test_penalties_and_corrections_there_and_back(settings):
    spec = loss_spec("verl", settings)
    assert loss_spec("verl", settings_for("verl", spec)) == spec


def test_penalties_are_those_of_the_options():
    spec = loss_spec("verl", {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coeff": 0.01})
    kl = spec.kl
    assert (kl.estimator, kl.coefficient, kl.input_clamp, kl.output_clamp) == ("k3", 0.2, 20.0, 10.0)
    assert spec.entropy_coefficient == 0.01
    assert not loss_spec("verl", {"kl_loss_coef": 0.2}).kl.coefficient


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_ration": 0.1}, "did you mean 'clip_ratio'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "padded width"),
        ({"policy_loss": {"loss_mode": "dro"}}, "dro_beta is positive"),
        ({"clip_ratio_c": 1.0}, "dual clip is greater than 1"),
        ({"global_batch_info": {"dp_size": 2}}, "set batch_num_tokens"),
        ({"loss_agg_mode": "seq-mean-token-sum", "global_batch_info": {"dp_size": 2}}, "set global_batch_size"),
        ({"use_kl_loss": True, "kl_loss_type": "full"}, "choose one of them"),
        ({"use_kl_loss": True, "policy_loss": {"loss_mode": "sapo"}}, "one spec has one denominator"),
        ({"use_kl_loss": True, "policy_loss": {"loss_mode": "geo_mean"}}, "one spec has one denominator"),
        (
            {"entropy_coeff": 0.1, "rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": 1}},
            "rejected tokens out of the penalties",
        ),
        ({"policy_loss": {"loss_mode": "bypass_mode"}}, "set it; "),
        ({"rollout_correction": {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.5}}, "seq_max with _k2 or _k3"),
        ({"rollout_correction": {"rollout_rs": "token_k2"}}, "each statistic has a bound"),
        ({"rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}}, "one bound, above"),
        ({"rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": "1,2"}}, "one bound for all"),
        ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "3_2"}}, "in order"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(settings, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("verl", settings)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LossSpec(name="vespo"), "its policy losses are"),
        (LossSpec(denominator="rollout"), "its loss_agg_modes are"),
        (LossSpec(), "surrogate.dual_clip"),
        (LossSpec(name="ipo"), "its policy losses are"),
        (LossSpec(correction={"gate": "k1", "gate_low": -0.1}), "with an upper bound"),
        (LossSpec(correction={"gate": "k1", "gate_high": 0.1}), "in order"),
        (LossSpec(name="dro", kl={"estimator": "squared", "coefficient": 1.0}), "the KL estimator 'squared'"),
    ],
    ids=lambda v: str(v)[:12],
)
def test_an_unsupported_loss_is_refused(spec, words):
    with pytest.raises(SpecError, match=words):
        settings_for("verl", spec)


def test_a_bypass_of_the_trainer_is_that_of_the_loss():
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    spec = loss_spec("verl", {"rollout_correction": correction})
    assert spec == loss_spec("verl", {"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": correction}})
    assert (spec.surrogate.kind, spec.old_policy) == ("reinforce", "current")


def test_every_option_is_documented():
    assert all(field.description for field in ActorSettings.model_fields.values())


@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("mode", MODES)
def test_a_mean_over_nothing_is_no_number_here_either_and_has_no_gradient(mode, agg):
    """agg_loss divides the sum over the masked-in values by its size. Omitted values get no gradient."""
    batch = batch_of(3, 0.3)
    batch["mask"][:] = 0
    config = {**PLAIN, "loss_agg_mode": agg, **MODES[mode]}
    result = replay("verl", "policy_loss", function(mode), config, batch)
    sums = mode == "geo_mean" or (agg == "token-sum" and mode != "sapo")
    assert np.isnan(result["loss"]) == (not sums)
    assert not result["grad_logprobs"].any()
    assert not np.isnan(list(result["metrics"].values())).any(), "verl adds 1e-8 there"
    known = {"batch_num_tokens": 40, "global_batch_size": 9}
    assert replay("verl", "policy_loss", function(mode), config | {"global_batch_info": known}, batch)["loss"] == 0


@pytest.mark.parametrize("agg", AGG_MODES)
def test_other_means_over_no_tokens_are_nan_too(agg):
    zeros = np.zeros((2, 3))
    config = {"loss_agg_mode": agg}
    result = replay("verl", "aggregation", "agg_loss", config, {"values": zeros + 1, "mask": zeros})
    assert np.isnan(result["loss"]) == (agg != "token-sum")
    assert not result["grad_values"].any()
    critic = replay(
        "verl",
        "value_loss",
        "compute_value_loss",
        config,
        {"values": zeros + 1, "old_values": zeros, "returns": zeros, "mask": zeros},
    )
    assert np.isnan(critic["loss"]) == (agg != "token-sum")
    kl = replay(
        "verl", "kl_estimator", "kl_penalty", config, {"logprobs": zeros - 1, "ref_logprobs": zeros - 2, "mask": zeros}
    )
    assert np.isnan(kl["loss"]) == (agg != "token-sum")
    assert (kl["kl"] > 0).all()


def test_a_fully_rejected_batch_is_a_mean_over_no_tokens():
    batch = batch_of(2, 0.3)
    config = {
        **PLAIN,
        "policy_loss": {"loss_mode": "bypass_mode"},
        "rollout_correction": {"rollout_rs": "token_k2", "rollout_rs_threshold": 1e-12},
    }
    result = replay("verl", "policy_loss", "compute_policy_loss_bypass_mode", config, batch)
    assert np.isnan(result["loss"])
    assert not result["grad_logprobs"].any()
