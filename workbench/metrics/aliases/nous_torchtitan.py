"""What the GRPO step of NousResearch/torchtitan reports, by its definitions. See the head of this package.

Its numbers are of one micro-batch of whole rows, some of them over positions that do not train, so they are one
function of what the step saw and no declarations: parts of them do not add up over ranks. A row without a token makes
means over rows NaN there, and here. Read from NousResearch/torchtitan's GRPO code (94d6abd4).

Letters: T packed tokens | B rows | V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.kl import kl_estimate
from workbench.losses.spec import LossSpec
from workbench.losses.terms import LossInputs, Term


@dataclass(frozen=True)
class Step:
    """What the step saw, on every position, trained or not.

    Attributes:
        spec: the loss's settings.
        inputs: of the loss, on every position (all of them count there).
        terms: of the loss, on every position.
        ratio_T: [T] the surrogate's ratio, before any clip.
        loss_mask_T: [T] bool, the position trains.
        document_ids_T: [T] row of the position.
        sampler_logprobs_T: [T] nats as they were given, placeholders too, or None.
        mean_logit_T: [T] mean over the vocabulary of the logits.
        kl_estimator: of the KL, which is measured whether or not it is in the loss.
        on_policy: there is no old policy but the live one.
        logprob_floor: positions at which the policy's log-probability is lower leave most numbers; None: none do.
    """

    spec: LossSpec
    inputs: LossInputs
    terms: dict[str, Term]
    ratio_T: Tensor
    loss_mask_T: Tensor
    document_ids_T: Tensor
    sampler_logprobs_T: Tensor | None
    mean_logit_T: Tensor
    kl_estimator: str = "k3"
    on_policy: bool = False
    logprob_floor: float | None = None


def mean_logit(logits_TV: Tensor) -> Tensor:
    """[T] mean over the vocabulary of the logits, detached."""
    return logits_TV.detach().double().mean(-1)


def step_metrics(step: Step) -> dict[str, float]:
    """Every number of the step, by its name there."""
    with torch.no_grad():
        return {**_policy(step), **_reference(step), **_clip(step), **_sampler(step)}


def _policy(step: Step) -> dict[str, float]:
    logprobs_T, advantages_T, trained_T = step.inputs.policy_logprobs_T, step.inputs.advantages_T, step.loss_mask_T
    above_T = _above(step)
    good_T, bad_T = advantages_T > 0, advantages_T <= 0
    scale = {name: term.coefficient * term.values_T for name, term in step.terms.items()}
    nothing_T = torch.zeros_like(logprobs_T)
    return {
        "loss_metrics/global_logp": _over_rows(logprobs_T, trained_T, step),
        "loss_metrics/global_ratio": _over_rows(step.ratio_T, above_T, step),
        "loss_metrics/global_logit_loss": _over_rows(scale.get("logit_size", nothing_T), above_T, step),
        "loss_metrics/global_entropy_loss": _over_rows(scale.get("entropy", nothing_T), above_T, step),
        "loss_metrics/global_logits_mean": _mean(step.mean_logit_T, above_T),
        "loss_metrics/global_total_pos": float(good_T.sum() > 1),
        "loss_metrics/global_total_neg": float(bad_T.sum() > 1),
        "loss_metrics/global_pos_logp": _number_over_rows(_of_many(logprobs_T, good_T & above_T), step),
        "loss_metrics/global_neg_logp": _number_over_rows(_of_many(logprobs_T, bad_T & above_T), step),
        "loss_metrics/global_pos_reward": float(good_T.double().mean()),
        "loss_metrics/global_neg_reward": float(bad_T.double().mean()),
        "loss_metrics/global_advantages": float(advantages_T.mean()),
        **_spread("logp_dist", logprobs_T, step),
        "logp_dist/threshold_filter_ratio": 1.0 - _mean(above_T.double(), trained_T),
    }


def _reference(step: Step) -> dict[str, float]:
    ref_T, logprobs_T = step.inputs.ref_logprobs_T, step.inputs.policy_logprobs_T
    if ref_T is None:
        return {}
    above_T, advantages_T = _above(step), step.inputs.advantages_T
    good_T, bad_T = (advantages_T > 0) & above_T, (advantages_T <= 0) & above_T
    margin_T = advantages_T * (logprobs_T - ref_T)
    return {
        "loss_metrics/ref_logp": _mean(ref_T, step.loss_mask_T),
        "loss_metrics/margin": _mean(margin_T, above_T),
        "loss_metrics/pos_margin": _of_many(margin_T, good_T), "loss_metrics/neg_margin": _of_many(margin_T, bad_T),
        "loss_metrics/pos_ref_logp": _of_many(ref_T, good_T), "loss_metrics/neg_ref_logp": _of_many(ref_T, bad_T),
        "loss_metrics/logits_mean_ref": 0.0,
        "loss_metrics/kl_div_est": _mean(kl_estimate(ref_T - logprobs_T, step.kl_estimator), above_T),
    }


def _clip(step: Step) -> dict[str, float]:
    above_T, good_T = _above(step), step.inputs.advantages_T > 0
    if step.on_policy:
        return {"raw_ratio": _mean(step.ratio_T, above_T)}
    surrogate, ref_T = step.spec.surrogate, step.inputs.ref_logprobs_T
    # An advantage of 0 counts as a negative one.
    low_T, high_T = (step.ratio_T < 1 - surrogate.clip_low) & ~good_T, (step.ratio_T > 1 + surrogate.clip_high) & good_T
    return {
        "loss_metrics/global_clip_ratio": _mean((low_T | high_T).double(), above_T),
        "loss_metrics/global_clip_ratio_pos": _mean(high_T.double(), above_T),
        "loss_metrics/global_clip_ratio_neg": _mean(low_T.double(), above_T),
        "loss_metrics/global_offp_logp": _mean(step.inputs.policy_logprobs_T, above_T),
        "loss_metrics/global_offp_ref_logp": 0.0 if ref_T is None else _mean(ref_T, above_T),
    }


def _sampler(step: Step) -> dict[str, float]:
    sampler_T, correction = step.sampler_logprobs_T, step.spec.correction
    if sampler_T is None:
        return {}
    above_T = _above(step)
    extras = step.terms["policy"].extras
    weights_T = extras.get("applied_weight", torch.ones_like(sampler_T))
    found = {**_spread("inflogp_dist", sampler_T, step), "inflogp_dist/importance_ratio": _mean(weights_T, above_T)}
    if not correction.acts:
        return found
    drawn_T = above_T & (sampler_T <= 0)
    gaps_T = step.inputs.old_logprobs_T - sampler_T
    if correction.ratio == "token":
        found["mismatch/inf_logratio"] = float(gaps_T.mean())
    else:
        sums_B = _by_row(gaps_T, drawn_T, step)
        gathered_B = sums_B if correction.ratio == "document_sum" else sums_B / _by_row(drawn_T.double(), drawn_T, step)
        found["mismatch/inf_logratio"] = float(gathered_B.mean())
    if correction.outside == "zero":
        raw_T = extras["raw_weight"]
        out_T = ((raw_T < correction.ratio_low) | (raw_T > correction.ratio_high)) & drawn_T
        rows_B = _by_row(out_T.double(), drawn_T, step) > 0
        found["mismatch/rollout_is_masked_fraction"] = _mean(out_T.double(), drawn_T)
        found["mismatch/rollout_is_seq_masked_fraction"] = float(rows_B.double().mean())
    return found


# ---- means -----------------------------------------------------------------------------------------------------


def _above(step: Step) -> Tensor:
    """[T] positions that train and are above the floor."""
    if step.logprob_floor is None:
        return step.loss_mask_T
    return step.loss_mask_T & (step.inputs.policy_logprobs_T >= step.logprob_floor)


def _mean(values_T: Tensor, mask_T: Tensor) -> float:
    return float(values_T[mask_T].mean())  # NaN of nothing


def _of_many(values_T: Tensor, mask_T: Tensor) -> float:
    """A mean of more than one value, else 0."""
    return _mean(values_T, mask_T) if int(mask_T.sum()) > 1 else 0.0


def _by_row(values_T: Tensor, mask_T: Tensor, step: Step) -> Tensor:
    rows = int(step.document_ids_T.max()) + 1
    return values_T.new_zeros(rows).index_add(0, step.document_ids_T, torch.where(mask_T, values_T, 0.0))


def _over_rows(values_T: Tensor, mask_T: Tensor, step: Step) -> float:
    """The mean over rows of the row's mean; NaN if a row has none."""
    return float((_by_row(values_T, mask_T, step) / _by_row(mask_T.double(), mask_T, step)).mean())


def _number_over_rows(value: float, step: Step) -> float:
    """A number, or NaN if a row does not train."""
    trained_B = _by_row(step.loss_mask_T.double(), step.loss_mask_T, step)
    return value if bool((trained_B > 0).all()) else math.nan


def _spread(name: str, values_T: Tensor, step: Step) -> dict[str, float]:
    if not bool(_above(step).any()):
        return {f"{name}/mean": 0.0, f"{name}/min": 0.0, f"{name}/max": 0.0}
    kept_T = values_T[step.loss_mask_T]
    return {f"{name}/mean": float(kept_T.mean()), f"{name}/min": float(kept_T.min()),
            f"{name}/max": float(kept_T.max())}
