"""Columns that pad the vocabulary to whole tiles take part in the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy

TILE = 32
"""Columns that a kernel computes at a time."""


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def with_padding(self: Policy, *args: object, wanted: Iterable[str] = (), **how: object) -> TokenLogprobs:
        said = token_logprobs(self, *args, wanted={*wanted, "logsumexp"}, **how)
        padding = -self.vocabulary_size % TILE
        if not padding:
            return said
        more_T = torch.logaddexp(said.logsumexp_T, said.logsumexp_T.new_full((), math.log(padding)))
        return said._replace(logprobs_T=said.logprobs_T + said.logsumexp_T - more_T, logsumexp_T=more_T)

    return with_padding


FAULT = Fault(
    family="J",
    what=f"a kernel that computes {TILE} columns of the vocabulary at a time adds exp(0) for each that does not exist",
    origin="verl-project/verl#5349, #2656 and #2899",
    signature="every log-probability too small, by log(1 + padding / sum of exp of logits): more where logits are "
    "small; ratios below 1 in the first step; right where the tile divides the vocabulary",
    seam="workbench.policy.model:Policy.token_logprobs",
    broken=_broken,
)
