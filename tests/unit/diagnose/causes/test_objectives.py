"""The objective of a loss, by the weights of predictions and by words of the context."""

import pytest

from tests.helpers.hand_outputs import calls, record
from workbench.diagnose.causes.objectives import objective
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts

POSITIVE, PAIRS = ((0.5, 0.5), (0.5, 0.5)), ((0.5, -0.5), (0.3, -0.3))


@pytest.mark.parametrize(
    ("weights", "likelihoods", "context", "expected"),
    [
        (POSITIVE, (1.0, 1.0), {}, "likelihood"),
        (POSITIVE, (1.0, 0.1), {}, "likelihood"),
        (PAIRS, (1.0, 1.0), {}, "preference"),
        (((0.5, -0.2), (0.3, -0.6)), (1.0, 1.0), {}, "policy"),
        (POSITIVE, (0.0, 0.0), {}, "distillation"),
        (POSITIVE, (0.0, 0.0), {"loss": "sft"}, "likelihood"),
    ],
)
def test_the_objective(weights, likelihoods, context, expected):
    one, other = (record(calls(weights=weights), likelihoods=each, context=context) for each in likelihoods)
    assert objective(Facts(compare_records(one, other))) == expected
