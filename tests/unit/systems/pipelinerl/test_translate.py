import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing, packed, with_logits
from tests.oracles.systems import pipelinerl as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, replay, settings_for
from workbench.systems.translate import translation

PLAIN = {
    "policy_loss": "ppo",
    "use_advantages": True,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "batch_size": 4,
    "reward_minus_kl_coef": 0.0,
    "kl_coef": 0.0,
    "final_kl_coef": 0.0,
    "entropy_bonus": 0.0,
    "final_entropy_bonus": 0.0,
    "relu_log_p_weights": False,
    "clamp_log_ratio_ref_new_value": 10,
    "divide_advantage_by_std": True,
    "overlong_filtering": False,
    "group_normalization": False,
    "temperature": 1.0,
    "filter_zero_advantage_groups": False,
    "value_loss_coef": 0.0,
    "current_step": 0,
    "max_step": 1,
    "packed": True,
}
CHANGES = [
    {},
    {"epsilon_low": 0.03, "epsilon_high": 0.04},
    {"kl_coef": 0.1, "final_kl_coef": 0.1},
    {"kl_coef": 0.2, "final_kl_coef": 0.2, "clamp_log_ratio_ref_new_value": 0.3},
    {"kl_coef": 0.3, "final_kl_coef": 0.1, "current_step": 3, "max_step": 8},
    {"entropy_bonus": 0.01, "final_entropy_bonus": 0.01},
    {"entropy_bonus": 0.0, "final_entropy_bonus": 0.05, "current_step": 1, "max_step": 4},
    {"use_advantages": False},
    {"relu_log_p_weights": True},
    {"use_advantages": False, "relu_log_p_weights": True},
    {"group_normalization": True},
    {"overlong_filtering": True},
    {"temperature": 0.7},
    {"reward_minus_kl_coef": 0.5},
    {
        "group_normalization": True,
        "overlong_filtering": True,
        "temperature": 1.3,
        "kl_coef": 0.1,
        "final_kl_coef": 0.2,
        "current_step": 1,
        "max_step": 2,
        "entropy_bonus": 0.02,
        "final_entropy_bonus": 0.02,
    },
]


def batch(seed, spread):
    rng = np.random.default_rng(seed)
    arrays = with_logits(packed(seed, spread=spread), seed, spread=spread)
    index = arrays["document_index"]
    arrays["rewards"] = rng.standard_normal(5)[index]
    arrays["group_tokens"] = rng.uniform(4, 20, 5)[index]
    arrays["overflow"] = np.array([0.0, 0.0, 1.0, 1.0, 0.0])[index]
    arrays["num_labels"] = np.maximum(np.bincount(index, weights=arrays["targets"] >= 0), 1)[index]
    del arrays["rollout_logprobs"]
    return {name: values[None].copy() for name, values in arrays.items()}


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("policy_loss", ["ppo", "reinforce", "gspo"])
def test_a_step_matches_pipelinerl(policy_loss, change):
    config = {**PLAIN, **change, "policy_loss": policy_loss}
    for seed, spread in ((1, 0.05), (2, 0.4), (3, 2.0)):
        arrays = batch(seed, spread)
        result = replay("pipelinerl", "policy_loss_logits", "rl_step", config, arrays)
        assert differing(result, oracle.rl_step(config, arrays)) == [], seed


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_logits_of_untrained_tokens_do_not_matter(policy_loss):
    arrays, config = batch(6, 0.3), {**PLAIN, "policy_loss": policy_loss, "kl_coef": 0.1, "entropy_bonus": 0.01}
    expected = oracle.rl_step(config, arrays)
    for garbage in (np.nan, np.inf, -np.inf):
        arrays["logits"][arrays["targets"] < 0] = garbage
        assert differing(replay("pipelinerl", "policy_loss_logits", "rl_step", config, arrays), expected) == []


def test_no_document_is_truncated_unless_declared():
    arrays = {name: values for name, values in batch(4, 0.3).items() if name != "overflow"}
    config = {**PLAIN, "overlong_filtering": True}
    expected = oracle.rl_step(config, arrays)
    assert differing(replay("pipelinerl", "policy_loss_logits", "rl_step", config, arrays), expected) == []


def test_a_row_without_labels_reports_its_size_alone():
    arrays = batch(5, 0.3)
    arrays["targets"][:] = -100
    result = replay("pipelinerl", "policy_loss_logits", "rl_step", PLAIN, arrays)
    assert result["metrics"] == {"input_size": 20.0}
    assert result["loss"] == 0
    assert (result["grad_logits"] == 0).all()


@pytest.mark.parametrize(("seed", "divide"), list(itertools.product(range(3), (False, True))))
def test_advantages(seed, divide):
    rng = np.random.default_rng(seed)
    rewards, group_ids = rng.standard_normal(9), np.array([0, 0, 0, 0, 1, 1, 1, 2, 3])
    rewards[4:7] = rewards[4]
    config = {"divide_advantage_by_std": divide, "eps": 1e-4}
    result = replay("pipelinerl", "advantage", "populate_rl_data", config, {"rewards": rewards, "group_ids": group_ids})
    assert differing(result, oracle.leave_one_out(config, rewards, group_ids)) == []


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults():
    spec = loss_spec("pipelinerl", {})
    assert (spec.surrogate.kind, spec.denominator, spec.compat.documents_counted) == ("ppo", "document_sum", "all")
    assert (spec.kl.coefficient, spec.kl.input_clamp) == (0.1, 10)


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("policy_loss", ["ppo", "reinforce", "gspo"])
def test_there_and_back(policy_loss, change):
    spec = loss_spec("pipelinerl", {**PLAIN, **change, "policy_loss": policy_loss})
    assert loss_spec("pipelinerl", settings_for("pipelinerl", spec)) == spec


def test_unsupported_settings_are_refused():
    with pytest.raises(SpecError, match="surrogate 'sapo'"):
        settings_for("pipelinerl", LossSpec(name="sapo"))
    with pytest.raises(SpecError, match=r"surrogate\.dual_clip = 3\.0"):
        settings_for(
            "pipelinerl", LossSpec(name="dual_clip", denominator="document_sum", compat={"documents_counted": "all"})
        )
    with pytest.raises(SpecError, match="did you mean 'kl_coef'"):
        loss_spec("pipelinerl", {"kl_coeff": 0.1})


def test_implicit_behaviour_is_noted():
    notes = translation("pipelinerl", {"policy_loss": "gspo", "kl_coef": 0.1, "reward_minus_kl_coef": 0.1}).notes
    assert any("have no effect" in note for note in notes)
    assert "reward_minus_kl_coef has no effect" in notes
