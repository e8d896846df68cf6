"""The advantage of a document is the mean over all of its tokens, those without an advantage too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.losses.terms import LossInputs
from workbench.reduction.document_sums import ShardedSums


def _broken(advantages_at: Callable[[LossInputs, str], Tensor]) -> Callable[[LossInputs, str], Tensor]:
    def over_all_tokens(inputs: LossInputs, advantage_level: str) -> Tensor:
        means_T = advantages_at(inputs, advantage_level)
        if advantage_level != "document" or not isinstance(inputs.sums, ShardedSums):
            return means_T
        whole_T = inputs.sums.row.document_ids_T
        tokens_N = torch.bincount(whole_T[whole_T >= 0], minlength=1)
        return means_T * inputs.document_lengths_T / tokens_N[inputs.document_ids_T.clamp_min(0)]

    return over_all_tokens


FAULT = Fault(
    family="I",
    what="a document's advantage is a mean that counts prompt and tool tokens, whose advantage is 0",
    origin="areal-project/AReaL#1346 (padding in the advantage of a sequence)",
    signature="the policy term of a document is the share of its tokens that trains too small, penalties and ratios "
    "right: no constant, another direction; nothing where each token keeps its advantage",
    seam="workbench.losses.surrogates.sequence:advantages_at",
    broken=_broken,
    shows_in={"loss": {"name": "gspo", "surrogate": {"advantage_level": "document"}}},
    hidden_in={"loss": {"surrogate": {"advantage_level": "token"}}},
    detected_by="tests/faults/test_unseen.py::test_a_document_advantage_over_all_tokens_spares_the_penalty",
)
