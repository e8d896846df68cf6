import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing, rectangle, with_logits
from tests.oracles.systems import nous_torchtitan as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.translate import translation

STEP = "compute_grpo_loss_from_predictions + masked_mean"
PLAIN = {
    "reduction": oracle.ROWS,
    "policy_ratio_type": "token",
    "clip_ratio_lower_bound": 0.25,
    "clip_ratio_upper_bound": 0.25,
    "use_ref_model": False,
    "kl_estimator_type": "k3",
    "kl_beta": 0.0,
    "entropy_loss_weight": 0.0,
    "logit_loss_weight": 0.0,
    "onpolicy_logp_threshold": 0.0,
    "rollout_is": None,
}
WEIGHTS = [
    {
        "rollout_is_level": level,
        "rollout_is_mode": mode,
        "rollout_is_threshold": 1.2,
        "rollout_is_threshold_lower": lower,
        "rollout_is_veto_threshold": veto,
    }
    for level, mode, lower, veto in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "mask"), (None, 0.9), (1e-4, 0.8, None)
    )
]
CHANGES = [
    {},
    {"reduction": "token mean"},
    {"clip_ratio_lower_bound": 0.1, "clip_ratio_upper_bound": 0.4},
    *({"use_ref_model": True, "kl_beta": 0.1, "kl_estimator_type": kind} for kind in ("k3", "mse", "abs")),
    {"use_ref_model": True, "kl_beta": 0.0, "kl_estimator_type": "mse"},
    {"entropy_loss_weight": 0.02},
    {"logit_loss_weight": 0.1},
    {"onpolicy_logp_threshold": 0.05},
    {"onpolicy_logp_threshold": -3.5},
    {"onpolicy_logp_threshold": 1.0},
    {
        "use_ref_model": True,
        "kl_beta": 0.3,
        "entropy_loss_weight": 0.1,
        "logit_loss_weight": 0.2,
        "reduction": "token mean",
    },
]


def batch(seed, spread, *, sampler=False, past=True):
    arrays = with_logits(rectangle(seed, spread=spread, empty=False), seed, spread=spread, trained="mask")
    if sampler:
        arrays["rollout_logprobs"] = np.where(arrays["mask"] > 0, arrays["rollout_logprobs"], 1.0)
    else:
        del arrays["rollout_logprobs"]
    if not past:
        del arrays["old_logprobs"]
    return arrays


def check(config, **how):
    for seed, spread in ((1, 0.05), (2, 0.4), (3, 2.0)):
        arrays = batch(seed, spread, **how)
        result = replay("nous_torchtitan", "policy_loss_logits", STEP, config, arrays)
        assert differing(result, oracle.step(config, arrays)) == [], seed


