"""The evidence in a record: counts of the workbench as they are, of others as far as recorded; the rest is unknown."""

import math

import pytest
import torch

from tests.helpers.hand_records import make_record, norms_alone
from workbench.diagnose.record import Record, RecordedStep
from workbench.diagnose.sight import Sight, fewest, not_finite, sight_of

COUNTED = {
    "evidence/documents/sum": 8.0,
    "evidence/gradient_documents/sum": 2.0,
    "evidence/trained_tokens/sum": 100.0,
    "evidence/gradient_tokens/sum": 40.0,
    "evidence/policy_gradient_tokens/sum": 40.0,
    "evidence/clipped_tokens/sum": 60.0,
}


def record(*steps):
    return Record({}, [RecordedStep(number, **fields) for number, fields in enumerate(steps)], "one")


def test_counts_of_the_workbench_are_taken_as_they_are():
    evidence = sight_of(record(*[{"evidence": COUNTED, "gradient_norms": {"w": 1.0}}] * 2), [0, 1])
    assert evidence.summary() == (
        "gradient on 4 of 16 documents (25.0%), 80 of 200 trained tokens (40.0%); clipped 60.0%; counted over 2 steps"
    )
    assert len(evidence.warnings) == 3
    assert evidence.as_json()["gradient_documents"] == 4


def test_tokens_of_an_external_record_show_what_trains():
    made = make_record()
    tokens = dict(made.steps[0].tokens)
    tokens["clipped"] = tokens["trained"] & (tokens["documents"] < 2)
    evidence = sight_of(make_record(tokens=tokens), [0])
    assert (evidence.trained_tokens, evidence.trained_documents, evidence.documents) == (11, 3, 3)
    assert evidence.clipped_tokens == 8
    assert evidence.zero_steps == 0
    assert evidence.warnings == ("72.7% of the trained tokens are clipped",)
    assert evidence.summary().endswith("unknown: gradient tokens")
    assert evidence.as_json()["gradient_tokens"] is None


def test_counts_suffice_without_tokens():
    evidence = sight_of(norms_alone(make_record()), [0])
    assert (evidence.trained_tokens, evidence.trained_documents, evidence.documents) == (130, 11, 13)
    assert evidence.summary() == (
        "130 trained tokens in 11 of 13 documents, a gradient in 1 of 1 steps; unknown: clipped tokens, gradient tokens"
    )


@pytest.mark.parametrize(
    ("fields", "nothing"),
    [
        ({"gradient_norms": {"a": 0.0, "b": 0.0}}, "every gradient is zero in every step"),
        ({"gradients": {"a": torch.zeros(2)}, "loss": 0.3}, "every gradient is zero in every step"),
        (
            {"gradient_norms": {"a": 0.0}, "counts": {"trained_tokens": 0.0}},
            "every gradient is zero in every step: no token is trained",
        ),
        ({"loss": 0.2, "counts": {"trained_tokens": 0.0}}, "no token is trained in any step"),
        ({"loss": 0.0}, "every loss is zero, and no token or gradient is recorded"),
        ({"loss": 0.0, "metrics": {"x": 1.0}}, ""),
        ({"loss": 0.2}, ""),
        ({"loss": 0.0, "gradient_norms": {"a": 1.0}}, ""),
        ({"gradient_norms": {"a": 1.0}, "counts": {"trained_tokens": 0.0}}, ""),
        (
            {"evidence": COUNTED | {"evidence/trained_tokens/sum": 0.0}, "gradient_norms": {"a": 0.0}},
            "no token is trained: the loss mask is empty",
        ),
    ],
)
def test_nothing_to_compare_is_distinguished_from_little_and_unknown(fields, nothing):
    assert sight_of(record(fields), [0]).nothing == nothing


def test_a_step_without_a_gradient_among_others_is_a_warning():
    evidence = sight_of(record({"gradient_norms": {"a": 0.0}}, {"gradient_norms": {"a": 1.0}}), [0, 1])
    assert evidence.nothing == ""
    assert evidence.warnings == ("every gradient is zero in 1 of 2 steps",)
    assert sight_of(record({"gradient_norms": {"a": 0.0}}, {"gradient_norms": {"a": 1.0}}), [0]).nothing


def test_documents_that_mostly_do_not_train_are_a_warning():
    evidence = sight_of(record({"counts": {"trained_tokens": 9.0, "documents": 1.0, "masked_documents": 3.0}}), [0])
    assert evidence.warnings == ("only 1 of 4 documents (25.0%) have a trained token",)


def test_the_weaker_record_has_nothing_or_fewer_tokens():
    much, little = Sight(1, 100, zero_steps=0), Sight(1, 3, zero_steps=0)
    none, unknown = Sight(1, 1000, zero_steps=1), Sight(1)
    assert fewest(much, little) is fewest(little, much) is little
    assert fewest(little, none) is fewest(none, little) is none
    assert fewest(unknown, much) is fewest(much, unknown) is much


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": math.inf}, "the loss is inf"),
        ({"gradient_norms": {"a": 1.0, "b": math.nan}}, "of b has norm nan"),
        ({"gradients": {"a": torch.tensor([1.0, math.nan])}}, "of a is not finite"),
        ({"loss": 1.0}, ""),
    ],
)
def test_a_non_finite_value_is_named(fields, said):
    result = not_finite(RecordedStep(0, **fields))
    assert said in result
    assert bool(result) is bool(said)
