"""Evidence of the drawn tokens on the distribution they were drawn from.

A log-probability recorded at temperature 1 may mean that the sampler drew at temperature 1, or that it drew at another
one and recorded raw values. The tokens tell the two apart: they are likelier under the distribution they were drawn
from. `evidence` is the difference of the two log-likelihoods.
"""

from __future__ import annotations

import torch

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import RECORDED, Configuration
from workbench.mismatch.quantities import sampling_logprobs
from workbench.rollouts.sampling import Sampling

DECISIVE = 3.0
"""Nats of log-likelihood that decide: odds of 20 to 1. Source: Kass and Raftery, Bayes Factors (1995), "strong"."""
OUTSIDE = 2.0
"""Nats by which a token outside a support is less likely than without the support: rounding moves tokens across its
edge, so that one of them does not decide, and two do."""
SAMPLE = 4096


def evidence(computation: Computation, first: Configuration, second: Configuration) -> float:
    """Log-likelihood of the drawn tokens under the first distribution, minus that under the second, in nats."""
    at_T = torch.nonzero(computation.counted_T)[:, 0][:SAMPLE]
    total = 0.0
    for sign, configuration in ((1, first), (-1, second)):
        # Whose values were recorded does not change what was drawn.
        drawn = configuration.with_changes({"offset": "none", "tokens": RECORDED})
        logits_TV, tokens_T = computation.logits_of(drawn, at_T)
        for logits, tokens in zip(logits_TV.split(512), tokens_T.split(512), strict=True):
            own_T, whole_T = (
                sampling_logprobs(logits, tokens, temperature=configuration.temperature, sampling=sampling)
                for sampling in (configuration.sampling, Sampling())
            )
            total += sign * float(torch.where(own_T.isneginf(), whole_T - OUTSIDE, own_T).sum())
    return total