@pytest.mark.parametrize("past", [True, False], ids=["off policy", "on policy"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_step_matches_the_fork(change, past):
    check({**PLAIN, **change}, past=past)


@pytest.mark.parametrize("change", CHANGES[:9], ids=str)
def test_a_ratio_of_rows(change):
    check({**PLAIN, **change, "policy_ratio_type": "sequence"})


@pytest.mark.parametrize("past", [True, False], ids=["off policy", "on policy"])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: "-".join(map(str, weights.values())))
def test_importance_weights(weights, past):
    check({**PLAIN, "rollout_is": weights}, sampler=True, past=past)


@pytest.mark.parametrize(
    "change",
    [
        {"policy_ratio_type": "sequence"},
        {"use_ref_model": True, "kl_beta": 0.1},
        {"entropy_loss_weight": 0.1, "logit_loss_weight": 0.1},
    ],
    ids=str,
)
def test_importance_weights_leave_the_other_terms_alone(change):
    for weights in (WEIGHTS[0], WEIGHTS[16]):
        check({**PLAIN, **change, "rollout_is": weights}, sampler=True)


def test_a_sampler_without_weights_is_measured():
    check(PLAIN, sampler=True)


def test_a_position_that_was_not_sampled_weighs_nothing():
    arrays = batch(6, 0.3, sampler=True)
    row, position = np.argwhere(arrays["mask"] > 0)[3]
    arrays["rollout_logprobs"][row, position] = 1.0
    for weights in (WEIGHTS[0], WEIGHTS[15], WEIGHTS[30]):
        config = {**PLAIN, "rollout_is": weights}
        expected = oracle.step(config, arrays)
        assert expected["per_token_loss"][row, position] == 0
        result = replay("nous_torchtitan", "policy_loss_logits", STEP, config, arrays)
        assert differing(result, expected) == []


@pytest.mark.parametrize(("function", "per_seq"), list(itertools.product(("masked_mean", "masked_sum"), (False, True))))
def test_aggregation(function, per_seq):
    rng = np.random.default_rng(7)
    config = {"per_seq": per_seq}
    for empty in (False, True):  # of an empty row a mean over rows is NaN, and so is its gradient
        given = {"values": rng.standard_normal((4, 6)), "mask": rectangle(7, empty=empty)["mask"]}
        if per_seq and "sum" in function:
            given["cotangent"] = rng.standard_normal(4)
        result = replay("nous_torchtitan", "aggregation", function, config, given)
        assert differing(result, oracle.masked(function, config, given)) == []


@pytest.mark.parametrize("seed", range(3))
def test_reward_normalisation(seed):
    arrays = {"rewards": np.random.default_rng(seed).standard_normal(9), "group_ids": np.arange(9) % 3}
    config = {"ranks": 1, "eps": 1e-8}
    result = replay("nous_torchtitan", "advantage", "distributed_reward_norm", config, arrays)
    assert differing(result, oracle.reward_norm(config, arrays)) == []


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("nous_torchtitan", {})
    assert (spec.surrogate.kind, spec.denominator, spec.compat.documents_counted) == ("ppo", "document", "all")
    assert not spec.correction.acts


def test_weights_may_be_given_one_by_one():
    assert loss_spec("nous_torchtitan", WEIGHTS[0]) == loss_spec("nous_torchtitan", {"rollout_is": WEIGHTS[0]})


@pytest.mark.parametrize(
    "settings",
    [*CHANGES, *({"rollout_is": weights} for weights in WEIGHTS[::5]), {"policy_ratio_type": "sequence"}],
    ids=str,
)
def test_there_and_back(settings):
    spec = loss_spec("nous_torchtitan", settings)
    assert loss_spec("nous_torchtitan", settings_for("nous_torchtitan", spec)) == spec


def test_unsupported_settings_are_refused():
    with pytest.raises(SpecError, match="clips ratios of tokens or of rows"):
        settings_for("nous_torchtitan", LossSpec(name="cispo"))
    with pytest.raises(SpecError, match=r"correction\.unsampled"):
        settings_for(
            "nous_torchtitan",
            LossSpec(
                name="grpo", denominator="document", compat={"documents_counted": "all"}, correction={"kind": "tis"}
            ),
        )
    with pytest.raises(SpecError, match="by the log-probability of the live policy"):
        loss_spec("nous_torchtitan", {"onpolicy_logp_threshold": 0.1, "policy_ratio_type": "sequence"})
    with pytest.raises(SpecError, match="no weight is at least"):
        loss_spec("nous_torchtitan", {"rollout_is_mode": "mask", "rollout_is_threshold": 0.5})
    with pytest.raises(SpecError, match="did you mean 'kl_beta'"):
        loss_spec("nous_torchtitan", {"kl_bata": 0.1})


def test_its_bugs_are_noted():
    assert any("twice" in note for note in translation("nous_torchtitan", {"policy_ratio_type": "sequence"}).notes)
    assert any("every row" in note for note in translation("nous_torchtitan", {"rollout_is": WEIGHTS[-1]}).notes)
