"""Policy losses of the workbench on the local tokens of one rank of an external trainer.

Weights need counts of the whole step. Here they come from collectives over the trainer's own ranks, so only
denominators computed from token and document counts are available; settings that need whole rows before the split
raise an error.

Letters: T tokens of this rank, flat | N documents of the row or rows, the same number on all ranks that share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.losses.build import build_loss
from workbench.losses.document_sums import DocumentSums
from workbench.losses.terms import LossInputs
from workbench.reduction.evaluate import evaluate_loss, token_values
from workbench.reduction.weights import TokenWeights
from workbench.sharding.collectives import all_max, sum_sum
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec, ScalingSpec

DENOMINATORS = ("token", "document", "document_sum", "constant", "raw")
"""Denominators that need only token and document counts."""


@dataclass(frozen=True)
class StepCounts:
    """Token and document counts of an optimizer step, over all ranks and micro-batches. Data, the same on every rank.

    Attributes:
        tokens: number of tokens that count, int64.
        documents: number of documents with a token that counts, int64.
    """

    tokens: Tensor
    documents: Tensor


def check_spec(spec: LossSpec) -> None:
    """Raise if a loss needs more than counts."""
    unsupported = {
        f"denominator {spec.denominator}": spec.denominator not in DENOMINATORS,
        f"a loss that breaks {', '.join(spec.breaks)}": bool(spec.breaks),
        "a correction that counts survivors": spec.correction.denominator != "original",
        "statistics of the whole step": spec.correction.needs_step_statistics,
        "a scaling contract": spec.compat.scaling != ScalingSpec(),
        "a gradient divisor": spec.compat.gradient_divisor != 1 or spec.compat.normalize_by_documents,
        "truncated documents that do not train": spec.truncated != "train",
    }
    if requested := [name for name, present in unsupported.items() if present]:
        raise SpecError(
            f"loss {spec.name!r} from one rank's tokens",
            found=", ".join(requested),
            rule=f"denominators are {', '.join(DENOMINATORS)}, over the whole step, and gradients are "
            "those of the loss",
            fix="use workbench.train.step, which sees whole rows before they are split",
        )


def check_inputs_used(spec: LossSpec, given: Mapping[str, Tensor | None]) -> None:
    """Raise if a tensor is given that the loss does not use: the caller probably meant another loss."""
    unused = [name for name in _USED_BY if given.get(name) is not None and not uses_input(spec, name)]
    if unused:
        raise SpecError(
            f"loss {spec.name!r} with {', '.join(unused)}",
            found=f"no term of this loss uses {', '.join(unused)}",
            rule="; ".join(f"{name}: {_USED_BY[name]}" for name in unused),
            fix="leave it out, or enable the term in the spec",
        )


_USED_BY = {
    "ref_logprobs": "a KL penalty in the loss, such as kl={'coefficient': 0.01}",
    "sampler_logprobs": "a correction, or a ratio or KL against the sampler",
    "entropy": "an entropy bonus, entropy_coefficient",
    "rewards": "signal = 'rewards', or positive_nll_coefficient",
}
"""Optional input -> the settings that use it."""


def uses_input(spec: LossSpec, name: str) -> bool:
    """True if a loss requires an input, or its values on a few synthetic tokens depend on it."""
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
    loss, value = build_loss(spec), getattr(inputs, f"{name}_T")

    def with_value(other: Any) -> LossInputs:
        return replace(inputs, **{f"{name}_T": other})

    try:
        before = token_values(loss(inputs))
        loss(with_value(None))
    except SpecError:
        return True
    others = (token_values(loss(with_value(value + by))) for by in (0.3, 8.0, -8.0))
    return any(not torch.equal(before, other) for other in others)


def document_sums(mask: Tensor, ids: Tensor | None, count: int | None, axis: Axis) -> DocumentSums:
    """Sums over the documents of this rank's flat tokens; without ids each row of [b, t] is a document, one of [t] too.

    Collective over the axis (a maximum) if ids come without a count: the number of documents of the whole rows.

    Raises:
        ShapeError: ids of another shape, not integers, not below the count, or below 0 on a token that counts.
    """
    if ids is None:
        count = mask.shape[0] if mask.dim() > 1 else 1
        ids = torch.arange(count, device=mask.device).view(-1, *[1] * (mask.dim() - 1)).expand(mask.shape)
    elif ids.shape != mask.shape or ids.dtype.is_floating_point or ids.dtype is torch.bool:
        raise ShapeError(
            "documents",
            found=f"{ids.dtype} of shape {tuple(ids.shape)}",
            rule=f"an integer for each token, of shape {tuple(mask.shape)}",
            fix="give the id of every token's document",
        )
    elif bool((mask & (ids < 0)).any()):
        raise ShapeError(
            "documents",
            found="an id below 0 on a token that counts",
            rule="a token that counts has a document; below 0 is padding",
            fix="leave padding out of the mask, or number its document",
        )
    else:
        highest = ids.max() if ids.numel() else ids.new_tensor(-1)
        if count is None:
            count = max(int(all_max(highest, axis)) + 1, 1)
        elif int(highest) >= count:
            raise ShapeError(
                f"num_documents = {count}",
                found=f"a document with the id {int(highest)}",
                rule="ids count from 0 through all documents of the row, on all of its ranks",
                fix="give the number of documents of the whole row",
            )
    ids_T = ids.long().clamp_min(0).reshape(-1)
    return DocumentSums(ids_T, mask.reshape(-1), axis=axis, complete=sum_sum, num_documents=count)


def local_policy_loss(
    spec: LossSpec, inputs: Mapping[str, Tensor], sums: DocumentSums, lengths_N: Tensor, counts: StepCounts
) -> Tensor:
    """Return this rank's part of a loss, from fields of `LossInputs`, `document_sums` and the step's counts.

    Shapes:   [T] inputs, [N] tokens that count in each document, on all ranks -> scalar.
    Backward: of the part; a document's sum receives gradients from all ranks of its axis.
    """
    mask_T = sums.loss_mask_T
    masked: dict[str, Any] = {
        f"{name}_T": torch.where(mask_T, value, value.new_zeros(())) for name, value in inputs.items()
    }
    masked["policy_logprobs_T"] = torch.where(mask_T, inputs["policy_logprobs"], masked["old_logprobs_T"])
    lengths_T = sums.on_tokens(lengths_N).clamp_min(1)
    loss_inputs = LossInputs(
        **masked, loss_mask_T=mask_T, document_ids_T=sums.document_ids_T, lengths_T=lengths_T, sums=sums
    )
    weights = {}
    for name, divisor_T in _divisors(spec, lengths_T, counts).items():
        masked_T = torch.where(mask_T, 1 / divisor_T, 0.0)
        weights[name] = TokenWeights(masked_T, masked_T)
    weights |= {"policy": weights[spec.denominator], "penalty": weights[spec.denominator]}
    return evaluate_loss(build_loss(spec), loss_inputs, weights, mask_T).scalars["total"].value


def _divisors(spec: LossSpec, lengths_T: Tensor, counts: StepCounts) -> dict[str, Tensor]:
    """Per-token divisors by denominator name, for all names that a term may use."""
    lengths_T = lengths_T.double()
    tokens, documents = counts.tokens.double().clamp_min(1), counts.documents.double().clamp_min(1)
    ones_T = torch.ones_like(lengths_T)
    divisors = {
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
        divisors["constant"] = documents * spec.denominator_constant * ones_T
    return divisors
