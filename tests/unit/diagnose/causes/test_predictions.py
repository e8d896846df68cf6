"""Which predictions train, as the gradients of logits tell it."""

from tests.helpers.hand_outputs import calls, record
from workbench.diagnose.causes.predictions import other_predictions
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts


def found(right, wrong):
    facts = Facts(compare_records(right, wrong))
    return list(other_predictions(facts, facts.outputs))


def test_the_same_predictions_are_no_cause():
    assert found(record(calls()), record(calls(), loss=0.6)) == []


def test_targets_one_too_far_are_told_where_the_same_ones_train():
    right, wrong = record(calls()), record(calls(), loss=0.6)
    right.steps[0].observed["outputs"]["after"] = [24, 0, 24, 0]
    wrong.steps[0].observed["outputs"]["after"] = [24, 0, 0, 24]
    assert found(right, wrong) == ["other_targets"]
