"""Losses on preference pairs: two documents of one group, the chosen one with the greater reward.

`dpo` is a surrogate, a value on every token of both documents, so that a pair may straddle ranks. The other functions
work on whole local documents and pairs: rewards of a reward model, sums of log-probabilities.

Letters: T packed tokens | N documents | P pairs. l log-probability of the policy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from workbench.errors import SpecError
from workbench.losses.document_sums import document_totals
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


# ---- losses of whole pairs ---------------------------------------------------------------------------------------

KINDS = (
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)
"""Losses of a pair; `pair_losses` has their formulas."""
SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""Kinds that model wrong preference labels; they take label_smoothing."""


def document_rewards(
    inputs: LossInputs, documents: int, *, against: str | None = "ref", average: bool = False
) -> Tensor:
    """Implied rewards of whole documents: log of each one's probability ratio to another policy.

    Formula:  ``sum (l - other)`` over the document's trained tokens, other 0 if None; divided by their number if
              averaged, and 0 for a document in which nothing counts
    Shapes:   inputs of T tokens, with document ids 0 to N - 1 -> [N] nats.
    Backward: 1, or 1 / length, on each trained token.
    Raises:   SpecError: no log-probabilities of the other policy, or no document ids.
    """
    if inputs.document_ids_T is None:
        raise SpecError(
            "rewards of documents",
            found="no document_ids_T",
            rule="each document gets one number",
            fix="pass document_ids_T, the document of each token",
        )
    values_T = inputs.counted_logprobs_T if against is None else inputs.log_ratio(against)
    counts_T, ids_T = inputs.counts_T, inputs.document_ids_T
    sums_N = document_totals(values_T, counts_T, ids_T, documents)
    if not average:
        return sums_N
    return sums_N / document_totals(counts_T.to(sums_N.dtype), counts_T, ids_T, documents).clamp_min(1)


def implied_rewards(policy_N: Tensor, ref_N: Tensor) -> Tensor:
    """Implied rewards of documents, as in `document_rewards`, from known sums, or means, of log-probabilities.

    Formula:  ``policy - ref``
    Shapes:   any, equal -> the same. Units: nats.
    Backward: 1 to the policy.
    """
    return policy_N - ref_N


