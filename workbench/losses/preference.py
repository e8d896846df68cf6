"""Losses on preference pairs: two documents of one group, the chosen one with the greater reward.

Letters: T packed tokens. l log-probability of the policy.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from workbench.losses.terms import LossInputs, Term


def dpo(inputs: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Term:
    """Direct preference optimisation.

    Formula:  m = beta (sum over chosen (l - ref) - sum over rejected (l - ref))
              value = -(1 - label_smoothing) log sigmoid(m) - label_smoothing log sigmoid(-m), on every token of both
    Shapes:   [T] -> [T], the same on every token of a pair. Denominator "document" makes it the mean over pairs.
    Backward: with the pair's weights summing to 1: -beta sigmoid(-m) on tokens of the chosen document, plus on tokens
              of the rejected one (without smoothing).
    Raises:   SpecError: no reference, no rewards or groups, a group that is not a pair.
    Source:   DPO, arXiv 2305.18290, equation 7; smoothing: cDPO, Mitchell (2023).
    """
    margin_T = beta * inputs.document_sums.pair(inputs.log_ratio("ref"))
    values_T = -(1 - label_smoothing) * logsigmoid(margin_T)
    if label_smoothing:
        values_T = values_T - label_smoothing * logsigmoid(-margin_T)
    return Term(values_T, silent_T=~inputs.counts_T)
