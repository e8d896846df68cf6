"""Corrections for tokens that the sampler and the trainer rate differently: a detached weight and a verdict a token.

Engines that sample and engines that train disagree about the same token. With mu = old - sampler, the log of how
much likelier the token is for the trainer, a correction multiplies the policy term by a weight made of mu, or takes
the token out. Nothing here carries a gradient.

    weight   e^x, x = mu | mean of mu over a segment or a document | sum of mu over a document
             bounded (truncated or zeroed outside), perhaps divided by its mean
    gate     keep while low <= s <= high, s = the ratio, k1, k2 or k3 of a token, or their mean, sum or maximum over
             its document (the ratio's in logs)
    opsm     reject A < 0 where the document's mean of (anchor - policy) is above a threshold
    m2       reject the tokens with the greatest mu^2 until the mean of mu^2 over the others is at most a threshold

All but opsm depend on data alone, so they can be evaluated on whole rows before anything is split: that is how
survivors are counted and how statistics of the whole step are found. Everything is computed in float64, so that a
verdict does not depend on the precision of the run.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.spec import CorrectionSpec
from workbench.losses.terms import LossInputs, Term
from workbench.rollouts.targets import TrainingRow

MEAN_WEIGHT = "correction/mean_weight"
"""Statistic of the step: mean of the bounded weights, for ``normalize``."""
M2_CUTOFF = "correction/m2_cutoff"
"""Statistic of the step: greatest mu^2 that is kept, for ``m2_threshold``; -inf if none is."""


@dataclass(frozen=True)
class Correction:
    """What a correction does to each token. Detached; where nothing counts: raw weight 1, weight 0, not kept.

    Attributes:
        weights_T: [T] what the policy term is multiplied with; 0 where the token is rejected.
        raw_weights_T: [T] the weight before bounds, division and gates.
        kept_T: [T] bool, the token is trained and not rejected.
        truncated_T: [T] bool, a bound changed the weight of a kept token.
    """

    weights_T: Tensor
    raw_weights_T: Tensor
    kept_T: Tensor
    truncated_T: Tensor


def correct(inputs: LossInputs, spec: CorrectionSpec) -> Correction:
    """Weight of each token, and whether it is kept.

    Formula:  ``w = bounded(e^x) / mean * [kept]``, see the head of this module for x and the verdicts.
    Shapes:   inputs of T tokens -> four of [T]; weights in the dtype of the policy's log-probabilities.
    Backward: none, through any input.
    Raises:   SpecError: no sampler log-probabilities, or statistics of the step that were not handed in.
    Source:   TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025);
              IcePop: Ling team, "Every step evolves", arXiv 2510.18855; sequence weights and rejection: Liu et al.,
              "When speed kills stability" (2025), and verl; geometric gate: NeMo-RL "seq-mask-tis"; opsm:
              DeepSeek-V3.2, arXiv 2512.02556, section 3.1; m2: M2PO, arXiv 2510.01161, with the old policy in place
              of the live one, as AReaL computes it; segments: ROLL.
    """
    with torch.no_grad():
        raw_T, bounded_T, kept_T = _bounded_weights(inputs, spec)
        if spec.normalize:
            bounded_T = bounded_T / _statistic(inputs, spec, MEAN_WEIGHT)
        if spec.gate != "none":
            kept_T = kept_T & _through_gate(inputs, spec)
        if spec.opsm_threshold is not None:
            gap_T = inputs.logprobs(spec.opsm_anchor).double() - inputs.policy_logprobs_T.detach().double()
            far_T = inputs.document_mean(gap_T) > spec.opsm_threshold
            kept_T = kept_T & ~((inputs.advantages_T < 0) & far_T)
        if spec.m2_threshold is not None:
            kept_T = kept_T & (_mismatch(inputs).square() <= _statistic(inputs, spec, M2_CUTOFF))
        dtype = inputs.policy_logprobs_T.dtype
        return Correction(torch.where(kept_T, bounded_T, 0.0).to(dtype), raw_T.to(dtype), kept_T,
                          kept_T & _outside(raw_T, spec))


def apply_correction(term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
    """Multiply a policy term by the correction; metrics find both weights and the verdict in its extras.

    Formula:  ``w * lambda``; exactly 0 where w is 0, whatever lambda is there.
    Backward: w to the term's values, 0 to everything else.
    """
    if not spec.acts:
        return term
    found = correct(inputs, spec)
    silent_T = found.weights_T == 0
    values_T = torch.where(silent_T, 0.0, term.values_T) * found.weights_T
    return replace(term, values_T=values_T, extras={
        **term.extras, "raw_weight": found.raw_weights_T, "applied_weight": found.weights_T, "kept": found.kept_T,
        "truncated": found.truncated_T})


# ---- before the step is split ------------------------------------------------------------------------------------


def whole_row(row: TrainingRow, statistics: Mapping[str, float] | None = None) -> LossInputs:
    """The data of a whole row as inputs of a correction, before there is a live policy.

    Give the row in the precision of the run (`TrainingRow.to`): a value that is rounded later may fall on the other
    side of a bound.
    """
    return LossInputs(row.old_logprobs_T, row.old_logprobs_T, row.advantages_T, row.sampler_logprobs_T,
                      loss_mask_T=row.loss_mask_T, document_ids_T=row.document_ids_T, statistics=statistics or {})


def step_statistics(rows: Sequence[LossInputs], spec: CorrectionSpec) -> dict[str, float]:
    """Numbers of the whole optimizer step that a correction needs, from all whole rows of all ranks.

    Formula:  mean weight: over trained tokens, or over documents with a trained token for a ratio of documents, of
              the bounded weights (zeroed ones count). Cutoff of m2: the greatest v such that the mean of all
              mu^2 <= v is at most the threshold; equal ones are kept or rejected together.
    Returns:  what `LossInputs.statistics` takes; empty if the spec needs none.
    """
    return _statistics(rows, spec) if spec.needs_step_statistics else {}


def survivors(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    """[T] bool: trained tokens of a whole row that the correction keeps, for a denominator that counts survivors.

    Raises:
        SpecError: the correction looks at the live policy (opsm), which is not known before the forward pass.
    """
    if spec.opsm_threshold is not None:
        raise SpecError("survivors of a correction with opsm_threshold", found="it looks at the live policy",
                        rule="survivors are counted on the whole step, before any forward pass",
                        fix='use denominator "original" with opsm')
    return correct(inputs, spec).kept_T


def _statistics(rows: Sequence[LossInputs], spec: CorrectionSpec) -> dict[str, float]:
    found = {}
    with torch.no_grad():
        if spec.normalize:
            total, count = 0.0, 0.0
            for inputs in rows:
                # A document of L tokens is one document: each of its tokens is 1 / L of it.
                share_T = torch.ones_like(inputs.policy_logprobs_T, dtype=torch.float64)
                if spec.ratio in ("document_mean", "document_sum"):
                    share_T = share_T / inputs.document_lengths_T
                share_T = torch.where(inputs.counts_T, share_T, 0.0)
                total += float((share_T * _bounded_weights(inputs, spec)[1]).sum())
                count += float(share_T.sum())
            # Nothing trained, or every weight 0: there is nothing to scale.
            found[MEAN_WEIGHT] = total / count if total > 0 else 1.0
        if spec.m2_threshold is not None:
            squares = torch.cat([_mismatch(inputs)[inputs.counts_T].square().cpu() for inputs in rows]).sort().values
            means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
            # Of equal squares the last one's mean decides, and with it all of them.
            last = torch.ones_like(squares, dtype=torch.bool)
            last[:-1] = squares[1:] > squares[:-1]
            kept = squares[last & (means <= spec.m2_threshold)]
            found[M2_CUTOFF] = float(kept[-1]) if len(kept) else float("-inf")
    return found


def _statistic(inputs: LossInputs, spec: CorrectionSpec, name: str) -> float:
    if spec.population == "micro_batch":
        return _statistics([inputs], spec)[name]
    if name not in inputs.statistics:
        raise SpecError(f"a correction that looks at the whole step ({name})", found="no such statistic in the inputs",
                        rule="it is found on all rows of the step before they are split",
                        fix="pass LossInputs(statistics=step_statistics(rows, spec)), or choose population "
                            "micro_batch, which makes the loss depend on how a step is cut")
    return inputs.statistics[name]


# ---- parts -------------------------------------------------------------------------------------------------------


def _mismatch(inputs: LossInputs) -> Tensor:
    """[T] float64 mu = old - sampler; anything where nothing counts."""
    return inputs.old_logprobs_T.double() - inputs.logprobs("sampler").double()


def _bounded_weights(inputs: LossInputs, spec: CorrectionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Raw weights, bounded weights, and whether the token is trained and inside bounds that reject."""
    if spec.ratio == "none":
        ones_T = torch.ones_like(inputs.old_logprobs_T, dtype=torch.float64)
        return ones_T, ones_T, inputs.counts_T
    raw_T = torch.where(inputs.counts_T, _gathered(inputs, spec.ratio, _mismatch(inputs)), 0.0).exp()
    if spec.outside == "zero":
        inside_T = ~_outside(raw_T, spec)
        return raw_T, torch.where(inside_T, raw_T, 0.0), inputs.counts_T & inside_T
    bounded_T = raw_T
    if spec.ratio_low is not None or spec.ratio_high is not None:
        bounded_T = raw_T.clamp(spec.ratio_low, spec.ratio_high)
    return raw_T, bounded_T, inputs.counts_T


