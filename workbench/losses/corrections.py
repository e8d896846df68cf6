"""Corrections for the mismatch between sampler and trainer: a detached weight and a verdict per token.

Sampling and training engines disagree about the same token. With mu = old - sampler, the log of the ratio of the
trainer's probability to the sampler's, a correction multiplies the policy term by a weight made of mu, or rejects
the token. Nothing here carries a gradient.

    weight   e^x, x = mu | mean of mu over a segment or a document | sum of mu over a document
             bounded (truncated or zeroed outside), perhaps divided by its mean
    gate     keep while low <= s <= high, s = the ratio, k1, k2, k3 or binary KL of a token, or their mean, sum, maximum
             or minimum over its document (the ratio's in logs)
    opsm     reject A < 0 where the document's mean of (anchor - policy) is above a threshold
    age      reject tokens whose weights are more optimizer steps old than staleness_high
    m2       reject the tokens with the greatest mu^2 until the mean of mu^2 over the others is at most a threshold

All but opsm depend on data alone, so they can be evaluated on whole rows before anything is split: survivors and
statistics of the whole step are computed there. Everything is computed in float64, so that a verdict does not depend
on the precision of the run.

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.gates import gathered, through_gates, within
from workbench.losses.terms import LossInputs, Term, clamped
from workbench.rollouts.targets import TrainingRow
from workbench.rollouts.versions import STALENESS
from workbench.specs.losses import CorrectionSpec

CORRECTION_WEIGHTS = "correction_weights"
"""Token-level extension of a batch: sampler corrections that were computed elsewhere."""
MEAN_WEIGHT = "correction/mean_weight"
"""Statistic of the step: mean of the bounded weights, for ``normalize``."""
M2_CUTOFF = "correction/m2_cutoff"
"""Statistic of the step: greatest mu^2 that is kept, for ``m2_threshold``; -inf if none is."""
LOG_WEIGHT_BOUNDS = (math.log(1e-8), 20.0)
"""Bounds of the log of a weight that enters a sequence weight; those of huggingface/trl."""


@dataclass(frozen=True)
class Correction:
    """Effect of a correction on each token. Detached; where nothing counts: raw weight 1, weight 0, not kept.

    Attributes:
        weights_T: factor of the policy term; 0 where the token is rejected.
        raw_weights_T: the weight before bounds, division and gates.
        kept_T: bool, the token is trained and not rejected.
        truncated_T: bool, a bound changed the weight of a kept token.
        bounded_weights_T: the weight within its bounds, before division and gates.
        passed_T: bool, the token is trained and no gate rejects it, whatever its weight.
    """

    weights_T: Tensor
    raw_weights_T: Tensor
    kept_T: Tensor
    truncated_T: Tensor
    bounded_weights_T: Tensor
    passed_T: Tensor


def correct(inputs: LossInputs, spec: CorrectionSpec) -> Correction:
    """Weight of each token, and the verdict that keeps or rejects it.

    Formula:  ``w = bounded(e^x) / mean * [kept]``, see the module docstring for x and the verdicts.
    Shapes:   inputs of T tokens -> four of [T]; weights in the dtype of the policy's log-probabilities.
    Backward: none, through any input.
    Raises:   SpecError: no sampler log-probabilities, or statistics of the step that were not handed in.
    Source:   TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
              IcePop: Ling team, "Every step evolves", arXiv 2510.18855; sequence weights and rejection: Liu et al.,
              "When speed kills stability" (2025), and verl; geometric gate: NeMo-RL "seq-mask-tis"; opsm:
              DeepSeek-V3.2, arXiv 2512.02556, section 3.1; m2: M2PO, arXiv 2510.01161, with the old policy in place
              of the live one, as AReaL computes it; segments: ROLL; binary KL and truncation beyond a gate: AReaL
              cbff54d6; minimum over a document (veto) and tokens that were not sampled: NousResearch/torchtitan;
              age: slime's `mask_offpolicy_in_partial_rollout` is staleness_high 0.
    """
    with torch.no_grad():
        inputs = _sampled(inputs, spec)
        raw_T, within_T, kept_T = _bounded_weights(inputs, spec)
        bounded_T, open_T = within_T, inputs.counts_T
        if spec.enters == "sequence_weight":
            bounded_T, kept_T = torch.ones_like(within_T), inputs.counts_T
        if spec.normalize:
            bounded_T = bounded_T / _statistic(inputs, spec, MEAN_WEIGHT)
        truncated_T = ~within(raw_T, spec.ratio_low, spec.ratio_high)
        if spec.gate != "none":
            passed_T = through_gates(inputs, spec, _mismatch(inputs))
            if spec.gate_action == "reject":
                kept_T, open_T = kept_T & passed_T, open_T & passed_T
            else:
                truncated_T = truncated_T & ~passed_T
        if spec.opsm_threshold is not None:
            gap_T = inputs.logprobs(spec.opsm_anchor).double() - inputs.policy_logprobs_T.detach().double()
            if spec.unscored == "neutral":
                gap_T = gap_T.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            far_T = inputs.document_mean(torch.where(inputs.counts_T, gap_T, 0.0)) > spec.opsm_threshold
            kept_T = kept_T & ~((inputs.advantages_T < 0) & far_T)
        if spec.m2_threshold is not None:
            kept_T = kept_T & (_mismatch(inputs).square() <= _statistic(inputs, spec, M2_CUTOFF))
        if spec.staleness_high is not None:
            kept_T = kept_T & (inputs.ages_T <= spec.staleness_high)
        dtype = inputs.policy_logprobs_T.dtype
        return Correction(
            torch.where(kept_T, bounded_T, 0.0).to(dtype),
            raw_T.to(dtype),
            kept_T,
            kept_T & truncated_T,
            torch.where(inputs.counts_T, within_T, 0.0).to(dtype),
            open_T,
        )


def on_counted_tokens(weights_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Convert given weights, whose product over a row runs over all positions, to weights of the tokens that count.

    Formula:  exp of the row's sum of ``clip(log w, log 1e-8, 20)`` / its tokens that count, on each of these, else 1; a
              NaN is no weight
    Shapes:   [B, T], [B, T] bool -> [B, T] with the same products.
    Backward: none.
    Source:   VESPO in huggingface/trl adds logs over whole rows; its own weights are 1 where nothing counts.
    """
    log_BT = weights_BT.detach().double().log().clamp(*LOG_WEIGHT_BOUNDS)
    shares_B = torch.where(log_BT.isnan(), 0.0, log_BT).sum(1) / loss_mask_BT.sum(1).clamp_min(1)
    return torch.where(loss_mask_BT, shares_B[:, None].exp(), 1.0)


