"""The data of a step's micro-batches, and inputs of its loss, from a reading of its dump.

A micro-batch is a list of the indices of its tokens in the step. What other readings of the step share, such as those
with other settings of its loss, is computed once (`memo`).

Letters: T tokens of the step | t tokens of a micro-batch, at least 1 | N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.check.memo import Memo
from workbench.check.reading import Reading
from workbench.dumps.step import LOGPROBS, StepDump
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.reduction.evaluate import loss_inputs
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.rollouts.targets import TrainingRow


def micro_batches(dump: StepDump) -> list[Tensor]:
    """[t] indices of the tokens of each micro-batch of a step, document by document; none where it is empty."""
    rows_N = dump.documents.get("rows")
    if rows_N is None:
        return [torch.arange(len(dump.document_ids_T))]
    rows_T = rows_N[dump.document_ids_T]
    sizes = torch.bincount(rows_T, minlength=dump.size("dp") * dump.size("micro_batches"))
    return list(torch.argsort(rows_T, stable=True).split(sizes.tolist()))


@dataclass(frozen=True)
class Sample:
    """Micro-batches with a token of a sample: (number, which of its tokens, [t] indices of these)."""

    rows: list[tuple[int, Tensor, Tensor]]
    indices: list[Tensor]


def sample_micro_batches(indices: list[Tensor], sample_T: Tensor, memo: Memo) -> Sample:
    """The part of each micro-batch that is in a sample ([T] bool), without those that have no token in it."""

    def of_rows() -> Sample:
        kept = [(number, sample_T[index_T], index_T[sample_T[index_T]]) for number, index_T in enumerate(indices)]
        rows = [one for one in kept if len(one[2])]
        return Sample(rows, [index_T for _, _, index_T in rows])

    return memo.get("sample", (indices, sample_T), None, of_rows)


def sampled_weights(by_name: Mapping[str, TokenWeights], keep_T: Tensor) -> dict[str, TokenWeights]:
    """Weights of the tokens of a micro-batch that are kept ([t] bool), from those of all its tokens."""
    return {
        name: TokenWeights(_chosen(weights.loss_T[: len(keep_T)], keep_T), _chosen(weights.gradient_T, keep_T))
        for name, weights in by_name.items()
    }


def _at(dump: StepDump, name: str, index_T: Tensor, memo: Memo) -> Tensor | None:
    """[t] values of a micro-batch, 0 where nothing trains; one padding token if it is empty."""
    value_T, mask_T = dump.tokens.get(name), dump.loss_mask_T
    if value_T is None:
        return None

    def of_row() -> Tensor:
        return torch.where(_chosen(mask_T, index_T), _chosen(value_T, index_T), 0.0)

    return memo.get(f"trained {name}", (value_T, mask_T, index_T), None, of_row)


def _spread(value_N: Tensor, document_ids_T: Tensor, index_T: Tensor) -> Tensor:
    return value_N[document_ids_T[index_T]] if len(index_T) else value_N.new_zeros(1)


def _spread_kept(
    memo: Memo, name: str, value_N: Tensor | None, document_ids_T: Tensor, index_T: Tensor
) -> Tensor | None:
    if value_N is None:
        return None
    tensors = (document_ids_T, index_T, value_N)
    return memo.get(f"spread {name}", tensors, None, lambda: _spread(value_N, document_ids_T, index_T))


def _places(index_T: Tensor) -> Tensor:
    return index_T if len(index_T) else index_T.new_zeros(1)


def _chosen(values_T: Tensor, index_T: Tensor, fill: float = 0) -> Tensor:
    return values_T[index_T] if len(index_T) else values_T.new_full((1,), fill)


def _policy(reading: Reading, index_T: Tensor, shift: float, memo: Memo) -> Tensor:
    name = "policy_logprobs" if "policy_logprobs" in reading.dump.tokens else "old_logprobs"
    policy_T = _at(reading.dump, name, index_T, memo)
    assert policy_T is not None, "can_evaluate"
    return (policy_T + shift).detach()


def training_rows(reading: Reading, indices: list[Tensor], shift: float, memo: Memo) -> list[TrainingRow]:
    """Data of each micro-batch; shared by all readings with the same values, such as other settings of the loss."""
    dump = reading.dump
    values = (dump.tokens.get(name) for name in ("loss_mask", "advantages", *LOGPROBS, "correction_weights"))
    of_documents = (dump.documents.get(name) for name in ("rewards", "group_ids", "advantages"))
    given = reading.spec.correction.ratio.startswith("given")
    return memo.get(
        "training rows",
        (indices, dump.document_ids_T, *values, *of_documents),
        (shift, given),
        lambda: [_row(reading, index_T, shift, memo) for index_T in indices],
    )


def inputs_with_leaves(
    reading: Reading,
    indices: list[Tensor],
    rows: list[TrainingRow],
    totals: StepTotals,
    shift: float,
    memo: Memo,
    *,
    by_entropy: bool,
) -> list[tuple[LossInputs, LossInputs]]:
    """Inputs of each micro-batch, the policy's log-probabilities a leaf; and the same without gradient."""
    dump = reading.dump

    def of_rows() -> list[tuple[LossInputs, LossInputs]]:
        pairs = []
        for row, index_T in zip(rows, indices, strict=True):
            entropy_T = _at(dump, "entropies", index_T, memo)
            if by_entropy and entropy_T is not None:
                entropy_T = entropy_T.detach().requires_grad_()
            head_output = TokenLogprobs(_policy(reading, index_T, shift, memo), entropy_T, None)
            detached = loss_inputs(row, head_output, totals)
            leaf_T = detached.policy_logprobs_T.detach().requires_grad_()
            pairs.append((replace(detached, policy_logprobs_T=leaf_T), detached))
        return pairs

    values = (dump.tokens.get("policy_logprobs"), dump.tokens.get("old_logprobs"), dump.tokens.get("entropies"))
    return memo.get("inputs", (rows, totals, *values), (shift, by_entropy), of_rows)


