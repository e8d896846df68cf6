"""Needs of micro-batches ask which of them train."""

from tests.unit.sensitivity.test_facts import batch
from workbench.sensitivity.facts import Facts, Observed, step_facts
from workbench.sensitivity.layout_needs import SPLIT_LATER, TRAINED_EARLY, TRAINED_ROWS
from workbench.specs.run import RunSpec


def of(*masks, **more):
    settings = {"data": {"micro_batches": 2}, **more}
    (step,) = step_facts(batch(*masks), RunSpec.model_validate(settings))
    return Facts(RunSpec.model_validate(settings), (step,), Observed(0, 0, 0.0, 0.0, 1.0, True), 19, 2, 0, 1.0), step


def test_a_micro_batch_before_the_last_trains_or_not():
    both, _ = of([0, 1], [0, 1])
    assert TRAINED_EARLY.holds(both)
    assert TRAINED_ROWS.holds(both)
    one, step = of([0, 1], [0, 0])
    assert TRAINED_EARLY.holds(one) == bool(step.rows[0].tokens)
    assert not TRAINED_ROWS.holds(one)


def test_a_second_forward_pass_is_that_of_another_micro_batch_or_step():
    long, layout = [0, 1, 1, 1, 1, 1], {"cp": 2}
    one_row = {"data": {}, "layout": layout}
    assert not SPLIT_LATER.holds(of(long, steps=1, **one_row)[0])
    assert SPLIT_LATER.holds(of(long, steps=2, **one_row)[0])
    assert SPLIT_LATER.holds(of(long, long, steps=1, layout=layout)[0])
    assert not SPLIT_LATER.holds(of([0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], steps=2, layout=layout)[0])
