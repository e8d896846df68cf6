"""Any policy loss of the workbench, from the tokens that one rank of somebody else's trainer holds.

Weights need counts of the whole step. Here they come from collectives over the trainer's own ranks, so only
denominators that are made of counts of tokens and documents are known; what must see whole rows before they are split
is refused.

Letters: T tokens of this rank, flat | N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss
from workbench.losses.terms import LossInputs
from workbench.parallel_loss.documents import Documents, SumsOverRanks
from workbench.reduction.evaluate import evaluate_loss, token_values
from workbench.reduction.weights import TokenWeights
from workbench.specs.losses import LossSpec, ScalingSpec

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
    asked = {
        f"denominator {spec.denominator}": spec.denominator not in DENOMINATORS,
        f"what breaks {', '.join(spec.breaks)}": bool(spec.breaks),
        "a correction that counts survivors": spec.correction.denominator != "original",
        "statistics of the whole step": spec.correction.needs_step_statistics,
        "a scaling contract": spec.scaling != ScalingSpec(),
        "a gradient divisor": spec.gradient_divisor != 1 or spec.normalize_by_documents,
        "truncated documents that stay silent": spec.truncated != "train",
    }
    if found := [name for name, present in asked.items() if present]:
        raise SpecError(
            f"loss {spec.name!r} from what one rank holds",
            found=", ".join(found),
            rule=f"denominators are {', '.join(DENOMINATORS)}, over the whole step, and gradients are "
            "those of the loss",
            fix="take workbench.train.step, which sees whole rows before they are split",
        )


def refuse_unused(spec: LossSpec, given: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that a loss does not look at: it would be another loss than the one that is meant.

    Args:
        spec: the loss, checked.
        given: the optional inputs, by name.

    Raises:
        SpecError: there is one; the message names it and the settings that would use it.
    """
    unused = [name for name, value in given.items() if value is not None and not looks_at(spec, name)]
    if unused:
        raise SpecError(
            f"loss {spec.name!r} with {', '.join(unused)}",
            found=f"no term of this loss looks at {', '.join(unused)}",
            rule="; ".join(f"{name}: {_USED_BY[name]}" for name in unused),
            fix="leave it out, or say so in the spec",
        )


_USED_BY = {
    "ref_logprobs": "a KL penalty in the loss, such as kl={'coefficient': 0.01}",
    "sampler_logprobs": "a correction, or a ratio or KL against the sampler",
    "entropy": "an entropy bonus, entropy_coefficient",
    "rewards": "signal = 'rewards', or positive_nll_coefficient",
}
"""Optional input -> the settings that look at it."""


def looks_at(spec: LossSpec, name: str) -> bool:
    """True if a loss cannot do without an input, or its values on a few made-up tokens move with it."""
    place = torch.arange(8, dtype=torch.float64)
    inputs = LossInputs(
        -1 - 0.1 * place,
        -1.3 - 0.05 * place,
        1.5 - place,
        sampler_logprobs_T=-1.2 - 0.07 * place,
        ref_logprobs_T=-1.1 - 0.03 * place,
        entropy_T=1 + place,
        rewards_T=1 + 0 * place,
        loss_mask_T=torch.ones(8, dtype=torch.bool),
        document_ids_T=torch.arange(8) // 4,
    )
    loss = make_loss(spec)
    try:
        before = token_values(loss(inputs))
        loss(replace(inputs, **{f"{name}_T": None}))
    except SpecError:
        return True
    value = getattr(inputs, f"{name}_T")
    others = (token_values(loss(replace(inputs, **{f"{name}_T": value + by}))) for by in (0.3, 8.0, -8.0))
    return any(not torch.equal(before, other) for other in others)


def local_policy_loss(
    spec: LossSpec,
    inputs: dict[str, Tensor | None],
    mask_T: Tensor,
    documents: Documents,
    lengths_N: Tensor,
    counts: StepCounts,
) -> Tensor:
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
    clean = {
        name: None if value is None else torch.where(mask_T, value, value.new_zeros(()))
        for name, value in inputs.items()
    }
    clean["policy_logprobs"] = torch.where(mask_T, inputs["policy_logprobs"], clean["old_logprobs"])
    lengths_T = documents.on_tokens(lengths_N).clamp_min(1)
    made = LossInputs(
        **{f"{name}_T": value for name, value in clean.items()},
        loss_mask_T=mask_T,
        document_ids_T=documents.ids,
        lengths_T=lengths_T,
        sums=SumsOverRanks(documents, mask_T),
    )
    weights = {name: _weights(1 / divisor_T, mask_T) for name, divisor_T in _divisors(spec, lengths_T, counts).items()}
    weights |= {"policy": weights[spec.denominator], "penalty": weights[spec.denominator]}
    return evaluate_loss(make_loss(spec), made, weights, mask_T).scalars["total"].value


def _divisors(spec: LossSpec, lengths_T: Tensor, counts: StepCounts) -> dict[str, Tensor]:
    """What a token is divided by, under every name that a term may ask for."""
    lengths_T = lengths_T.double()
    tokens, documents = counts.tokens.double().clamp_min(1), counts.documents.double().clamp_min(1)
    ones_T = torch.ones_like(lengths_T)
    found = {
        "token": tokens.expand_as(ones_T),
        "document": documents * lengths_T,
        "document_sum": documents.expand_as(ones_T),
        "raw": ones_T,
    }
    if spec.denominator == "constant":
        if spec.denominator_constant is None:
            raise SpecError(
                "loss.denominator = 'constant'",
                found="no loss.denominator_constant",
                rule="the sum is divided by documents * denominator_constant",
                fix="give the length",
            )
        found["constant"] = documents * spec.denominator_constant * ones_T
    return found


def _weights(values_T: Tensor, mask_T: Tensor) -> TokenWeights:
    held_T = torch.where(mask_T, values_T, 0.0)
    return TokenWeights(held_T, held_T)
