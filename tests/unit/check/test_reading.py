"""Readings of a step: settings that are merged, and weights that are scaled."""

import pytest
import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check.reading import Reading, Scale, Whole
from workbench.reduction.weights import TokenWeights
from workbench.specs.losses import LossSpec


def test_settings_are_merged_key_by_key_unless_the_group_is_whole():
    reading = Reading(dump(), LossSpec.model_validate(SETTINGS))
    changed = reading.changed(kl={"estimator": "k1"}, denominator="document").spec
    assert (changed.kl.estimator, changed.kl.coefficient, changed.denominator) == ("k1", 0.1, "document")
    assert reading.changed(correction=Whole(ratio="token")).spec.correction.ratio_high is None


def test_values_are_replaced_and_the_step_is_not():
    reading = Reading(dump(), LossSpec.model_validate(SETTINGS))
    zeros_T = torch.zeros_like(reading.dump.tokens["old_logprobs"])
    other = reading.with_tokens(old_logprobs=zeros_T, ref_logprobs=None)
    assert torch.equal(other.dump.tokens["old_logprobs"], zeros_T)
    assert "ref_logprobs" not in other.dump.tokens
    assert "ref_logprobs" in reading.dump.tokens
    ones_N = torch.ones(reading.dump.num_documents)
    assert torch.equal(reading.with_documents(rewards=ones_N).dump.documents["rewards"], ones_N)


@pytest.mark.parametrize(
    ("of", "scaled"),
    [("", {"policy", "penalty", "document"}), ("policy", {"policy"}), ("penalty", {"penalty", "document"})],
)
def test_weights_of_the_penalty_are_all_but_those_of_the_policy(of, scaled):
    ones_T = torch.ones(3)
    by_name = {name: TokenWeights(ones_T, ones_T) for name in ("policy", "penalty", "document")}
    result = Scale(2 * ones_T, 3 * ones_T, of=of).apply(by_name, torch.arange(3))
    for name, weights in result.items():
        factors = (2.0, 3.0) if name in scaled else (1.0, 1.0)
        assert (float(weights.loss_T[0]), float(weights.gradient_T[0])) == factors, name
    assert Scale(2 * ones_T, of=of).apply(by_name, torch.arange(0)) == by_name
