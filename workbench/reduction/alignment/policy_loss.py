"""Any policy loss of the workbench, from the tokens that one rank of somebody else's trainer holds.

Weights need counts of the whole step. Here they come from collectives over the trainer's own ranks, so only
denominators that are made of counts of tokens and documents are known; what must see whole rows before they are split
is refused.

Letters: T tokens of this rank, flat | N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss
from workbench.losses.spec import LossSpec, ScalingSpec
from workbench.losses.terms import LossInputs
from workbench.reduction.alignment.documents import Documents, SumsOverRanks
from workbench.reduction.evaluate import evaluate_loss
from workbench.reduction.weights import TokenWeights

DENOMINATORS = ("token", "document", "document_sum", "constant", "raw")
"""Those that need no more than counts of tokens and documents."""


@dataclass(frozen=True)
class StepCounts:
    """What an optimizer step holds, over all ranks and micro-batches. Data, the same on every rank.

    Attributes:
        tokens: that count, int64.
        documents: in which a token counts, int64.
    """

    tokens: Tensor
    documents: Tensor


def check_spec(spec: LossSpec) -> None:
    """Refuse what cannot be had from counts.

    Raises:
        SpecError: the setting, and where it can be had.
    """
    asked = {f"denominator {spec.denominator}": spec.denominator not in DENOMINATORS,
             f"what breaks {', '.join(spec.breaks)}": bool(spec.breaks),
             "a correction that counts survivors": spec.correction.denominator != "original",
             "statistics of the whole step": spec.correction.needs_step_statistics,
             "a scaling contract": spec.scaling != ScalingSpec(),
             "a gradient divisor": spec.gradient_divisor != 1 or spec.normalize_by_documents,
             "truncated documents that stay silent": spec.truncated != "train"}
    if found := [name for name, present in asked.items() if present]:
        raise SpecError(f"loss {spec.name!r} from what one rank holds", found=", ".join(found),
                        rule=f"denominators are {', '.join(DENOMINATORS)}, over the whole step, and gradients are "
                             "those of the loss",
                        fix="take workbench.runs.step, which sees whole rows before they are split")


def local_policy_loss(spec: LossSpec, inputs: dict[str, Tensor | None], mask_T: Tensor, documents: Documents,
                      lengths_N: Tensor, counts: StepCounts) -> Tensor:
    """This rank's part of a loss.

    Args:
        spec: the loss, checked.
        inputs: ``policy_logprobs``, ``old_logprobs``, ``advantages`` and what else `LossInputs` knows, flat.
        mask_T: [T] bool, the token counts.
        documents: of the tokens.
        lengths_N: [N] tokens that count in each document, on all ranks.
        counts: of the whole step.

    Shapes:   [T] -> scalar.
    Backward: of the part; a document's sum carries what all ranks of its axis want from it.
    """
    clean = {name: None if value is None else torch.where(mask_T, value, value.new_zeros(()))
             for name, value in inputs.items()}
    clean["policy_logprobs"] = torch.where(mask_T, inputs["policy_logprobs"], clean["old_logprobs"])
    lengths_T = documents.on_tokens(lengths_N).clamp_min(1)
    made = LossInputs(**{f"{name}_T": value for name, value in clean.items()}, loss_mask_T=mask_T,
                      document_ids_T=documents.ids, lengths_T=lengths_T, sums=SumsOverRanks(documents, mask_T))
    weights = {name: _weights(1 / divisor_T, mask_T) for name, divisor_T in _divisors(spec, lengths_T, counts).items()}
    weights |= {"policy": weights[spec.denominator], "penalty": weights[spec.denominator]}
    return evaluate_loss(make_loss(spec), made, weights, mask_T).scalars["total"].value


def _divisors(spec: LossSpec, lengths_T: Tensor, counts: StepCounts) -> dict[str, Tensor]:
    """What a token is divided by, under every name that a term may ask for."""
    lengths_T = lengths_T.double()
    tokens, documents = counts.tokens.double().clamp_min(1), counts.documents.double().clamp_min(1)
    ones_T = torch.ones_like(lengths_T)
    found = {"token": tokens.expand_as(ones_T), "document": documents * lengths_T,
             "document_sum": documents.expand_as(ones_T), "raw": ones_T}
    if spec.denominator == "constant":
        if spec.denominator_constant is None:
            raise SpecError("loss.denominator = 'constant'", found="no loss.denominator_constant",
                            rule="the sum is divided by documents * denominator_constant", fix="give the length")
        found["constant"] = documents * spec.denominator_constant * ones_T
    return found


def _weights(values_T: Tensor, mask_T: Tensor) -> TokenWeights:
    held_T = torch.where(mask_T, values_T, 0.0)
    return TokenWeights(held_T, held_T)