def log_document_weight(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    """Log of a document's correction, for a surrogate that includes it in its own sequence weight.

    Formula:  ``clip(log w, log 1e-8, 20)``, summed over the document's trained tokens; of a weight of documents (or of
              given ones, gathered over documents) once
    Shapes:   inputs of T tokens -> [T], the same on every token of a document. Bounds of the weight act before; gates,
              normalize and opsm do not.
    Backward: none.
    Source:   VESPO in huggingface/trl.
    """
    with torch.no_grad():
        log_T = correct(inputs, spec).bounded_weights_T.double().log().clamp(*LOG_WEIGHT_BOUNDS)
        if spec.ratio not in ("document_mean", "document_sum", "given_document_mean"):
            log_T = inputs.document_sums.document(log_T)
        return log_T.to(inputs.policy_logprobs_T.dtype)


def apply_correction(term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
    """Multiply a policy term by the correction; its extras hold both weights and the verdict for metrics.

    Formula:  ``w * lambda``; exactly 0 where w is 0, for any lambda. If the weight enters a sequence weight, w is the
              verdict alone.
    Backward: w to the term's values, 0 to everything else.
    """
    if not spec.acts:
        return term
    correction = correct(inputs, spec)
    silent_T = correction.weights_T == 0
    values_T = torch.where(silent_T, 0.0, term.values_T) * correction.weights_T
    return replace(
        term,
        values_T=values_T,
        extras={
            **term.extras,
            "raw_weight": correction.raw_weights_T,
            "applied_weight": correction.weights_T,
            "kept": correction.kept_T,
            "truncated": correction.truncated_T,
            "bounded_weight": correction.bounded_weights_T,
            "passed": correction.passed_T,
        },
    )


def whole_row(row: TrainingRow, statistics: Mapping[str, float] | None = None) -> LossInputs:
    """Build the inputs of a correction from the data of a whole row, before there is a live policy.

    Pass the row in the precision of the run (`TrainingRow.to`): a value that is rounded later may cross a bound.
    """
    return LossInputs(
        row.old_logprobs_T,
        row.old_logprobs_T,
        row.advantages_T,
        row.sampler_logprobs_T,
        loss_mask_T=row.loss_mask_T,
        document_ids_T=row.document_ids_T,
        statistics=statistics or {},
        correction_weights_T=row.extensions.get(CORRECTION_WEIGHTS),
        staleness_T=row.extensions.get(STALENESS),
    )


def step_statistics(rows: Sequence[LossInputs], spec: CorrectionSpec) -> dict[str, float]:
    """Return `LossInputs.statistics` that a correction needs, from all whole rows of all ranks in the step.

    Formula:  mean weight: over trained tokens, or over documents with a trained token for a ratio of documents, of
              the bounded weights (zeroed ones count). Cutoff of m2: the greatest v such that the mean of all
              mu^2 <= v is at most the threshold; equal ones are kept or rejected together.
    """
    return _statistics(rows, spec) if spec.needs_step_statistics else {}


def survivors(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    """[T] bool: trained tokens of a whole row that the correction keeps, for a denominator that counts survivors.

    With denominator "gated": those that its gates keep.

    Raises:
        SpecError: the correction looks at the live policy (opsm), which is not known before the forward pass.
    """
    if spec.opsm_threshold is not None and spec.denominator != "gated":
        raise SpecError(
            "survivors of a correction with opsm_threshold",
            found="opsm reads the live policy",
            rule="survivors are counted on the whole step, before any forward pass",
            fix='use denominator "original" with opsm',
        )
    correction = correct(inputs, spec)
    return correction.passed_T if spec.denominator == "gated" else correction.kept_T


def _statistics(rows: Sequence[LossInputs], spec: CorrectionSpec) -> dict[str, float]:
    statistics = {}
    with torch.no_grad():
        if spec.normalize:
            weights, shares, slack = [], [], 0.0
            for inputs in (_sampled(row, spec) for row in rows):
                # A document of L tokens is one document: each of its tokens is 1 / L of it.
                share_T = torch.ones_like(inputs.policy_logprobs_T, dtype=torch.float64)
                mean_T = share_T
                if spec.ratio in ("document_mean", "document_sum", "given_document_mean"):
                    share_T = share_T / inputs.document_lengths_T
                    mean_T = mean_T / (inputs.document_lengths_T + spec.mean_epsilon)
                else:
                    slack = spec.mean_epsilon
                weights += (mean_T * _bounded_weights(inputs, spec)[1])[inputs.counts_T].tolist()
                shares += share_T[inputs.counts_T].tolist()
            # fsum rounds once, so that the result does not depend on the split into rows or on padding.
            total, count = math.fsum(weights), math.fsum(shares)
            # No trained token, or every weight 0: there is nothing to scale.
            statistics[MEAN_WEIGHT] = total / (count + slack) if total > 0 else 1.0
        if spec.m2_threshold is not None:
            squares = torch.cat([_mismatch(inputs)[inputs.counts_T].square().cpu() for inputs in rows]).sort().values
            means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
            # Of equal squares the last one's mean decides, and with it all of them.
            last = torch.ones_like(squares, dtype=torch.bool)
            last[:-1] = squares[1:] > squares[:-1]
            kept = squares[last & (means <= spec.m2_threshold)]
            statistics[M2_CUTOFF] = float(kept[-1]) if len(kept) else float("-inf")
    return statistics


def _statistic(inputs: LossInputs, spec: CorrectionSpec, name: str) -> float:
    if spec.population == "micro_batch":
        return _statistics([inputs], spec)[name]
    if name not in inputs.statistics:
        raise SpecError(
            f"a correction that needs a statistic of the whole step ({name})",
            found="no such statistic in the inputs",
            rule="it is computed on all rows of the step before they are split",
            fix="pass LossInputs(statistics=step_statistics(rows, spec)), or choose population "
            "micro_batch, which makes the loss depend on the split of the step",
        )
    return inputs.statistics[name]


def _sampled(inputs: LossInputs, spec: CorrectionSpec) -> LossInputs:
    """Inputs in which tokens that the sampler did not draw do not count."""
    if spec.unsampled == "as_given":
        return inputs
    return inputs.counting(inputs.counts_T & (inputs.logprobs("sampler") <= 0))


def _mismatch(inputs: LossInputs) -> Tensor:
    """[T] float64 mu = old - sampler; anything where nothing counts."""
    return inputs.old_logprobs_T.double() - inputs.logprobs("sampler").double()


def _log_weight(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    """[T] float64 log weight of each token, before it is gathered; 0 where the sampler's log-probability is unknown."""
    if spec.ratio == "given_document_mean":
        return (_given(inputs) + spec.given_epsilon).log()
    mu_T = _mismatch(inputs)
    return torch.where(mu_T.isnan(), 0.0, mu_T) if spec.unscored == "neutral" else mu_T


def _bounded_weights(inputs: LossInputs, spec: CorrectionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Raw weights, bounded weights, and a mask of tokens that are trained and inside bounds that reject."""
    if spec.ratio == "none":
        ones_T = torch.ones_like(inputs.old_logprobs_T, dtype=torch.float64)
        return ones_T, ones_T, inputs.counts_T
    if spec.ratio == "given":
        raw_T = torch.where(inputs.counts_T, _given(inputs), 1.0)
    else:
        log_T = gathered(inputs, spec.ratio, _log_weight(inputs, spec))
        raw_T = clamped(torch.where(inputs.counts_T, log_T, 0.0), spec.log_clamp).exp()
    if spec.outside == "zero":
        inside_T = within(raw_T, spec.ratio_low, spec.ratio_high)
        return raw_T, torch.where(inside_T, raw_T, 0.0), inputs.counts_T & inside_T
    bounds = spec.ratio_low, spec.ratio_high
    bounded_T = raw_T if bounds == (None, None) else raw_T.clamp(*bounds)
    if spec.gate_action == "truncate":
        bounded_T = torch.where(through_gates(inputs, spec, _mismatch(inputs)), raw_T, bounded_T)
    return raw_T, bounded_T, inputs.counts_T


def _given(inputs: LossInputs) -> Tensor:
    """[T] float64 weights of the batch; anything where nothing counts."""
    if inputs.correction_weights_T is None:
        raise SpecError(
            "a correction by given weights",
            found="no correction_weights in the batch",
            rule="ratio: given multiplies by a weight that the batch has for each token",
            fix="add the extension to the batch, or choose a ratio that is computed here",
        )
    return inputs.correction_weights_T.double()
