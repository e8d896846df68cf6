"""Inputs and named per-token terms of a policy loss.

A loss is a sum over tokens and terms, ``sum_k sum_t w_kt * coefficient_k * values_k[t]``. This layer computes
the values; the weights are data that `workbench.reduction` computes on the whole optimizer step. Losses know no
ranks, no model and no files, so one written in a notebook cell is the same kind of object as these. Sums over a
document whose tokens lie on several ranks come from `LossInputs.document_sums`.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.shapes import check_shapes

HEAD_OUTPUTS = ("entropy_T", "logsumexp_T", "mean_squared_logit_T", "mean_logit_T")
"""Fields of `LossInputs` that the output head computes besides the log-probability; each has a gradient."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a per-token loss, each value aligned with its token.

    Half-precision tensors are lifted to float32 (gradients come back in their own precision): bfloat16 counts no
    document beyond 256 tokens, and rounds a clip bound of 1.0004 to 1.

    Attributes:
        policy_logprobs_T: [T] nats, of the policy being trained; the only one with a gradient.
        old_logprobs_T: [T] nats, of the policy at the start of the update.
        advantages_T: [T] reward units.
        sampler_logprobs_T: [T] nats, as the sampler saw them, or None.
        ref_logprobs_T: [T] nats, of the frozen reference, or None.
        entropy_T: [T] nats, of the policy's distribution, or None.
        frozen_clip_T: [T] bool, clip decisions taken elsewhere (True: the clipped branch), or None to decide
            here. Needed to compare precisions: a flipped decision is an O(1) change of one token.
        loss_mask_T: [T] bool, the token counts; None: all do.
        document_ids_T: [T] long, document of the token in this row; None: one document.
        rewards_T: [T] the reward of the token's document, or None.
        group_ids_T: [T] long, the prompt group of the token's document, or None.
        lengths_T: [T] float, trained tokens of the token's whole document (over all ranks); None: counted with
            `document_sums`.
        logsumexp_T: [T] nats, log normaliser of the policy's logits, or None.
        mean_squared_logit_T: [T] mean over the vocabulary of the policy's squared logits, or None.
        mean_logit_T: [T] mean over the vocabulary of the policy's logits, or None.
        source_T: [T] long, index of the token in the source batch, the same in every layout; None: its index in
            this row.
        correction_weights_T: [T] sampler corrections that were computed elsewhere, or None.
        staleness_T: [T] long, optimizer steps by which the weights that sampled the token are older than those of the
            first update on it, or None.
        support_mass_T: [T] the policy's probability of each token's truncated support, if log-probabilities are over
            these; else None.
        outside_support_T: [T] bool, the token is not in the support that the sampler's settings give for the policy's
            own distribution; or None. For metrics alone.
        support_size_T: [T] tokens of the support that was recorded; or None. For metrics alone.
        length_epsilon: added to a document's length where a mean over it is taken (`document_mean`).
        sums: sums over documents that may straddle ranks; None: every token is local.
        statistics: numbers of the whole optimizer step, computed before it was split, by name; see
            `workbench.losses.corrections.step_statistics`.
    """

    policy_logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    sampler_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    frozen_clip_T: Tensor | None = None
    loss_mask_T: Tensor | None = None
    document_ids_T: Tensor | None = None
    rewards_T: Tensor | None = None
    group_ids_T: Tensor | None = None
    lengths_T: Tensor | None = None
    logsumexp_T: Tensor | None = None
    mean_squared_logit_T: Tensor | None = None
    mean_logit_T: Tensor | None = None
    source_T: Tensor | None = None
    correction_weights_T: Tensor | None = None
    staleness_T: Tensor | None = None
    support_mass_T: Tensor | None = None
    outside_support_T: Tensor | None = None
    support_size_T: Tensor | None = None
    length_epsilon: float = 0.0
    sums: DocumentSums | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = {name: value for name, value in self.__dict__.items() if value is not None and name.endswith("_T")}
        check_shapes("LossInputs", **tensors)
        for name in ("loss_mask_T", "frozen_clip_T"):
            mask_T = getattr(self, name)
            if mask_T is not None and mask_T.dtype is not torch.bool:
                raise ShapeError(
                    f"LossInputs: {name}",
                    found=f"dtype {mask_T.dtype}",
                    rule="a mask is bool",
                    fix=f"pass {name}.bool()",
                )
        for name, value in tensors.items():
            if value.is_floating_point() and value.element_size() < 4:
                object.__setattr__(self, name, value.float())

    def rounded(self, dtype: torch.dtype) -> LossInputs:
        """Return these inputs with the values of tokens, which are not counts, rounded to a dtype."""
        names = ("policy_logprobs_T", "old_logprobs_T", "advantages_T", "sampler_logprobs_T", "ref_logprobs_T")
        values = {name: getattr(self, name) for name in (*names, *HEAD_OUTPUTS)}
        return replace(self, **{name: v.to(dtype).to(v.dtype) for name, v in values.items() if v is not None})

    @cached_property
    def counts_T(self) -> Tensor:
        """[T] bool: the token counts."""
        if self.loss_mask_T is not None:
            return self.loss_mask_T
        return torch.ones_like(self.policy_logprobs_T, dtype=torch.bool)

    @cached_property
    def document_sums(self) -> DocumentSums:
        """Sums over the token's own document: `sums`, or local ones if it is None."""
        if self.sums is not None:
            return self.sums
        ids_T = self.document_ids_T
        if ids_T is None:
            ids_T = torch.zeros_like(self.counts_T, dtype=torch.long)
        return DocumentSums(ids_T, self.counts_T, self.group_ids_T, self.rewards_T)

    @cached_property
    def document_lengths_T(self) -> Tensor:
        """[T] trained tokens of the token's whole document, at least 1: a divisor. Data, in the policy's dtype."""
        if self.lengths_T is not None:
            return self.lengths_T.to(self.policy_logprobs_T.dtype).clamp_min(1)
        ones_T = torch.ones_like(self.policy_logprobs_T, requires_grad=False)
        return self.document_sums.document(ones_T).clamp_min(1)

    def document_mean(self, values_T: Tensor) -> Tensor:
        """[T] mean over the trained tokens of the token's own document, over all ranks, on each of its tokens.

        Formula:  sum / (length + length_epsilon)
        Backward: 1 / length of the sum of the cotangents of the document's tokens, on its trained tokens.
        """
        lengths_T = self.document_lengths_T
        return self.document_sums.document(values_T) / (
            lengths_T + self.length_epsilon if self.length_epsilon else lengths_T
        )

    def mean_over(self, level: str, values_T: Tensor) -> Tensor:
        """[T] values ("token"), or their means over the token's "document" or "segment" (unbroken trained tokens)."""
        if level == "token":
            return values_T
        if level == "document":
            return self.document_mean(values_T)
        lengths_T = self.document_sums.segment(self.counts_T.to(values_T.dtype))
        return self.document_sums.segment(values_T) / lengths_T.clamp_min(1)

    def counting(self, mask_T: Tensor) -> LossInputs:
        """Return the inputs with other tokens that count; documents stay whole."""
        sums = self.document_sums
        return replace(self, loss_mask_T=mask_T, lengths_T=sums.document(mask_T.double()), sums=sums)

    @property
    def counted_logprobs_T(self) -> Tensor:
        """[T] of the policy; 0, without gradient, where nothing counts (also if NaN)."""
        return self._counted(self.policy_logprobs_T)

    @property
    def counted_advantages_T(self) -> Tensor:
        """[T] advantages; 0 where nothing counts. A NaN there would reach a gradient through a document's sum."""
        return self._counted(self.advantages_T)

    def log_ratio(self, anchor: str = "old") -> Tensor:
        """[T] log of policy / anchor, "old", "sampler" or "ref"; 0, without gradient, where nothing counts (NaN too).

        Raises:
            SpecError: the batch has no log-probabilities of that policy.
        """
        return self._counted(self.policy_logprobs_T - self.logprobs(anchor))

    def _counted(self, values_T: Tensor) -> Tensor:
        """Values; 0, without gradient, where nothing counts. `torch.where` with a number launches two kernels."""
        return values_T if self.loss_mask_T is None else values_T.masked_fill(self._ignored_T, 0.0)

    @cached_property
    def _ignored_T(self) -> Tensor:
        return ~self.counts_T

    @property
    def ages_T(self) -> Tensor:
        """[T] long `staleness_T`; a SpecError if the batch has none."""
        if self.staleness_T is None:
            raise SpecError(
                "a loss that uses the age of the weights that sampled a token",
                found="no staleness",
                rule="it needs the version of the weights that sampled every token",
                fix="record versions with the rollouts (`workbench.rollouts.versions`), or choose another loss",
            )
        return self.staleness_T

    def logprobs(self, policy: str) -> Tensor:
        """[T] log-probabilities of "old", "sampler" or "ref"; a SpecError if the batch has none."""
        values_T = getattr(self, f"{policy}_logprobs_T")
        if values_T is None:
            raise SpecError(
                f"a loss that uses the {policy} policy",
                found=f"no {policy}_logprobs",
                rule=f"it needs the {policy} policy's log-probability of every token",
                fix="record them with the rollouts, or choose another loss",
            )
        return values_T


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Attributes:
        values_T: [T] per-token values, to be minimised. May be anything (also NaN) on tokens that do not count.
        coefficient: multiplies the term.
        clipped_T: [T] bool, tokens whose gradient this term clipped to 0; None if it never does.
        weight: the weights of the step for the term's sum. "policy": those of the spec's denominator; "penalty": the
            same, but always of all trained tokens, also if the correction counts survivors. Or another denominator
            by name: "token", "document", "raw", ...; "positive_token" is 1 / trained tokens of the step that belong
            to a document with a reward above 0.
        silent_T: [T] bool, unclipped tokens without gradient; None: those whose advantage is 0, which is right for a
            term that is proportional to the token's advantage.
        extras: detached [T] tensors for metrics, by name ("raw_weight", "applied_weight", "kept", "truncated").
    """

    values_T: Tensor
    coefficient: float = 1.0
    clipped_T: Tensor | None = None
    weight: str = "policy"
    silent_T: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossInputs], dict[str, Term]]
"""A policy loss: inputs to named terms."""


def clamped(values_T: Tensor, bound: float | None) -> Tensor:
    """[T] values clamped to +-bound, without gradient beyond; unchanged if None."""
    return values_T if bound is None else values_T.clamp(-bound, bound)
