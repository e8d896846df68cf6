"""Causes of the loss of further tokens: other targets, another layer, a factor, and counts of ranks."""

import pytest
import torch

from tests.helpers.hand_records import CONTEXT, COUNTS, METRICS, make_record, mixed, tokens
from workbench.diagnose.diagnosis import diagnose_records

COUNTED = (torch.arange(18) % 6 > 2) & (torch.arange(18) < 17)
VALUES = torch.where(COUNTED, -torch.linspace(0.5, 2.5, 18, dtype=torch.float64), 0.0)
TERM = 0.3 * -float(VALUES[COUNTED].mean())


def record(term=TERM, values=VALUES, count=8.0, **more):
    """A record whose loss and gradient follow the term of a prediction."""
    changes = {} if term == TERM else mixed([""])
    metrics = METRICS | {"loss/prediction_1": term, "prediction/tokens_1/sum": count}
    of_tokens = tokens() | {"prediction_1_logprobs": values}
    return make_record(metrics=metrics, loss=0.25 + term, changes=changes, tokens=of_tokens, **more)


def first(suspect):
    cause = diagnose_records(record(), suspect).causes[0]
    return cause.name, " ".join(cause.evidence)


def test_equal_records_have_no_cause():
    assert first(record())[0] == "no_difference"


@pytest.mark.parametrize(
    ("term", "text"),
    [(TERM / 2, "which is 1 / cp"), (TERM * 3, "which is dp"), (TERM * 8, "8 times too big: by the number of its tok")],
)
def test_one_factor_is_named_by_its_size(term, text):
    name, evidence = first(record(term=term))
    assert name == "prediction_factor"
    assert text in evidence


def test_means_of_ranks_are_named():
    shards = tokens()["shards"]
    means = [float(-VALUES[COUNTED & (shards == rank)].mean()) for rank in (0, 1)]
    name, evidence = first(record(term=0.3 * sum(means) / 2))
    assert name == "prediction_counts"
    assert "mean over the means of each" in evidence


def test_other_weights_are_told_without_a_name():
    name, evidence = first(record(term=TERM * 1.2345))
    assert (name, "1.2345 times" in evidence) == ("prediction_counts", True)


def test_other_places_are_targets():
    shifted = VALUES.roll(1)
    assert first(record(term=TERM * 1.1, values=shifted))[0] == "prediction_targets"
    name, evidence = first(record(term=TERM * 1.1, count=11.0))  # at places that no target of the policy has
    assert name == "prediction_targets"
    assert "11 in all and not 8" in evidence


def test_other_values_at_the_same_places_are_of_a_layer():
    assert first(record(term=TERM * 1.1, values=VALUES * 1.1))[0] == "prediction_layer"


def test_where_the_policy_differs_nothing_is_said_of_the_prediction():
    other = tokens() | {"policy_logprobs": tokens()["policy_logprobs"] - 1, "prediction_1_logprobs": VALUES * 1.1}
    metrics = METRICS | {"loss/prediction_1": TERM * 1.1, "prediction/tokens_1/sum": 8.0}
    suspect = make_record(metrics=metrics, loss=0.5, changes=mixed([""]), tokens=other)
    assert not any(cause.name.startswith("prediction_") for cause in diagnose_records(record(), suspect).causes)


def test_the_sizes_of_the_record_are_those_that_factors_are_named_by():
    assert (CONTEXT["cp"], CONTEXT["dp"], COUNTS["trained_tokens"]) == (2, 3, 130.0)
