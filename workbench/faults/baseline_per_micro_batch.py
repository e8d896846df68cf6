"""Answers are compared with those that happen to lie in their micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train.step import make_advantages


def _broken(pack_step: Callable) -> Callable:
    def pack_then_compare(batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
        return [make_advantages(row, spec) for row in pack_step(batch, spec, *args)]

    return pack_then_compare


FAULT = Fault(
    family="I",
    what="a micro-batch is smaller than a group, and each micro-batch makes the baseline of the answers that it holds",
    origin="google/tunix#816 and #820",
    signature="right log-probabilities; answers alone in their micro-batch get an advantage of 0, others one against "
    "fewer; the policy term alone is wrong; nothing where groups are kept together",
    seam="pack_step",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3, "advantages": {"name": "grpo"}}},
    hidden_in={"data": {"keep_groups": True}},
    detected_by="tests/faults/test_unseen_at_first.py::test_baselines_of_micro_batches_turn_the_policy_term_alone",
)
