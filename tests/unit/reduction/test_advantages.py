"""Advantages of a whole step: the estimator and the penalty in the reward that a spec names."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.reduction.advantages import compute_advantages
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


def grouped():
    """The nasty documents in groups of three, with rewards."""
    return RolloutBatch.from_documents(
        [d | {"group_id": number // 3, "reward": float(number)} for number, d in enumerate(nasty_documents(4))]
    )


def spec_of(**settings):
    return RunSpec.model_validate(settings)


def test_a_penalty_in_the_reward_is_not_silently_dropped():
    settings = {"loss": {"kl": {"coefficient": 0.1, "placement": "reward"}}}
    with pytest.raises(SpecError, match=r"loss.kl.placement 'reward' with recorded advantages"):
        parse_spec(RunSpec, settings, where="settings")
    parse_spec(RunSpec, settings | {"data": {"advantages": {"name": "rloo"}}}, where="settings")
    parse_spec(RunSpec, {"loss": {"kl": {"coefficient": 0.0, "placement": "reward"}}}, where="settings")


def test_a_penalty_in_the_reward_moves_advantages_where_an_estimator_makes_them():
    batch = grouped()
    batch = replace(batch, ref_logprobs_T=batch.old_logprobs_T - 0.5)
    made = {}
    for coefficient in (0.0, 0.1):
        spec = spec_of(
            data={"advantages": {"name": "reinforce_plus_plus"}},
            loss={"kl": {"coefficient": coefficient, "placement": "reward", "estimator": "k1"}},
        )
        made[coefficient] = compute_advantages(batch, spec).advantages_T
    assert not torch.equal(made[0.0], made[0.1])
    spec = spec_of(data={"advantages": {"name": "grpo"}}, loss={"kl": {"coefficient": 0.1, "placement": "reward"}})
    with pytest.raises(SpecError, match="no ref_logprobs"):
        compute_advantages(replace(grouped(), ref_logprobs_T=None), spec)


def test_settings_of_the_estimator_are_handed_on_and_strange_ones_are_refused():
    batch = grouped()
    one, other = (
        compute_advantages(batch, spec_of(data={"advantages": {"name": "grpo", "settings": settings}}))
        for settings in ({"ddof": 1.0}, {"scale": "none"})
    )
    assert not torch.equal(one.advantages_T, other.advantages_T)
    with pytest.raises(SpecError, match="slope"):
        compute_advantages(batch, spec_of(data={"advantages": {"name": "rloo", "settings": {"slope": 1}}}))
