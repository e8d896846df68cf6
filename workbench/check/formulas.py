"""Mistakes in a loss's formula that no setting expresses, each from the right loss and its inputs.

Letters: T tokens. x log-probability of the policy, r ratio, A advantage, mu = old - sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from workbench.check.reading import Reading, Wrong
from workbench.dumps.step import StepDump
from workbench.losses.build import build_loss
from workbench.losses.corrections import apply_correction
from workbench.losses.kl import kl_estimate
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.specs.losses import CorrectionSpec, KLSpec, LossSpec

_ON_RATIOS = ("ppo", "gspo", "gspo_token", "luspo", "importance_sampling", "cispo")
"""Surrogates of a ratio of policy and anchor."""


def wrong_formulas(reading: Reading) -> Iterator[tuple[str, str, Wrong]]:
    """Yield (kind, description, the wrong loss) of the mistakes that a step's loss can have."""
    spec, tokens = reading.spec, reading.dump.tokens
    if spec.surrogate.kind in _ON_RATIOS:
        yield "estimator", "the ratio is old / policy, not policy / old", _of_policy(_reversed_ratio)
        yield "estimator", "the ratio of a document is the sum of its tokens' logs, not their mean", _summed_ratio
        yield "rounded", "the ratio is computed in bfloat16", _of_policy(_rounded_ratio)
        yield "estimator", "advantages enter by their size alone: |A|", _of_policy(_absolute)
        for other in ("sampler", "ref", "policy"):
            if f"{other}_logprobs" in tokens and spec.surrogate.ratio_anchor == "old":
                text = f"{other}_logprobs in the place of old_logprobs in the ratio, and only there"
                yield "stale", text, _anchored(other)
        if "token_mask" in tokens and spec.surrogate.ratio_level == "document":
            text = "the ratio of a document is the mean over all its tokens, a tool's too"
            yield "mask", text, _longer_mean(reading.dump)
    for by, neighbour in ((1, "the token before"), (-1, "the token after")):
        yield "shift", f"policy_logprobs of {neighbour}", _neighbour(by)
    if spec.surrogate.kind in ("ppo", "gspo", "gspo_token"):
        yield "clip", "the larger of both surrogates is taken, not the smaller: the clip is optimistic", _optimistic
        yield "clip", "the clipped surrogate is taken on every token, not the smaller of both", _always_clipped
    yield "mask", "tokens with negative advantages do not train", _only_signed(1)
    yield "mask", "tokens with positive advantages do not train", _only_signed(-1)
    if spec.correction.acts and "sampler_logprobs" in tokens:
        yield from _corrections(spec, ref="ref_logprobs" in tokens)
    if spec.kl.coefficient and spec.kl.placement == "loss":
        yield from _penalties()
    if (temperature := reading.dump.temperature) != 1:
        for factor, text in ((1 / temperature, "divided"), (temperature, "multiplied")):
            for others, name in ((False, "policy_logprobs"), (True, "policy_logprobs and old_logprobs")):
                sentence = f"{name} {text} by the temperature {temperature:g} inside the loss, and not the logits"
                yield "temperature", sentence, _tempered(factor, others=others)


def _of_policy(change: Callable[[LossInputs], LossInputs]) -> Wrong:
    """The policy term of other inputs; the penalties of the right ones."""

    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        terms = dict(loss(inputs))
        terms["policy"] = _corrected(_surrogate(change(inputs), spec), inputs, spec)
        return terms

    return wrong


def _surrogate(inputs: LossInputs, spec: LossSpec) -> Term:
    """The policy term before its correction."""
    return build_loss(spec.model_copy(update={"correction": CorrectionSpec(), "kl": KLSpec()}))(inputs)["policy"]


def _corrected(term: Term, inputs: LossInputs, spec: LossSpec) -> Term:
    return apply_correction(term, inputs, spec.correction)


# ---- surrogate -----------------------------------------------------------------------------------------------------


def _reversed_ratio(inputs: LossInputs) -> LossInputs:
    return replace(inputs, policy_logprobs_T=2 * inputs.old_logprobs_T - inputs.policy_logprobs_T)


def _rounded_ratio(inputs: LossInputs) -> LossInputs:
    log_T = inputs.log_ratio()
    rounded_T = log_T.exp().bfloat16().double().log()
    return replace(inputs, policy_logprobs_T=inputs.old_logprobs_T + log_T + (rounded_T - log_T).detach())


