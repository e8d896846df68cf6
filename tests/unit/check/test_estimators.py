"""Wrong estimators, groups and orders of rewards, each as another reading of the step."""

from dataclasses import replace

import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check.estimators import advantage_alternatives
from workbench.check.reading import Reading
from workbench.check.recompute import recompute_advantages
from workbench.specs.losses import LossSpec

NULL = Reading(dump(), LossSpec(**SETTINGS), ("grpo", {"epsilon": 1e-4}))


def test_each_has_a_name_of_its_own_and_gives_advantages():
    alternatives = list(advantage_alternatives(NULL))
    kinds = {alternative.kind for alternative in alternatives}
    assert kinds == {"estimator", "mask", "group", "order", "factor", "rounded"}
    descriptions = [alternative.description for alternative in alternatives]
    assert len(set(descriptions)) == len(descriptions)
    right = recompute_advantages(NULL)
    same = [a.description for a in alternatives if torch.equal(recompute_advantages(a.reading), right)]
    none, own = "documents without a trained token count in their group", "a group is 4 consecutive documents"
    assert {none, own} <= {*same}  # there is none, and it is
    assert len(alternatives) - len(same) > 50


def test_ranks_may_be_taken_for_groups():
    step = dump(layout={"dp": 2, "micro_batches": 2}, documents={"rows": torch.tensor([0, 1, 2, 3] * 2)})
    descriptions = [a.description for a in advantage_alternatives(replace(NULL, dump=step))]
    assert "a group is its documents of one micro-batch" in descriptions
    assert "all documents of one rank are one group" in descriptions


def test_without_an_estimator_there_is_nothing_to_try():
    assert not list(advantage_alternatives(replace(NULL, estimator=None)))
