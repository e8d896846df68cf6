"""Weights of the predictions that train."""

import pytest

from tests.helpers.hand_outputs import calls, record
from workbench.diagnose.causes.weights import other_weights
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts


def found(wrong, context):
    facts = Facts(compare_records(record(calls(), context=context), record(wrong, loss=0.6, context=context)))
    return list(other_weights(facts, facts.outputs))


@pytest.mark.parametrize(
    ("context", "causes"),
    [
        ({"loss": "grpo", "kl_coef": 0.1}, ["one_term", "old_logprobs", "ref_logprobs"]),
        ({"loss": "grpo", "tis_cap": 2.0}, ["one_term", "old_logprobs", "sampler_logprobs"]),
        ({"loss": "ppo", "gamma": 0.99}, ["advantages", "one_term", "old_logprobs"]),
        ({"loss": "grpo"}, ["old_logprobs", "one_term", "ratio"]),
    ],
)
def test_changes_of_each_prediction_are_told_by_the_terms_that_a_loss_has(context, causes):
    assert (
        found(calls(lambda call, at, n, w: {"weights": [w * (1 + 0.05 * k * k) for k in range(n)]}), context) == causes
    )


def test_weights_right_to_bfloat16_were_rounded():
    assert found(calls(lambda call, at, n, w: {"weights": [w * (0.997 + 0.001 * at)] * n}), {})[0] == "lower_precision"
