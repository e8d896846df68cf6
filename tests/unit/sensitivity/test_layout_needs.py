"""Needs of micro-batches ask which of them train."""

from tests.unit.sensitivity.test_facts import batch, facts
from workbench.sensitivity.facts import Facts, Observed
from workbench.sensitivity.layout_needs import TRAINED_EARLY, TRAINED_ROWS
from workbench.specs.run import RunSpec


def of(*masks):
    settings = {"data": {"micro_batches": 2}}
    step = facts(batch(*masks), **settings)
    return Facts(RunSpec.model_validate(settings), (step,), Observed(0, 0, 0.0, 0.0, 1.0, True), 19, 2, 0, 1.0), step


def test_a_micro_batch_before_the_last_trains_or_not():
    both, _ = of([0, 1], [0, 1])
    assert TRAINED_EARLY.holds(both)
    assert TRAINED_ROWS.holds(both)
    one, step = of([0, 1], [0, 0])
    assert TRAINED_EARLY.holds(one) == bool(step.rows[0].tokens)
    assert not TRAINED_ROWS.holds(one)
