"""Advantages are whitened over what each data-parallel rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train.step import make_advantages

_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_whitened")


def _broken(pack_step: Callable) -> Callable:
    def pack_then_whiten(batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
        rows = pack_step(batch, spec, *args)
        if spec.data.advantages.name not in _WHITENED:
            return rows
        each, found = len(rows) // spec.layout.dp, []
        for first in range(0, len(rows), each):
            mine = rows[first : first + each]
            made_S = _made_alone(batch, spec, mine)
            found += [replace(row, advantages_T=made_S[row.source_T]) for row in mine]
        return found

    return pack_then_whiten


def _made_alone(batch: RolloutBatch, spec: RunSpec, rows: Sequence[RolloutBatch]) -> Tensor:
    """[S + 1] advantages by place in the recording, of a step that is these rows; 0 elsewhere, last for padding."""
    made_S = batch.advantages_T.new_zeros(int(batch.source_T.max()) + 2)
    document_S = made_S.long()
    document_S[batch.source_T] = batch.document_ids_T
    documents = document_S[torch.cat([row.source_T[row.document_ids_T >= 0] for row in rows])].unique().tolist()
    if documents:
        alone = make_advantages(batch.select(documents), spec)
        made_S[alone.source_T] = alone.advantages_T
    return made_S


FAULT = Fault(
    family="I",
    what="mean and deviation of the whitening are taken over a rank's own tokens instead of over all of the step",
    origin="THUDM/slime#2235 (whitening over too few ranks)",
    signature="right log-probabilities, another mean advantage on each rank; a gradient of about the right size in "
    "another direction; nothing at dp = 1",
    seam="pack_step",
    broken=_broken,
    shows_in={"layout": {"dp": 2}, "data": {"advantages": {"name": "reinforce_plus_plus"}}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
