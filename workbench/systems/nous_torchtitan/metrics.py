"""Metrics of the GRPO step of NousResearch/torchtitan, by its definitions. See `workbench.systems.metrics`.

They are of one micro-batch of whole rows, some of them over positions that do not train: `step_metrics` returns all of
them, as one function of the step's inputs. A row without a token makes means over rows NaN there, and here. `names` has
those that a step of any layout can report, because they are means over tokens that train; `LEFT_OUT` has the others.
Read from NousResearch/torchtitan's GRPO code (94d6abd4).

Letters: T packed tokens | B rows | V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.losses.kl import kl_estimate
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.quantities import KL, Advantage, ClipRule, Column, Extra, LogProb, LogRatio, Ratio
from workbench.metrics.values import Maximum, Mean, Minimum
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import Alias, Derived, PeerSettings, is_outside, token_metric

ELSEWHERE = "it reads positions that do not train, or logits; a replay of the step reports it"
LEFT_OUT: Mapping[str, str] = dict.fromkeys(
    (
        "loss_metrics/global_logit_loss",
        "loss_metrics/global_entropy_loss",
        "loss_metrics/global_logits_mean",
        "loss_metrics/global_total_pos",
        "loss_metrics/global_total_neg",
        "loss_metrics/global_pos_logp",
        "loss_metrics/global_neg_logp",
        "loss_metrics/global_pos_reward",
        "loss_metrics/global_neg_reward",
        "loss_metrics/global_advantages",
        "loss_metrics/pos_margin",
        "loss_metrics/neg_margin",
        "loss_metrics/pos_ref_logp",
        "loss_metrics/neg_ref_logp",
        "loss_metrics/logits_mean_ref",
        "loss_metrics/global_offp_logp",
        "loss_metrics/global_offp_ref_logp",
        "logp_dist/threshold_filter_ratio",
        "mismatch/inf_logratio",
        "mismatch/rollout_is_masked_fraction",
        "mismatch/rollout_is_seq_masked_fraction",
    ),
    ELSEWHERE,
) | {
    "loss_metrics/global_logp": "NaN there if a row has no token that trains; here such rows are left out",
    "loss_metrics/global_ratio": "NaN there if a row has no token that trains; here such rows are left out",
    "raw_ratio": "reported there only without an old policy, and then it is the mean of 1",
}
"""Name -> what the system reports there in some case, and what is reported here instead."""


@dataclass(frozen=True)
class Step:
    """Inputs and terms of the step, on every position, trained or not: in ``inputs`` all of them count."""

    spec: LossSpec
    inputs: LossInputs
    terms: dict[str, Term]
    ratio_T: Tensor
    """[T] the surrogate's ratio, before any clip."""
    loss_mask_T: Tensor
    document_ids_T: Tensor
    sampler_logprobs_T: Tensor | None
    """[T] nats as given, with placeholders."""
    mean_logit_T: Tensor
    """[T] mean over the vocabulary of the logits."""
    kl_estimator: str = "k3"
    """Of the KL, which is measured even if it is not in the loss."""
    on_policy: bool = False
    """The old policy is the live one."""
    logprob_floor: float | None = None
    """Positions with a lower log-probability of the policy are left out of most numbers; None: none."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield means over tokens that train, and over rows that have one; without a threshold of probability."""

    def of_rows(name: str, meaning: str, unit: str, column: Column, same: str) -> Alias:
        meaning, note = f"mean over rows of the row's mean {meaning}", "rows without trained tokens are left out"
        return token_metric(
            f"loss_metrics/{name}", meaning, unit, column, Mean(), "document", canonical=same, note=note
        )

    yield of_rows("global_logp", "log-probability", "nats", LogProb("policy"), "logprob/policy/document_mean")
    if not s.of_documents:
        ratio, same = Ratio("policy", "old"), "ratio/policy_old/document_mean"
        yield of_rows("global_ratio", "ratio policy / old", "1", ratio, same)
    yield from _distribution("logp_dist", "policy")
    yield from _distribution("inflogp_dist", "sampler")
    meaning, applied = "mean of the correction weights as applied", Extra("applied_weight")
    yield token_metric("inflogp_dist/importance_ratio", meaning, "1", applied, canonical="weight/applied/mean")
    meaning = "mean log-probability under the reference"
    yield token_metric("loss_metrics/ref_logp", meaning, "nats", LogProb("ref"), canonical="logprob/ref/mean")
    margin = Derived(torch.mul, (Advantage(), LogRatio("policy", "ref")))
    yield token_metric("loss_metrics/margin", "mean of the advantage times policy - reference", "nats", margin)
    if s.kl_estimator != "squared":  # a penalty that it does not have
        yield token_metric(
            "loss_metrics/kl_div_est",
            f"mean {s.kl_estimator} estimate of KL(policy || ref)",
            "nats",
            KL(s.kl_estimator, "policy", "ref"),
            canonical="kl/policy_ref/k3_mean" if s.kl_estimator == "k3" else None,
            note="also if it is not in the loss",
        )
    if s.clip is not None and not s.clip.of_documents:
        for ending, signs, condition in (
            ("", (1, -1), ""),
            ("_pos", (1,), ", with a positive advantage"),
            ("_neg", (-1,), ", with an advantage that is not positive"),
        ):
            yield token_metric(
                f"loss_metrics/global_clip_ratio{ending}",
                f"share of tokens beyond the bound that the advantage's sign picks{condition}",
                "1",
                Derived(functools.partial(_is_cut, signs, s.clip), (Ratio("policy", "old"), Advantage())),
                note="an advantage of 0 counts as a negative one",
            )