def _outside(raw_T: Tensor, spec: CorrectionSpec) -> Tensor:
    outside_T = torch.zeros_like(raw_T, dtype=torch.bool)
    if spec.ratio_low is not None:
        outside_T |= ~(raw_T >= spec.ratio_low)
    if spec.ratio_high is not None:
        outside_T |= ~(raw_T <= spec.ratio_high)
    return outside_T


def _gathered(inputs: LossInputs, level: str, values_T: Tensor) -> Tensor:
    """[T] a per-token value over the token's segment or document."""
    if level == "document_sum":
        return inputs.document_sums.document(values_T)
    if level == "document_mean":
        return inputs.document_mean(values_T)
    if level == "segment_mean":
        count_T = inputs.document_sums.segment(torch.ones_like(values_T))
        return inputs.document_sums.segment(values_T) / count_T.clamp_min(1)
    return values_T


def _through_gate(inputs: LossInputs, spec: CorrectionSpec) -> Tensor:
    mu_T = _mismatch(inputs)
    low, high = spec.gate_low, spec.gate_high
    values_T = {"ratio": mu_T, "k1": -mu_T, "k2": 0.5 * mu_T.square(), "k3": mu_T.expm1() - mu_T}[spec.gate]
    if spec.gate_level == "document_max":
        # A greatest value needs no maximum over ranks: it is at most `high` if no token is above it, and at least
        # `low` if some token is.
        values_T = values_T.exp() if spec.gate == "ratio" else values_T
        kept_T = torch.ones_like(inputs.counts_T)
        if high is not None:
            kept_T &= inputs.document_sums.document((~(values_T <= high)).double()) == 0
        if low is not None:
            kept_T &= inputs.document_sums.document((values_T >= low).double()) > 0
        return kept_T
    values_T = _gathered(inputs, spec.gate_level, values_T)
    values_T = values_T.exp() if spec.gate == "ratio" else values_T
    kept_T = torch.ones_like(inputs.counts_T)
    if high is not None:
        kept_T &= values_T <= high
    if low is not None:
        kept_T &= values_T >= low
    return kept_T
