import itertools

import numpy as np
import pytest

from tests.helpers.system_batches import differing
from tests.helpers.verl_batches import graded
from tests.oracles.systems import verl as oracle
from workbench.errors import SpecError
from workbench.systems import replay


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gdpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ],
)
def test_advantages_of_whole_completions(name, divided):
    config = {"estimator": name, "norm_adv_by_std_in_grpo": divided, "gamma": 0.9, "f_norm": 1.0 if divided else 2.0}
    for seed, (binary, holes) in enumerate(itertools.product((False, True), repeat=2)):
        batch = graded(seed, binary=binary, holes=holes)
        if name != "grpo_passk":
            batch["group_ids"][3] = 11  # the only completion of its prompt
        result = replay("verl", "advantage", f"compute_{name}_outcome_advantage", config, batch)
        assert differing(result, oracle.advantage(name, config, batch)) == []


@pytest.mark.parametrize(
    ("name", "called", "configs"),
    [
        (
            "gae",
            "gae_advantage_return",
            [{"gamma": 1.0, "lam": 1.0}, {"gamma": 0.9, "lam": 0.0}, {"gamma": 0.99, "lam": 0.95}],
        ),
        ("remax", "remax_outcome_advantage", [{}]),
        ("optimal_token_baseline", "optimal_token_baseline_advantage", [{}, {"handle_zero_tail": False}]),
        (
            "tir_optimal_token_baseline",
            "multi_turn_optimal_token_baseline_advantage",
            [{"handle_zero_tail": True}, {"handle_zero_tail": False}],
        ),
    ],
)
def test_advantages_of_tokens(name, called, configs):
    for seed, (config, holes) in enumerate(itertools.product(configs, (False, True))):
        rng, batch = np.random.default_rng(seed), graded(seed, binary=False, holes=holes)
        batch["token_rewards"] = rng.standard_normal((10, 6)) * batch["mask"]
        batch |= {
            "values": rng.standard_normal((10, 6)),
            "baselines": rng.standard_normal(10),
            "old_logprobs": -rng.random((10, 6)),
            "sum_pi_squared": rng.random((10, 6)),
        }
        if seed % 2:
            batch["is_weights"] = rng.uniform(0.5, 1.5, (10, 6))
        result = replay("verl", "advantage", f"compute_{called}", config, batch)
        assert differing(result, oracle.advantage(name, config, batch)) == []


def test_equal_returns_differ_from_the_mean_of_verl():
    batch = {**graded(0, binary=True, holes=True), "values": np.zeros((10, 6))}
    batch["token_rewards"] = np.zeros((10, 6))
    batch["token_rewards"][np.arange(10), 5 - batch["mask"][:, ::-1].argmax(1)] = 0.75
    for name, called in (
        ("reinforce_plus_plus", "reinforce_plus_plus_outcome_advantage"),
        ("gae", "gae_advantage_return"),
    ):
        config = {"gamma": 1.0, **({"lam": 1.0} if name == "gae" else {})}
        result = replay("verl", "advantage", f"compute_{called}", config, batch)
        assert differing(result, oracle.advantage(name, config, batch)) == []
        assert np.abs(result["advantages"][batch["mask"] > 0]).min() > 0


def test_an_estimator_of_another_name_is_refused():
    with pytest.raises(SpecError, match="estimator"):
        replay("verl", "advantage", "compute_maxrl_outcome_advantage", {}, graded(0, binary=True, holes=False))