def _distribution(name: str, model: Literal["policy", "sampler"]) -> Iterable[Alias]:
    quantity, column = f"log-probability under the {model}", LogProb(model)
    yield token_metric(f"{name}/mean", f"mean {quantity}", "nats", column, canonical=f"logprob/{model}/mean")
    yield token_metric(f"{name}/min", f"smallest {quantity}", "nats", column, Minimum())
    yield token_metric(f"{name}/max", f"largest {quantity}", "nats", column, Maximum())


def _is_cut(signs: tuple[int, ...], clip: ClipRule, ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """[T] 1 where the ratio is above the upper bound with a positive advantage, or below the lower without one."""
    pos_T, beyond_T = advantages_T > 0, torch.zeros_like(advantages_T, dtype=torch.bool)
    if 1 in signs:
        beyond_T |= (ratio_T > clip.upper) & pos_T
    if -1 in signs:
        beyond_T |= (ratio_T < clip.lower) & ~pos_T
    return beyond_T.double()


def mean_logit(logits_TV: Tensor) -> Tensor:
    """[T] mean over the vocabulary of the logits, detached."""
    return logits_TV.detach().double().mean(-1)


def step_metrics(step: Step) -> dict[str, float]:
    """Return every metric of the step, by its name there."""
    with torch.no_grad():
        return {**_policy(step), **_reference(step), **_clip(step), **_sampler(step)}


def _policy(step: Step) -> dict[str, float]:
    logprobs_T, advantages_T, trained_T = step.inputs.policy_logprobs_T, step.inputs.advantages_T, step.loss_mask_T
    above_T, pos_T, neg_T = _above(step), advantages_T > 0, advantages_T <= 0
    scale = {name: term.coefficient * term.values_T for name, term in step.terms.items()}
    nothing_T = torch.zeros_like(logprobs_T)
    return {
        "loss_metrics/global_logp": _over_rows(logprobs_T, trained_T, step),
        "loss_metrics/global_ratio": _over_rows(step.ratio_T, above_T, step),
        "loss_metrics/global_logit_loss": _over_rows(scale.get("logit_size", nothing_T), above_T, step),
        "loss_metrics/global_entropy_loss": _over_rows(scale.get("entropy", nothing_T), above_T, step),
        "loss_metrics/global_logits_mean": _mean(step.mean_logit_T, above_T),
        "loss_metrics/global_total_pos": float(pos_T.sum() > 1),
        "loss_metrics/global_total_neg": float(neg_T.sum() > 1),
        "loss_metrics/global_pos_logp": _number_over_rows(_of_many(logprobs_T, pos_T & above_T), step),
        "loss_metrics/global_neg_logp": _number_over_rows(_of_many(logprobs_T, neg_T & above_T), step),
        "loss_metrics/global_pos_reward": float(pos_T.double().mean()),
        "loss_metrics/global_neg_reward": float(neg_T.double().mean()),
        "loss_metrics/global_advantages": float(advantages_T.mean()),
        **_spread("logp_dist", logprobs_T, step),
        "logp_dist/threshold_filter_ratio": 1.0 - _mean(above_T.double(), trained_T),
    }


def _reference(step: Step) -> dict[str, float]:
    ref_T, logprobs_T = step.inputs.ref_logprobs_T, step.inputs.policy_logprobs_T
    if ref_T is None:
        return {}
    above_T, advantages_T = _above(step), step.inputs.advantages_T
    pos_T, neg_T = (advantages_T > 0) & above_T, (advantages_T <= 0) & above_T
    margin_T = advantages_T * (logprobs_T - ref_T)
    return {
        "loss_metrics/ref_logp": _mean(ref_T, step.loss_mask_T),
        "loss_metrics/margin": _mean(margin_T, above_T),
        "loss_metrics/pos_margin": _of_many(margin_T, pos_T),
        "loss_metrics/neg_margin": _of_many(margin_T, neg_T),
        "loss_metrics/pos_ref_logp": _of_many(ref_T, pos_T),
        "loss_metrics/neg_ref_logp": _of_many(ref_T, neg_T),
        "loss_metrics/logits_mean_ref": 0.0,
        "loss_metrics/kl_div_est": _mean(kl_estimate(ref_T - logprobs_T, step.kl_estimator), above_T),
    }


def _clip(step: Step) -> dict[str, float]:
    above_T, pos_T = _above(step), step.inputs.advantages_T > 0
    if step.on_policy:
        return {"raw_ratio": _mean(step.ratio_T, above_T)}
    surrogate, ref_T = step.spec.surrogate, step.inputs.ref_logprobs_T
    assert surrogate.kind in ("ppo", "gspo"), "the step clips ratios of tokens or of rows"
    # An advantage of 0 counts as a negative one.
    low_T, high_T = (step.ratio_T < 1 - surrogate.clip_low) & ~pos_T, (step.ratio_T > 1 + surrogate.clip_high) & pos_T
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
    above_T, extras = _above(step), step.terms["policy"].extras
    weights_T = extras.get("applied_weight", torch.ones_like(sampler_T))
    metrics = {**_spread("inflogp_dist", sampler_T, step), "inflogp_dist/importance_ratio": _mean(weights_T, above_T)}
    if not correction.acts:
        return metrics
    drawn_T = above_T & (sampler_T <= 0)
    gaps = step.inputs.old_logprobs_T - sampler_T
    if correction.ratio != "token":
        gaps = _by_row(gaps, drawn_T, step)
        if correction.ratio != "document_sum":
            gaps = gaps / _by_row(drawn_T.double(), drawn_T, step)
    metrics["mismatch/inf_logratio"] = float(gaps.mean())
    if correction.outside == "zero":
        raw_T = extras["raw_weight"]
        out_T = is_outside(correction.ratio_low, correction.ratio_high, raw_T).bool() & drawn_T
        rows_B = _by_row(out_T.double(), drawn_T, step) > 0
        metrics["mismatch/rollout_is_masked_fraction"] = _mean(out_T.double(), drawn_T)
        metrics["mismatch/rollout_is_seq_masked_fraction"] = float(rows_B.double().mean())
    return metrics


# ---- means -----------------------------------------------------------------------------------------------------


def _above(step: Step) -> Tensor:
    """[T] positions that train and are above the floor."""
    if step.logprob_floor is None:
        return step.loss_mask_T
    return step.loss_mask_T & (step.inputs.policy_logprobs_T >= step.logprob_floor)


def _mean(values_T: Tensor, mask_T: Tensor) -> float:
    return float(values_T[mask_T].mean())  # NaN of nothing


def _of_many(values_T: Tensor, mask_T: Tensor) -> float:
    """Return the mean of more than one value, else 0."""
    return _mean(values_T, mask_T) if int(mask_T.sum()) > 1 else 0.0


def _by_row(values_T: Tensor, mask_T: Tensor, step: Step) -> Tensor:
    rows = int(step.document_ids_T.max()) + 1
    return values_T.new_zeros(rows).index_add(0, step.document_ids_T, torch.where(mask_T, values_T, 0.0))


def _over_rows(values_T: Tensor, mask_T: Tensor, step: Step) -> float:
    """Return the mean over rows of the row's mean; NaN if a row has none."""
    return float((_by_row(values_T, mask_T, step) / _by_row(mask_T.double(), mask_T, step)).mean())


def _number_over_rows(value: float, step: Step) -> float:
    """Return the number, or NaN if a row does not train."""
    trained_B = _by_row(step.loss_mask_T.double(), step.loss_mask_T, step)
    return value if bool((trained_B > 0).all()) else math.nan


def _spread(name: str, values_T: Tensor, step: Step) -> dict[str, float]:
    trained_T = values_T[step.loss_mask_T] if _above(step).any() else values_T.new_zeros(1)
    return {f"{name}/{reduce}": float(getattr(trained_T, reduce)()) for reduce in ("mean", "min", "max")}
