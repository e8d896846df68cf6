"""Terms that imitate tokens: supervised fine-tuning, and the likelihood of completions with a positive reward.

Letters: T packed tokens. l log-probability of the policy.
"""

from __future__ import annotations

import torch

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term


def sft(inputs: LossInputs) -> Term:
    """Negative log-likelihood.

    Formula:  value = -l
    Shapes:   [T] -> [T]. Units: nats.
    Backward: -1.
    Source:   maximum likelihood.
    """
    return Term(-inputs.counted_logprobs_T, silent_T=~inputs.counts_T)


def positive_nll(inputs: LossInputs, *, coefficient: float) -> Term:
    """Negative log-likelihood of the documents that earned a positive reward.

    Formula:  value = -l if the document's reward > 0, else 0;  weight 1 / (tokens of such documents in the whole step)
    Shapes:   [T] -> [T]. Units: nats.
    Backward: -1 or 0.
    Raises:   SpecError: the batch has no rewards.
    Source:   VAPO, arXiv 2504.05118.
    Differs:  not at all. Elsewhere the divisor is counted in each micro-batch (NVIDIA-NeMo/RL#3791), or the term is
              silently absent without rewards (#3792).
    """
    if inputs.rewards_T is None:
        raise SpecError(
            f"positive_nll_coefficient = {coefficient}",
            found="no rewards",
            rule="the term imitates documents with a positive reward",
            fix="give the batch rewards, or set positive_nll_coefficient to 0",
        )
    imitated_T = inputs.counts_T & (inputs.rewards_T > 0)
    return Term(torch.where(imitated_T, -inputs.counted_logprobs_T, 0.0), coefficient, weight="positive_token")
