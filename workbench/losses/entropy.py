"""Terms of the policy's whole distribution: an entropy bonus, penalties on the size of logits, and a selection.

The threshold of the selection is taken over this rank's tokens of this micro-batch, because other entropies are not
known yet. Such a loss is *not* invariant under splitting: `LossSpec.breaks` declares it.
All read results of the output head (`workbench.policy`), where the logits are already divided by the temperature.

Letters: T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term


def entropy_bonus(
    inputs: LossInputs, coefficient: float, *, denominator: str = "penalty", chosen_T: Tensor | None = None
) -> Term:
    """Reward the policy for high entropy.

    Formula:  ``-coefficient * H`` on the chosen tokens (None: all), H the exact entropy over the whole vocabulary of
              logits over temperature; under the denominator local_token times (tokens that count here / chosen ones),
              which turns the mean over the tokens of the micro-batch into one over the chosen ones
    Shapes:   [T] -> a term of [T] nats whose values are H and whose coefficient is negated; 0 where nothing counts.
    Backward: -coefficient to the entropy, times that share.
    Raises:   SpecError: no entropy.
    Source:   Williams and Peng (1991); A3C, arXiv 1602.01783, section 4. A mean over the chosen tokens:
              huggingface/trl.
    """
    if inputs.entropy_T is None:
        raise SpecError(
            f"an entropy bonus of {coefficient}",
            found="no entropy_T",
            rule="the bonus is of the exact entropy, which the output head computes",
            fix="pass the entropy, or set entropy_coefficient to 0",
        )
    acts_T = inputs.counts_T if chosen_T is None else inputs.counts_T & chosen_T
    values_T = torch.where(acts_T, inputs.entropy_T, 0.0)
    if denominator == "local_token" and chosen_T is not None:
        values_T = values_T * (inputs.counts_T.sum().to(values_T.dtype) / acts_T.sum().clamp_min(1))
    return Term(values_T, -coefficient, weight=denominator)


def squared_logit(inputs: LossInputs, coefficient: float) -> Term:
    """Keep logits from drifting: the softmax is invariant to a constant added to all of them, this is not.

    Formula:  ``coefficient * Z^2``, Z = log of the sum of exp(logit / temperature) over the vocabulary.
    Shapes:   [T] -> a term of [T] nats squared; 0 where nothing counts.
    Backward: 2 coefficient Z to the log normaliser.
    Raises:   SpecError: no log normaliser.
    Source:   the z-loss of PaLM, arXiv 2204.02311, section 5. (Nous penalises the mean over the vocabulary of the
              squared logits instead: `mean_squared_logit`.)
    """
    if inputs.logsumexp_T is None:
        raise SpecError(
            f"a squared-logit penalty of {coefficient}",
            found="no logsumexp_T",
            rule="the penalty is on the log normaliser, which the output head computes",
            fix="pass logsumexp_T, or set squared_logit_coefficient to 0",
        )
    return Term(torch.where(inputs.counts_T, inputs.logsumexp_T, 0.0).square(), coefficient, weight="penalty")


def mean_squared_logit(inputs: LossInputs, coefficient: float) -> Term:
    """Keep every logit small, by the mean of their squares.

    Formula:  ``coefficient * (1 / V) sum_v (logit_v / temperature)^2``
    Shapes:   [T] -> a term of [T]; 0 where nothing counts.
    Backward: coefficient to the mean of squares.
    Raises:   SpecError: no mean of squared logits.
    Source:   NousResearch/torchtitan, grpo_step, logit_loss_weight (whose square is the coefficient).
    """
    if inputs.mean_squared_logit_T is None:
        raise SpecError(
            f"a penalty of {coefficient} on the mean squared logit",
            found="no mean_squared_logit_T",
            rule="the penalty is on logits, which only the output head sees",
            fix="choose a head implementation that returns it, or set mean_squared_logit_coefficient to 0",
        )
    return Term(torch.where(inputs.counts_T, inputs.mean_squared_logit_T, 0.0), coefficient, weight="penalty")


def highest_entropy(inputs: LossInputs, share: float) -> Tensor:
    """Select the share of the tokens that count here with the highest entropy of the policy.

    Formula:  H >= quantile(H of the tokens that count here, 1 - share); interpolated between neighbours, in float32;
              a token on the threshold is selected
    Shapes:   inputs of T tokens -> [T] bool; False where nothing counts.
    Backward: none.
    Raises:   SpecError: no entropy.
    Source:   "Beyond the 80/20 rule", arXiv 2506.01939, section 4; the threshold is that of huggingface/trl
              (top_entropy_quantile), which takes it over the micro-batches of all processes together.
    """
    if inputs.entropy_T is None:
        raise SpecError(
            f"the tokens of highest entropy (share {share})",
            found="no entropy_T",
            rule="tokens are chosen by the exact entropy, which the output head computes",
            fix="pass the entropy, or set top_entropy_share to 1",
        )
    with torch.no_grad():
        entropies = inputs.entropy_T[inputs.counts_T]
        if not len(entropies):
            return torch.zeros_like(inputs.counts_T)
        return inputs.counts_T & (inputs.entropy_T >= torch.quantile(entropies.float(), 1 - share))


def restricted_to(term: Term, inputs: LossInputs, chosen_T: Tensor) -> Term:
    """Restrict a term to the chosen tokens; the others count in its denominator, with a value of 0.

    Backward: that of the term; 0 on all other tokens.
    """
    silent_T = inputs.counted_advantages_T == 0 if term.silent_T is None else term.silent_T
    return replace(
        term,
        values_T=torch.where(chosen_T, term.values_T, 0.0),
        silent_T=silent_T | ~chosen_T,
        extras={**term.extras, "high_entropy": chosen_T},
    )
