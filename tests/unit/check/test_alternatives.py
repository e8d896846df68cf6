"""Each alternative is another reading of the step: it changes what it says, and nothing that is recorded."""

from dataclasses import replace

import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check.alternatives import group_size, loss_alternatives, permutations
from workbench.check.reading import Reading
from workbench.specs.losses import LossSpec


def reading(step=None, **settings):
    return Reading(step or dump(), LossSpec(**{**SETTINGS, **settings}), ("grpo", {}))


def test_every_kind_is_tried_once_by_name():
    alternatives = list(loss_alternatives(reading(replace(dump(), temperature=0.7))))
    kinds = {alternative.kind for alternative in alternatives}
    assert kinds >= {"factor", "denominator", "mask", "shift", "order", "estimator", "stale", "rounded", "temperature"}
    assert kinds >= {"clip", "penalty", "correction"}
    own = [alternative for alternative in alternatives if alternative.kind != "shift"]  # of which the ends differ
    assert len({alternative.description for alternative in own}) == len(own)


def test_none_is_the_reading_itself():
    null = reading()
    for alternative in loss_alternatives(null):
        other = alternative.reading
        same_tokens = all(
            torch.equal(value, null.dump.tokens[name])
            for name, value in other.dump.tokens.items()
            if name in null.dump.tokens
        ) and {*other.dump.tokens} == {*null.dump.tokens}
        same = same_tokens and other.spec == null.spec and other.factor == 1 and other.wrong is None
        scales = () if other.scale is None else (other.scale.loss_T, other.scale.gradient_T)
        assert not (same and all(scale is None or bool((scale == 1).all()) for scale in scales)), (
            alternative.description
        )


def test_no_temperature_at_1_and_no_factors_of_one_rank():
    alternatives = list(loss_alternatives(reading()))
    assert not [alternative for alternative in alternatives if alternative.kind == "temperature"]
    assert [a.description for a in alternatives if a.kind == "factor"] == [
        "the sign is reversed",
        "the sign of the policy term (of the advantages) is reversed",
    ]
    step = dump(layout={"dp": 2}, documents={"rows": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])})
    factors = [a.description for a in loss_alternatives(reading(step)) if a.kind == "factor"]
    assert "divided by dp (2)" in factors


def test_orders_are_permutations_of_documents():
    assert group_size(dump()) == 4
    orders = permutations(dump())
    assert {"reversed", "shifted by one"} <= {*orders}
    for order_N in orders.values():
        assert sorted(order_N.tolist()) == list(range(8))