def pair_losses(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    beta: float = 1.0,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    modulation: float = 0.05,
) -> Tensor:
    """Loss of each preference pair, from one number for each of its two completions.

    Rewards of a reward model with beta 1 give the Bradley-Terry likelihood, implied rewards (`document_rewards`) DPO.

    Formula:  ``c = beta chosen``, ``r = beta rejected``, ``m = c - r``, e = label_smoothing, s = sigmoid
              sigmoid:   ``-(1 - e) log s(m) - e log s(-m)``
              ipo:       ``(chosen - rejected - 1 / (2 beta))^2``
              hinge:     ``max(0, 1 - m)``
              robust:    ``(-(1 - e) log s(m) + e log s(-m)) / (1 - 2 e)``
              exo_pair:  ``s(m) (log s(m) - log(1 - e)) + s(-m) (log s(-m) - log e)``
              nca_pair:  ``-log s(c) - (log s(-c) + log s(-r)) / 2``
              bco_pair:  ``-log s(c) - log s(-r)``
              sppo_hard: ``(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2``
              apo_zero:  ``s(-c) + s(r)``
              apo_down:  ``s(c) + s(-m)``
              discopop:  ``-(1 - w) log s(m) + w exp(-m)``, w = s(m / modulation)
    Shapes:   [P] each -> [P].
    Backward: ordinary. sigmoid: -+beta sigmoid(-m) without smoothing.
    Raises:   SpecError: another kind, smoothing outside [0, 1/2) or for a kind without it, none for exo_pair, a beta
              of 0 for a kind that divides by it.
    Source:   Bradley-Terry: arXiv 2203.02155, equation 1; DPO: arXiv 2305.18290, equation 7; smoothing: cDPO,
              Mitchell (2023); IPO: arXiv 2310.12036, equation 17; hinge: SLiC, arXiv 2305.10425; robust:
              arXiv 2403.00409; EXO: arXiv 2402.00856, equation 16; NCA: arXiv 2402.05369; BCO: arXiv 2404.04656,
              without its running mean, as in Liger; SPPO: arXiv 2405.00675; APO: arXiv 2408.06266, equations 7 and 8;
              DiscoPOP: arXiv 2406.08414, equation 5.
    """
    smoothed = bool(label_smoothing)
    wrong_smoothing = kind == "exo_pair" if not smoothed else kind not in SMOOTHED
    divides_by_0 = kind in ("ipo", "sppo_hard") and beta == 0
    if kind not in KINDS or not 0 <= label_smoothing < 0.5 or wrong_smoothing or divides_by_0:
        raise SpecError(
            f"pair_losses(kind={kind!r}, beta={beta}, label_smoothing={label_smoothing})",
            rule=f"kind is one of {', '.join(KINDS)}; label_smoothing lies in [0, 0.5), above 0 for "
            f"exo_pair, and is 0 for all but {', '.join(SMOOTHED)}; ipo and sppo_hard divide by beta",
            fix="correct the setting",
        )
    likely_P, unlikely_P = beta * chosen_P, beta * rejected_P
    margin_P, flipped = likely_P - unlikely_P, label_smoothing
    if kind == "ipo":
        return (chosen_P - rejected_P - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - margin_P)
    if kind == "exo_pair":
        return margin_P.sigmoid() * (logsigmoid(margin_P) - math.log1p(-flipped)) + (-margin_P).sigmoid() * (
            logsigmoid(-margin_P) - math.log(flipped)
        )
    if kind == "nca_pair":
        return -logsigmoid(likely_P) - (logsigmoid(-likely_P) + logsigmoid(-unlikely_P)) / 2
    if kind == "bco_pair":
        return -logsigmoid(likely_P) - logsigmoid(-unlikely_P)
    if kind == "sppo_hard":
        return (chosen_P - 1 / (2 * beta)).square() + (rejected_P + 1 / (2 * beta)).square()
    if kind == "apo_zero":
        return (-likely_P).sigmoid() + unlikely_P.sigmoid()
    if kind == "apo_down":
        return likely_P.sigmoid() + (-margin_P).sigmoid()
    if kind == "discopop":
        share_P = (margin_P / modulation).sigmoid()
        return -(1 - share_P) * logsigmoid(margin_P) + share_P * (-margin_P).exp()
    right_P, wrong_P = -(1 - flipped) * logsigmoid(margin_P), -flipped * logsigmoid(-margin_P)
    if kind == "robust":
        return (right_P - wrong_P) / (1 - 2 * flipped)
    return right_P + wrong_P if smoothed else right_P


def mean_over_pairs(
    values_P: Tensor, counts_P: Tensor | None = None, *, pairs: float | None = None, epsilon: float = 0.0
) -> Tensor:
    """Sum over pairs that count, divided by their number in the whole step.

    Formula:  ``sum counts_p values_p / (pairs + epsilon)``, counts 1 or 0 (None: all 1), pairs those of the whole step
              (None: that count here)
    Shapes:   [P] -> scalar.
    Backward: 1 / (pairs + epsilon) on pairs that count.
    """
    counts_P = torch.ones_like(values_P, requires_grad=False) if counts_P is None else counts_P.to(values_P.dtype)
    return torch.where(counts_P != 0, values_P * pair_weights(counts_P, pairs=pairs, epsilon=epsilon), 0.0).sum()


def pair_weights(counts_P: Tensor, *, pairs: float | None = None, epsilon: float = 0.0) -> Tensor:
    """Weight of the loss of each pair, see `mean_over_pairs`.

    Formula:  ``counts_p / (pairs + epsilon)``
    Shapes:   [P] -> [P].
    """
    return counts_P / ((counts_P.sum() if pairs is None else pairs) + epsilon)
