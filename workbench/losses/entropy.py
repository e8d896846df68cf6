"""Terms that look at the policy's whole distribution: an entropy bonus, and a penalty on the log normaliser.

Both read what the output head computed (`workbench.policy`); the temperature has divided the logits before.

Letters: T packed tokens.
"""

from __future__ import annotations

import torch

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term


def entropy_bonus(inputs: LossInputs, coefficient: float) -> Term:
    """Reward the policy for staying undecided.

    Formula:  ``-coefficient * H``, H the exact entropy over the whole vocabulary of logits over temperature.
    Shapes:   [T] -> a term of [T] nats whose values are H and whose coefficient is negated; 0 where nothing counts.
    Backward: -coefficient to the entropy.
    Raises:   SpecError: no entropy.
    Source:   Williams and Peng (1991); A3C, arXiv 1602.01783, section 4.
    """
    if inputs.entropy_T is None:
        raise SpecError(f"an entropy bonus of {coefficient}", found="no entropy_T",
                        rule="the bonus is of the exact entropy, which the output head computes",
                        fix="pass the entropy, or set entropy_coefficient to 0")
    return Term(torch.where(inputs.counts_T, inputs.entropy_T, 0.0), -coefficient, weight="penalty")


def squared_logit(inputs: LossInputs, coefficient: float) -> Term:
    """Keep logits from drifting: the softmax does not see a constant in all of them, this does.

    Formula:  ``coefficient * Z^2``, Z = log of the sum of exp(logit / temperature) over the vocabulary.
    Shapes:   [T] -> a term of [T] nats squared; 0 where nothing counts.
    Backward: 2 coefficient Z to the log normaliser.
    Raises:   SpecError: no log normaliser.
    Source:   the z-loss of PaLM, arXiv 2204.02311, section 5. (Nous penalises the mean over the vocabulary of the
              squared logits instead, which this is not.)
    """
    if inputs.logsumexp_T is None:
        raise SpecError(f"a squared-logit penalty of {coefficient}", found="no logsumexp_T",
                        rule="the penalty is on the log normaliser, which the output head computes",
                        fix="pass logsumexp_T, or set squared_logit_coefficient to 0")
    return Term(torch.where(inputs.counts_T, inputs.logsumexp_T, 0.0).square(), coefficient, weight="penalty")