def _absolute(inputs: LossInputs) -> LossInputs:
    return replace(inputs, advantages_T=inputs.advantages_T.abs())


def _summed_ratio(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    if spec.surrogate.ratio_level == "token":
        mean_T = inputs.document_sums.document(inputs.log_ratio())
        return _of_policy(lambda own: replace(own, policy_logprobs_T=own.old_logprobs_T + mean_T))(loss, inputs, spec)
    long_T = inputs.log_ratio() * inputs.document_lengths_T
    return _of_policy(lambda own: replace(own, policy_logprobs_T=own.old_logprobs_T + long_T))(loss, inputs, spec)


def _anchored(other: str) -> Wrong:
    def change(inputs: LossInputs) -> LossInputs:
        own_T = inputs.policy_logprobs_T.detach() if other == "policy" else inputs.logprobs(other)
        return replace(inputs, old_logprobs_T=own_T)

    return _of_policy(change)


def _longer_mean(dump: StepDump) -> Wrong:
    number = dump.num_documents
    trained_N, all_N = (
        torch.bincount(dump.document_ids_T[dump.tokens[name]], minlength=number) for name in ("loss_mask", "token_mask")
    )
    shares_T = (trained_N.double() / all_N.clamp_min(1))[dump.document_ids_T]

    def change(inputs: LossInputs) -> LossInputs:
        source_T = inputs.source_T
        assert source_T is not None, "rows of a dump"
        short_T = inputs.log_ratio() * shares_T[source_T]
        return replace(inputs, policy_logprobs_T=inputs.old_logprobs_T + short_T)

    return _of_policy(change)


def _clip_free(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """[T] values of the surrogate without a clip, and of the clipped one, whatever the sign of the advantage."""
    log_T = inputs.mean_over(spec.surrogate.ratio_level, inputs.log_ratio(spec.surrogate.ratio_anchor))
    ratio_T, A_T = log_T.exp(), inputs.counted_advantages_T
    low, high = (float(spec.surrogate.model_dump()[name]) for name in ("clip_low", "clip_high"))
    return -ratio_T * A_T, -ratio_T.clamp(1 - low, 1 + high) * A_T


def _optimistic(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    free_T, clipped_T = _clip_free(inputs, spec)
    term = Term(torch.minimum(free_T, clipped_T), clipped_T=clipped_T < free_T)
    return {**loss(inputs), "policy": _corrected(term, inputs, spec)}


def _always_clipped(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    free_T, clipped_T = _clip_free(inputs, spec)
    term = Term(clipped_T, clipped_T=clipped_T != free_T)
    return {**loss(inputs), "policy": _corrected(term, inputs, spec)}


def _neighbour(by: int) -> Wrong:
    """The live policy of a neighbour, whose gradient reaches that neighbour; 0 at the end of a document."""

    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        ids_T = inputs.document_ids_T
        same_T = torch.ones_like(inputs.counts_T) if ids_T is None else ids_T.roll(by) == ids_T
        moved_T = torch.where(same_T, inputs.policy_logprobs_T.roll(by), 0.0)
        return loss(replace(inputs, policy_logprobs_T=moved_T))

    return wrong


def _only_signed(sign: int) -> Wrong:
    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        terms = dict(loss(inputs))
        kept_T = inputs.advantages_T * sign >= 0
        terms["policy"] = replace(terms["policy"], values_T=torch.where(kept_T, terms["policy"].values_T, 0.0))
        return terms

    return wrong


def _tempered(factor: float, *, others: bool) -> Wrong:
    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        old_T = inputs.old_logprobs_T * factor if others else inputs.old_logprobs_T
        return loss(replace(inputs, policy_logprobs_T=inputs.policy_logprobs_T * factor, old_logprobs_T=old_T))

    return wrong


# ---- correction ----------------------------------------------------------------------------------------------------


def _corrections(spec: LossSpec, *, ref: bool) -> Iterator[tuple[str, str, Wrong]]:
    """The weight from other policies, with a gradient, or on other terms."""
    pairs = [("policy", "sampler"), ("sampler", "old"), ("policy", "old"), ("old", "policy")]
    pairs += [("old", "ref"), ("ref", "sampler")] * ref
    for above, below in pairs:
        text = f"{above}_logprobs - {below}_logprobs, not old_logprobs - sampler_logprobs"
        if (above, below) == ("sampler", "old"):
            yield "correction", "the correction's weight is inverted: sampler / old", _weighted_by(above, below)
        elif "old" in (above, below) or "sampler" in (above, below):
            right = "old" if below == "sampler" else "sampler"
            wrong = above if below == "sampler" else below
            sentence = f"{wrong}_logprobs in the place of {right}_logprobs in the correction ({text})"
            yield "stale", sentence, _weighted_by(above, below)
    yield "correction", "the correction's weight carries a gradient: it is not detached", _attached
    if spec.kl.coefficient:
        yield "correction", "the correction's weight multiplies the KL penalty too", _penalty_corrected
    yield "correction", "the correction's weight is applied twice", _twice
    yield "correction", "the correction's weight is a document's mean of its tokens' weights", _mean_weight


def _weighted_by(above: str, below: str) -> Wrong:
    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        own = {"policy": inputs.policy_logprobs_T.detach()}
        values = {name: own[name] if name in own else inputs.logprobs(name) for name in (above, below)}
        other = replace(inputs, old_logprobs_T=values[above], sampler_logprobs_T=values[below])
        return {**loss(inputs), "policy": _corrected(_surrogate(inputs, spec), other, spec)}

    return wrong


def _attached(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    """The weight of the live policy: its value that of policy / sampler, with its gradient within the bounds."""
    other = replace(inputs, old_logprobs_T=inputs.policy_logprobs_T.detach())
    term = _corrected(_surrogate(inputs, spec), other, spec)
    if spec.correction.ratio != "token":
        return dict(loss(inputs))
    inside_T = ~term.extras["truncated"] & term.extras["kept"]
    x_T = inputs.policy_logprobs_T
    live_T = torch.where(inside_T, (x_T - x_T.detach()).exp(), 1.0)
    return {**loss(inputs), "policy": replace(term, values_T=term.values_T * live_T)}


def _weight(loss: Loss, inputs: LossInputs) -> Tensor:
    return loss(inputs)["policy"].extras["applied_weight"]


def _penalty_corrected(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    terms = dict(loss(inputs))
    return {**terms, "kl": replace(terms["kl"], values_T=terms["kl"].values_T * _weight(loss, inputs))}


def _twice(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    terms = dict(loss(inputs))
    return {**terms, "policy": replace(terms["policy"], values_T=terms["policy"].values_T * _weight(loss, inputs))}


def _mean_weight(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    mean_T = inputs.document_mean(_weight(loss, inputs))
    term = _surrogate(inputs, spec)
    return {**loss(inputs), "policy": replace(term, values_T=term.values_T * mean_T)}


# ---- penalty -------------------------------------------------------------------------------------------------------


def _penalties() -> Iterator[tuple[str, str, Wrong]]:
    yield "penalty", "the KL penalty has no gradient", _penalty_of(lambda term, inputs, spec: term.values_T.detach())
    yield "estimator", "the KL estimator's log ratio has the other sign: policy - ref, not ref - policy", _reversed_kl
    text = "the KL penalty is subtracted, not added"
    yield "penalty", text, _penalty_of(lambda term, inputs, spec: -term.values_T)
    for anchor in ("old", "sampler"):
        yield "stale", f"{anchor}_logprobs in the place of ref_logprobs in the KL penalty", _penalty_against(anchor)
    for bound in (10.0, 1.0):
        text = f"the KL estimate is clamped at {bound:g}"
        yield "penalty", text, _penalty_of(lambda term, inputs, spec, b=bound: term.values_T.clamp(-b, b))
    text = "the KL penalty is twice the estimate (no 1/2), or its coefficient is twice as large"
    yield "penalty", text, _penalty_of(lambda term, inputs, spec: 2 * term.values_T)


def _penalty_of(change: Callable[..., Tensor]) -> Wrong:
    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        terms = dict(loss(inputs))
        return {**terms, "kl": replace(terms["kl"], values_T=change(terms["kl"], inputs, spec))}

    return wrong


def _reversed_kl(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
    terms = dict(loss(inputs))
    values_T = kl_estimate(inputs.log_ratio(spec.kl.against), spec.kl.estimator)
    return {**terms, "kl": replace(terms["kl"], values_T=values_T)}


def _penalty_against(anchor: str) -> Wrong:
    def wrong(loss: Loss, inputs: LossInputs, spec: LossSpec) -> dict[str, Term]:
        against = spec.model_copy(update={"kl": spec.kl.model_copy(update={"against": anchor})})
        return {**loss(inputs), "kl": build_loss(against)(inputs)["kl"]}

    return wrong
