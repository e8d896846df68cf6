"""Align a loss with the ranks that compute it, in an external trainer.

    align = workbench.align_loss(cp=mesh["cp"], dp=mesh["dp"], engine="mean")      # once
    ratios = align.sequence_ratios(logprobs, old_logprobs, mask)                   # documents straddle cp ranks
    align.masked_mean(-ratios * advantages, mask).backward()                       # the mean over all ranks' tokens

Every rank calls the same functions in the same order, also a rank on which nothing counts: it adds 0 and its gradients
are 0. Results are global values, the same on every rank, to be reported and back-propagated without further scaling;
the engine's gradient reduction (sum or mean over ranks) is handled inside (`adjoints`). tp ranks hold the same tokens
and do not count. Values carry a gradient on all ranks or on none: a rank without tokens runs the model too.

Letters: t tokens of this rank, in any shape (unpacked rows [b, t], or a packed row [t]) | N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.losses.kl import kl_estimate
from workbench.parallel_loss.adjoints import EngineFactor, engine_factor, global_to_local, local_to_global
from workbench.parallel_loss.policy_loss import (
    StepCounts,
    check_inputs_used,
    check_spec,
    document_sums,
    local_policy_loss,
)
from workbench.parallel_loss.rows import ContextParallelRows, context_parallel_rows
from workbench.parallel_loss.statistics import AdvantageStatistics, KlStatistics, largest, mean_and_std, summed
from workbench.sharding.mesh import Axis, GivenGroup, GivenMesh, Mesh, axes_of, axis_of, ranks_of
from workbench.specs.losses import LossSpec

Engine = Literal["sum", "mean"]


def align_loss(
    mesh: GivenMesh | None = None,
    *,
    cp: GivenGroup | None = None,
    dp: GivenGroup | Sequence[GivenGroup] | None = None,
    engine: Engine,
) -> Alignment:
    """Declare which ranks share a loss, and how the engine reduces gradients after backward. No collective.

    tp ranks compute the same loss, and of a pipeline the ranks of the last stage alone compute it: neither counts, and
    the groups are those of the last stage. ep ranks are some of dp x cp; see `Alignment.expert_factor`.

    Args:
        mesh: a workbench mesh, or a device mesh with dimensions "cp" and "dp" (or "dp_..."); instead of cp and dp.
        cp: the ranks that share rows: a process group, a one-dimensional device mesh or a workbench axis; None: none.
        dp: the ranks that hold other rows; several groups if data parallelism has several dimensions. None: none, and
            every number covers this rank's rows alone; an engine that averages over dp ranks averages it, one that
            sums sums it.
        engine: "sum" if gradients are summed over these ranks, "mean" if they are averaged (the default of DDP and of
            FSDP2).

    Raises:
        ShardingError: groups that this rank is not in, meshes with unknown dimension names.
        SpecError: another engine; both a mesh and groups.
    """
    if engine not in ("sum", "mean"):
        raise SpecError(
            f"align_loss: engine = {engine!r}",
            rule='"sum" or "mean"',
            fix="name how the engine reduces gradients over ranks; DDP and FSDP2 average by default",
        )
    if mesh is not None:
        if cp is not None or dp is not None:
            raise SpecError(
                "align_loss",
                found="both a mesh and groups",
                rule="one of them defines the ranks",
                fix="pass the mesh, or cp and dp",
            )
        context, data = axes_of(mesh)
    else:
        several = dp if isinstance(dp, Sequence) else () if dp is None else (dp,)
        context, data = axis_of(cp, "cp"), tuple(axis_of(group, "dp") for group in several)
    return Alignment(context, data, engine)


@dataclass(frozen=True)
class Alignment:
    """Sums, means, ratios and statistics over the ranks of a trainer (`align_loss`), with the gradients it needs."""

    cp: Axis
    dp: tuple[Axis, ...]
    engine: Engine

    @property
    def factor(self) -> EngineFactor:
        """Gradient factor between global values and a rank's tokens, with its reason."""
        axes = {"dp": Axis("dp", ranks_of(self.dp)), "cp": self.cp}
        return engine_factor(Mesh(axes, torch.device("cpu")), self.engine)

    def expert_factor(self, ep: int) -> float:
        """Factor of gradients of experts over ``ep`` of the ranks, behind the engine's reduction over their replicas.

        An expert has tokens of all ranks that share the experts, so its gradient is a sum over ep ranks before the
        engine reduces it over the dp cp / ep ranks with the same experts. A mean over these is ep times too large
        beside dense parameters, whose mean is over all dp cp.

        Formula: 1 / ep under "mean", 1 under "sum".
        Raises:  SpecError: ep does not divide the ranks.
        Source:  NVIDIA/Megatron-LM#5956.
        """
        ranks = ranks_of((self.cp, *self.dp))
        if ep < 1 or ranks % ep:
            raise SpecError(
                f"align_loss(...).expert_factor({ep})",
                found=f"{ranks} rank(s) of dp x cp",
                rule="ep divides dp x cp: experts are shared by some of the ranks that have other tokens",
                fix="give the number of ranks that share one set of experts",
            )
        return 1.0 if self.engine == "sum" else 1 / ep

    def __repr__(self) -> str:
        return f"Alignment({self.factor!r})"

    # -- sums and means ----------------------------------------------------------------------------------------

    def masked_sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sum of the counted values on all ranks.

        Formula:  sum_r sum_t m_t x_t, accumulated in float64
        Shapes:   values and mask in one shape -> scalar, float32 or the wider dtype of the values.
        Backward: 1 on values that count (times `factor`), exactly 0 on others, whatever they are.
        """
        return self._whole(_masked_sum(values, mask)[None])[0].to(_wide(values))

    def masked_mean(self, values: Tensor, mask: Tensor, *, count: Tensor | float | None = None) -> Tensor:
        """Mean of the counted values on all ranks; 0 if nothing counts.

        Formula:  sum_r sum_t m_t x_t / max(n, 1), n = sum_r sum_t m_t
        Shapes:   values and mask in one shape -> scalar. One collective per axis.
        Backward: 1 / max(n, 1) on values that count (times `factor`); none into n.

        With ``count``, n of the whole optimizer step from `count`, the result is this micro-batch's share of the mean.
        """
        if count is not None:
            n = torch.as_tensor(count, device=values.device).double().clamp_min(1)
            return (self._whole(_masked_sum(values, mask)[None])[0] / n).to(_wide(values))
        both = self._whole(torch.stack([_masked_sum(values, mask), mask.sum().double()]))
        return (both[0] / both[1].detach().clamp_min(1)).to(_wide(values))

    def count(self, *masks: Tensor) -> Tensor:
        """Number of counted values on all ranks, of one mask or of all micro-batches of a step. int64, data."""
        for mask in masks:
            check_values(mask, mask)
        own = torch.stack([mask.sum() for mask in masks]).sum()
        return summed(own, (self.cp, *self.dp))

    def to_tokens(self, whole: Tensor) -> Tensor:
        """Use a global value (a mean, a statistic of the policy) in computations on this rank's tokens.

        Not needed for values that are combined with other global values only.

        Backward: the sum of the gradients from the tokens of all ranks.
        """
        return global_to_local(whole, (self.cp, *self.dp), self.factor)

    # -- documents ---------------------------------------------------------------------------------------------

    def document_sums(
        self, values: Tensor, mask: Tensor, *, documents: Tensor | None = None, num_documents: int | None = None
    ) -> Tensor:
        """Sum over the counted tokens of each token's own document, on all cp ranks.

        Shapes:   [t] or [b, t] -> the same, one number on all tokens of a document; 0 where nothing counts.
        Backward: the gradients of the sum from the tokens of all cp ranks, on each token that counts; either engine.

        ``documents`` are ids in the shape of the values, 0 to num_documents - 1 over the whole rows, below 0 on
        padding; None: each row of [b, t] is a document. ``num_documents`` counts them on all cp ranks; None: from their
        maximum, in one more collective.
        """
        check_values(values, mask)
        return document_sums(mask, documents, num_documents, self.cp).document(values.reshape(-1)).view(mask.shape)

    def sequence_ratios(
        self,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        mask: Tensor,
        *,
        documents: Tensor | None = None,
        num_documents: int | None = None,
    ) -> Tensor:
        """Geometric mean of policy / old over a document, on each of its tokens.

        Formula:  s_d = exp((1 / L_d) sum_t m_t (policy_t - old_t)), L_d the tokens of the document that count
        Shapes:   as `document_sums`; 1 on documents in which nothing counts.
        Backward: to the policy's log-probabilities on all cp ranks; one collective forward, one backward.
        Source:   GSPO, arXiv 2507.18071, equation 7.
        """
        check_values(policy_logprobs, mask, old_logprobs)
        sums = document_sums(mask, documents, num_documents, self.cp)
        log_ratios_t = torch.where(mask, policy_logprobs - old_logprobs, 0.0).reshape(-1)
        sums_N, lengths_N = sums.totals(log_ratios_t, torch.ones_like(log_ratios_t))
        return sums.on_tokens((sums_N / lengths_N.detach().clamp_min(1)).exp()).view(mask.shape)

    def step_counts(
        self, masks: Sequence[Tensor], *, documents: Sequence[Tensor] | None = None, num_documents: int | None = None
    ) -> StepCounts:
        """Tokens and documents of an optimizer step, for the losses of its micro-batches.

        Masks are those of all micro-batches of this rank, and every rank has as many; ``documents`` are their ids, and
        ``num_documents`` the maximum over micro-batches, as in `document_sums`.
        """
        ids_of_masks: Sequence[Tensor | None] = documents or [None] * len(masks)
        by_mask = zip(masks, ids_of_masks, strict=True)
        return self._counted([self._documents_of(mask, ids, num_documents)[1] for mask, ids in by_mask])

    def row_counts(self, masks: Sequence[Tensor]) -> StepCounts:
        """`step_counts` from masks of whole rows, [B, T], the same on all cp ranks: the first token never counts."""
        for mask in masks:
            check_values(mask, mask)
        return self._counted([mask[:, 1:].sum(dim=1).double() for mask in masks])

    # -- statistics --------------------------------------------------------------------------------------------

    def kl_statistics(
        self,
        policy_logprobs: Tensor,
        other_logprobs: Tensor,
        mask: Tensor,
        *,
        estimator: str = "k3",
        documents: Tensor | None = None,
        num_documents: int | None = None,
    ) -> KlStatistics:
        """KL statistics between the policy and another one, from the tokens of all ranks.

        Formula:  `workbench.losses.kl.kl_estimate` of d = other - policy
        Units:    nats.
        Backward: of the two means, as `masked_mean`; the largest is data.
        """
        check_values(policy_logprobs, mask, other_logprobs)
        counts = self.step_counts(
            [mask], documents=None if documents is None else [documents], num_documents=num_documents
        )
        estimates = kl_estimate(torch.where(mask, other_logprobs - policy_logprobs, 0.0), estimator)
        total = self.masked_sum(estimates, mask)
        return KlStatistics(
            total / counts.tokens.clamp_min(1),
            total / counts.documents.clamp_min(1),
            largest(estimates, mask, (self.cp, *self.dp)),
            counts.tokens,
            counts.documents,
        )

    def advantage_statistics(
        self,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        of: Literal["tokens", "documents"] = "tokens",
        correction: int = 0,
    ) -> AdvantageStatistics:
        """Mean and standard deviation of advantages over all ranks.

        Advantages are of the tokens of this rank, or of the documents of its rows, which are the same on all cp ranks
        and counted once. ``correction`` is 0 for the deviation of a population, 1 for that of a sample.

        Backward: none.
        """
        if of not in ("tokens", "documents"):
            raise SpecError(
                f"advantage_statistics: of = {of!r}",
                rule='"tokens" or "documents"',
                fix="choose tokens if cp ranks split the values, documents if all hold the same",
            )
        mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask
        check_values(advantages, mask)
        axes = (self.cp, *self.dp) if of == "tokens" else self.dp
        return mean_and_std(advantages, mask, axes, correction=correction)

    # -- losses ------------------------------------------------------------------------------------------------

    def policy_loss(
        self,
        loss: LossSpec | str = "grpo",
        *,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref_logprobs: Tensor | None = None,
        sampler_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        rewards: Tensor | None = None,
        documents: Tensor | None = None,
        num_documents: int | None = None,
        counts: StepCounts | None = None,
    ) -> Tensor:
        """Compute a policy loss of the workbench over the tokens of all ranks.

        All inputs are aligned with the target's log-probability: nothing is shifted here. ``loss`` is a spec, or the
        name of a preset; reference log-probabilities are for a KL penalty, the sampler's for a correction. Documents
        are given as in `document_sums`. ``counts`` are those of the whole step, from `step_counts`, if this is one of
        several micro-batches.

        Formula:  sum over terms and tokens of weight * value; the weight from ``loss.denominator``, counted over all
                  ranks
        Shapes:   [t] or [b, t] each, the mask bool, rewards those of each token's document -> scalar, the same on
                  every rank.
        Units:    log-probabilities and entropy in nats.
        Backward: to ``policy_logprobs`` (and ``entropy``), as the engine needs it.
        Raises:   SpecError: a spec that needs more than counts of the step; a tensor that none of its terms uses.
        """
        spec = LossSpec(name=loss) if isinstance(loss, str) else loss
        check_spec(spec)
        given = {
            "policy_logprobs": policy_logprobs,
            "old_logprobs": old_logprobs,
            "advantages": advantages,
            "ref_logprobs": ref_logprobs,
            "sampler_logprobs": sampler_logprobs,
            "entropy": entropy,
            "rewards": rewards,
        }
        check_values(policy_logprobs, mask, *(value for value in given.values() if value is not None))
        check_inputs_used(spec, given)
        sums, lengths_N = self._documents_of(mask, documents, num_documents)
        if counts is None:
            counts = self._counted([lengths_N])
        flat = {name: value.reshape(-1) for name, value in given.items() if value is not None}
        return self._whole(local_policy_loss(spec, flat, sums, lengths_N, counts))

    def torch_context_parallel(self, **rows: Any) -> AbstractContextManager[ContextParallelRows]:
        """`workbench.parallel_loss.rows.context_parallel_rows` of this alignment, with the same arguments."""
        return context_parallel_rows(self, **rows)

    # -- inside ------------------------------------------------------------------------------------------------

    def _whole(self, local: Tensor) -> Tensor:
        return local_to_global(local, (self.cp, *self.dp), self.factor)

    def _documents_of(self, mask: Tensor, ids: Tensor | None, count: int | None) -> tuple[DocumentSums, Tensor]:
        """Sums over documents, and [N] the number of counted tokens of each, on all cp ranks."""
        check_values(mask, mask)
        sums = document_sums(mask, ids, count, self.cp)
        with torch.no_grad():
            return sums, sums.totals(torch.ones_like(sums.loss_mask_T, dtype=torch.float64))[0]

    def _counted(self, lengths: Sequence[Tensor]) -> StepCounts:
        """Sum over dp only: the cp ranks hold the same document lengths."""
        lengths_N = torch.cat(list(lengths))
        tokens, documents = summed(torch.stack([lengths_N.sum(), (lengths_N > 0).sum().double()]), self.dp).long()
        return StepCounts(tokens, documents)


def check_values(values: Tensor, mask: Tensor, *others: Tensor) -> None:
    """Raise if the mask is not bool or shapes differ."""
    if mask.dtype is not torch.bool:
        raise ShapeError("a loss mask", found=f"dtype {mask.dtype}", rule="bool", fix="compare with 0: mask != 0")
    if wrong := [tuple(other.shape) for other in (mask, *others) if other.shape != values.shape]:
        raise ShapeError(
            "tensors of one rank's tokens",
            found=f"shapes {', '.join(map(str, wrong))} next to {tuple(values.shape)}",
            rule="one value for each token, and a mask of the same shape",
            fix="expand values that tokens share",
        )


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    check_values(values, mask)
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64)


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
