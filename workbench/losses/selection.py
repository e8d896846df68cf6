"""Selection of the tokens of a term: those with the highest entropy of the policy.

The threshold is taken over this rank's tokens of this micro-batch, because other entropies are not known yet. Such a
loss is *not* invariant under splitting: `LossSpec.breaks` declares it.

Letters: T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term


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
