import itertools

import pytest

from tests.helpers.system_batches import differing
from tests.helpers.verl_batches import AGG_MODES, SPREADS, WHOLE, batch_of, function
from tests.oracles.systems import verl as oracle
from workbench.systems import replay

WEIGHTS = [
    {},
    *(
        {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": divided}
        for level, threshold, divided in itertools.product(
            ("token", "sequence"), (2.0, "1.5", "0.5_2.0"), (False, True)
        )
    ),
]
REJECTIONS = [
    {},
    *(
        {"rollout_rs": f"{level}_k1", "rollout_rs_threshold": said}
        for level, said in (("token", "0.9_1.1"), ("token", "1.3"), ("seq_sum", "0.5_1.4"), ("seq_mean", 1.05))
    ),
    *(
        {"rollout_rs": f"{level}_{kind}", "rollout_rs_threshold": said}
        for (level, said), kind in itertools.product(
            (("token", "0.05"), ("seq_sum", "0.2"), ("seq_mean", 0.03), ("seq_max", "0.1")), ("k2", "k3")
        )
    ),
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.1"},
    {"rollout_rs": "token_k3, seq_max_k2,token_k3", "rollout_rs_threshold": "0.2"},
]


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda r: r.get("rollout_rs", "none"))
def test_a_rollout_correction_alone(rejection):
    for seed, weights in enumerate(WEIGHTS):
        batch, config = batch_of(seed, SPREADS[seed % 3]), {**weights, **rejection}
        if seed % 2:
            batch["rollout_logprobs"][0, 0] = batch["old_logprobs"][0, 0] - 23 * (-1) ** (seed // 2)
        result = replay("verl", "is_correction", "compute_rollout_correction_and_rejection_mask", config, batch)
        expected = oracle.is_correction(config, batch)
        assert differing(result, expected) == [], weights
        assert result.keys() == expected.keys()
        assert result["metrics"].keys() == expected["metrics"].keys()


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_corrects_with_the_live_policy(loss_type):
    for number, (weights, rejection) in enumerate(itertools.product(WEIGHTS[::2], REJECTIONS[::2])):
        batch = batch_of(number, SPREADS[number % 2], per_token=bool(number % 2))
        settings = {"loss_type": loss_type, **weights, **rejection}
        config = {"rollout_correction": settings, "loss_agg_mode": AGG_MODES[number % 5]}
        expected = oracle.bypass(config, batch)
        del batch["old_logprobs"]
        result = replay("verl", "policy_loss", function("bypass_mode"), config, batch)
        assert differing(result, expected) == [], settings
        assert result["metrics"].keys() == expected["metrics"].keys()


def test_counts_of_the_whole_mini_batch_win_over_those_that_survive():
    settings = {"loss_type": "reinforce", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.02}
    batch = batch_of(3, 0.4)
    config = {"rollout_correction": settings, "loss_agg_mode": "token-mean", "global_batch_info": WHOLE}
    result = replay("verl", "policy_loss", function("bypass_mode"), config, batch)
    assert differing(result, oracle.bypass(config, batch)) == []