def _row(reading: Reading, index_T: Tensor, shift: float, memo: Memo) -> TrainingRow:
    dump = reading.dump
    of_documents = {name: dump.documents.get(name) for name in ("rewards", "group_ids")}
    places = (dump.document_ids_T, index_T)
    ids_T = memo.get("ids", places, None, lambda: _numbered(dump.document_ids_T, index_T))
    mask_T = _chosen(dump.loss_mask_T, index_T)
    lengths_T = memo.get("lengths", (*places, dump.loss_mask_T), None, lambda: _lengths(dump, ids_T, mask_T))
    spread = {name: _spread_kept(memo, name, value_N, *places) for name, value_N in of_documents.items()}
    given_T = dump.advantages_T
    assert given_T is not None, "can_evaluate"
    advantages_T = torch.where(mask_T, _chosen(given_T, index_T), 0.0)
    old_T, sampler_T = _at(dump, "old_logprobs", index_T, memo), _at(dump, "sampler_logprobs", index_T, memo)
    weights_T = _at(dump, "correction_weights", index_T, memo)
    given = reading.spec.correction.ratio.startswith("given") and weights_T is not None
    zeros_T = torch.zeros_like(ids_T)
    return TrainingRow(
        tokens_T=zeros_T,
        positions_T=zeros_T,
        document_ids_T=ids_T,
        targets_T=zeros_T,
        loss_mask_T=mask_T,
        advantages_T=advantages_T,
        old_logprobs_T=_policy(reading, index_T, 0.0, memo) if old_T is None else old_T,
        sampler_logprobs_T=None if sampler_T is None else sampler_T - shift,
        ref_logprobs_T=_at(dump, "ref_logprobs", index_T, memo),
        source_T=_places(index_T),
        lengths_T=lengths_T,
        rewards_T=spread["rewards"],
        group_ids_T=spread["group_ids"],
        extensions={CORRECTION_WEIGHTS: weights_T} if given and weights_T is not None else {},
    )


def _numbered(document_ids_T: Tensor, index_T: Tensor) -> Tensor:
    """[t] documents of a micro-batch, 0, 1, ... in order; -1 on the one padding token if it is empty."""
    ids_T = _chosen(document_ids_T, index_T, fill=-1)
    return ids_T.unique_consecutive(return_inverse=True)[1] if len(index_T) else ids_T


def _lengths(dump: StepDump, ids_T: Tensor, mask_T: Tensor) -> Tensor:
    """[t] trained tokens of the token's document, at least 1."""
    trained_N = torch.bincount(ids_T[mask_T], minlength=dump.num_documents)
    return trained_N[ids_T.clamp_min(0)].clamp_min(1).double()
