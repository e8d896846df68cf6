"""Needs of micro-batches ask which of them train."""

from dataclasses import replace

from tests.unit.sensitivity.test_facts import batch
from workbench.sensitivity.facts import Facts, Observed, step_facts
from workbench.sensitivity.layout_needs import SPLIT_LATER, TIED, TRAINED_EARLY, TRAINED_ROWS, WHOLE_MODEL
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


def test_a_weight_that_is_frozen_or_its_own_at_each_end_has_no_gradient_to_lose():
    plain, _ = of([0, 1], [0, 1])
    adapters, _ = of([0, 1], [0, 1], lora={"r": 2})
    assert WHOLE_MODEL.holds(plain)
    assert not WHOLE_MODEL.holds(adapters)
    assert TIED.holds(plain)
    assert not TIED.holds(replace(plain, tied=False))
