"""Truncated supports in a batch: the tokens from which each token was sampled, and log-probabilities over them.

A sampler with top-k, top-p or min-p draws from q = softmax over the kept tokens. A trainer that renormalizes over the
same tokens, recorded with each sampled one, compares like with like: the ratio of unchanged weights is 1. Recomputing
the set from the trainer's logits does not replay it: rounding and updates move its border, and a token that falls out
has probability 0.

Source: the sampler's masks kept and applied to the policy in training: DeepSeek-V3.2, arXiv 2512.02556, section 3.1
        ("Keep Sampling Mask"); `log_prob_keep_mask`, THUDM/slime 624b824a. The bias without it: huggingface/trl#6789,
        #7269.

Letters: T packed tokens | K ids of the largest support | S tokens of the source batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.sampling import Quantity, Sampling

SUPPORT, MASS = "support_ids", "support_mass"
"""Extensions of a batch: [T, K] ids of each token's truncated support, and [T] the sampler's probability of it."""
NO_ID = -1
"""Fills the table behind the ids of a support; a token of this alone was sampled from the whole vocabulary."""
PER_TOKEN_TEMPERATURE = "temperature_T"


def with_support(
    batch: RolloutBatch,
    supports: Sequence[Sequence[int]] | Tensor,
    *,
    mass_T: Tensor | None = None,
    sampling: Sampling | None = None,
) -> RolloutBatch:
    """Return a batch with the truncated support of each token.

    Args:
        batch: of T tokens.
        supports: for each token, prompt tokens included, the ids from which it was sampled; an empty list: the whole
            vocabulary. Or a table [T, K] that is filled with `NO_ID`.
        mass_T: [T] the sampler's probability, after the temperature, of the whole support; 1 where not truncated. With
            it scaled and truncated log-probabilities of the sampler are converted into each other.
        sampling: settings of the sampler; None: those of the batch.

    Raises:
        ShapeError: not one set for each token, a trained token outside its own set, or a mass that is no probability.

    Example:
        >>> batch = RolloutBatch.from_documents([
        ...     {"tokens": [5, 7, 2], "loss_mask": [0, 1, 1], "advantages": 0.5, "old_logprobs": [0, -1.0, -0.3]}])
        >>> with_support(batch, [[], [6, 7], [2]]).extensions["support_ids"].values.tolist()
        [[-1, -1], [6, 7], [2, -1]]
    """
    if not isinstance(supports, Tensor):
        longest = max(map(len, supports), default=0)
        table = [[*ids, *[NO_ID] * (longest - len(ids))] for ids in supports]
        supports = torch.tensor(table, dtype=torch.int32).reshape(len(table), longest)
    meaning = "tokens from which the sampler drew the token"
    more = {SUPPORT: Extension(supports, "token", "vocabulary id", meaning, pad=NO_ID)}
    if mass_T is not None:
        meaning = "probability of the truncated support under the sampler, after the temperature"
        more[MASS] = Extension(mass_T, "token", "1", meaning, pad=1.0)
    batch = replace(batch, extensions={**batch.extensions, **more}, sampling=sampling or batch.sampling)
    check_supports(batch)
    return batch


def check_supports(batch: RolloutBatch) -> None:
    """Raise unless the supports of a batch are sets of ids, one for each token, each with its trained token.

    Raises:
        ShapeError: see above. A trained token outside its own set shows sets that belong to other tokens, such as those
            of an off-by-one.
    """
    extension, mass = batch.extensions.get(SUPPORT), batch.extensions.get(MASS)
    if extension is not None:
        ids_TK = extension.values
        if extension.level != "token" or extension.at != "target" or ids_TK.dim() != 2 or ids_TK.is_floating_point():
            found = f"{extension.level} values at the {extension.at}, {ids_TK.dtype} {list(ids_TK.shape)}"
            raise _broken(SUPPORT, found, "whole numbers [tokens, largest support], level token, at the target")
        if (ids_TK < NO_ID).any():
            raise _broken(SUPPORT, f"id {int(ids_TK.min())}", f"vocabulary ids, and {NO_ID} behind them")
        is_own_T = (ids_TK == batch.tokens_T[:, None]).any(dim=1) | (ids_TK == NO_ID).all(dim=1)
        outside_T = batch.loss_mask_T & ~is_own_T
        if outside_T.any():
            at = int(torch.nonzero(outside_T)[0])
            raise _broken(
                SUPPORT,
                f"{int(outside_T.sum())} of {batch.num_trained_tokens} trained tokens outside their own support, the "
                f"first at {at}: token {int(batch.tokens_T[at])} of document {int(batch.document_ids_T[at])}",
                "a sampled token is in the support that it was drawn from",
                "align sets with the sampled token, not with the token before it; record them after every filter",
            )
    if mass is not None:
        mass_T = mass.values
        known = mass.level == "token" and mass.at == "target" and mass_T.dim() == 1 and mass_T.is_floating_point()
        # rounding of a sum of probabilities in float32, as samplers compute them
        if not known or not ((mass_T > 0) & (mass_T <= 1 + 1e-5))[batch.loss_mask_T].all():
            raise _broken(MASS, f"{mass_T.dtype} {list(mass_T.shape)}", "probabilities, one for each token")


def _broken(name: str, found: str, rule: str, fix: str = "build them with rollouts.support.with_support") -> ShapeError:
    return ShapeError(f"the extension {name} of a rollout batch", found=found, rule=rule, fix=fix)


def for_policy(batch: RolloutBatch, support: str) -> RolloutBatch:
    """Return a batch whose log-probabilities are what a run compares with its own; for `policy.support`.

    ``whole``: scaled ones, over the whole vocabulary; sets of the batch are left out. ``recorded``: truncated ones,
    over the recorded supports. Those of the sampler are converted where the batch has what it takes.

    Raises:
        SpecError: no recorded supports; log-probabilities of another quantity that cannot be converted.
    """
    if support == "whole":
        batch = sampler_logprobs_as(batch, "scaled")
        _require(batch, "scaled")
        kept = {name: e for name, e in batch.extensions.items() if name != SUPPORT}
        return batch if SUPPORT not in batch.extensions else replace(batch, extensions=kept)
    if SUPPORT not in batch.extensions:
        raise SpecError(
            "policy.support = 'recorded'",
            found=f"rollouts without the extension {SUPPORT}",
            rule="log-probabilities over the sampler's truncated support need the support of every token",
            fix="record it with the rollouts (rollouts.support.with_support, the key support_ids), or take "
            "support: whole",
        )
    check_supports(batch)
    batch = sampler_logprobs_as(batch, "truncated")
    _require(batch, "truncated")
    return batch


def sampler_logprobs_as(batch: RolloutBatch, quantity: Quantity) -> RolloutBatch:
    """Return a batch whose sampler log-probabilities are of another quantity.

    Formula:  truncated = scaled - log mass; raw = scaled at temperature 1; without truncation scaled = truncated.

    Raises:
        SpecError: raw ones at another temperature, whose normalizer is not recorded; no mass.

    Example:
        >>> batch = RolloutBatch.from_documents([{"tokens": [5, 7], "loss_mask": [0, 1], "advantages": 1.0,
        ...     "old_logprobs": [0, -1.0], "sampler_logprobs": [0, -1.0]}])
        >>> batch = with_support(batch, [[], [7, 8]], mass_T=torch.tensor([1.0, 0.5]))
        >>> sampler_logprobs_as(batch, "truncated").sampler_logprobs_T.tolist()
        [0.0, -0.3068528175354004]
    """
    if batch.sampling.sampler_logprobs == quantity:
        return batch
    changed = replace(batch, sampling=replace(batch.sampling, sampler_logprobs=quantity))
    found, to = (_plainest(batch, each) for each in (batch.sampling.sampler_logprobs, quantity))
    if batch.sampler_logprobs_T is None or found == to:
        return changed
    if "raw" in (found, to):
        _refuse_raw(batch, "sampler_logprobs", found, quantity)
    mass = batch.extensions.get(MASS)
    if mass is None:
        raise SpecError(
            f"sampler_logprobs as {quantity} log-probabilities",
            found=f"{found} ones ({batch.sampling}), and no extension {MASS}",
            rule="they differ by the log of the sampler's probability of the truncated support, of each token",
            fix=f"record {MASS}, or have the engine report {quantity} ones (vLLM: --logprobs-mode; SGLang reports "
            "scaled ones)" + ("" if quantity == "truncated" else ", or set policy.support: recorded"),
        )
    log_mass_T = mass.values.to(batch.sampler_logprobs_T.dtype).log()
    log_mass_T = torch.where(batch.loss_mask_T, log_mass_T, 0.0)
    sign = -1 if to == "truncated" else 1
    # A support of one token has q = 1: rounding of the mass must not make its log-probability positive.
    return replace(changed, sampler_logprobs_T=(batch.sampler_logprobs_T + sign * log_mass_T).clamp_max(0))


def _plainest(batch: RolloutBatch, quantity: Quantity) -> Quantity:
    """Return ``scaled`` for a quantity that is the same number as the scaled one for every token of a batch."""
    temperature = batch.extensions.get(PER_TOKEN_TEMPERATURE)
    at_one = batch.temperature == 1 if temperature is None else bool((temperature.values == 1).all())
    truncated = batch.sampling.truncates or SUPPORT in batch.extensions
    return "scaled" if (quantity == "raw" and at_one) or (quantity == "truncated" and not truncated) else quantity


def _require(batch: RolloutBatch, quantity: Quantity) -> None:
    """Raise unless the log-probabilities of old and reference policy are of a quantity."""
    found = _plainest(batch, batch.sampling.trainer_logprobs)
    if found == _plainest(batch, quantity):
        return
    if found == "raw":
        _refuse_raw(batch, "old_logprobs and ref_logprobs", found, quantity)
    support = "recorded" if found == "truncated" else "whole"
    raise SpecError(
        f"old_logprobs and ref_logprobs as {quantity} log-probabilities",
        found=f"{found} ones",
        rule="the ratio of two policies compares log-probabilities of one quantity: both over the whole vocabulary, or "
        "both over the truncated support; they differ by the log of each policy's own probability of the support",
        fix=f"set policy.support: {support}, or record the rollouts again with the log-probabilities of an online run",
    )


def _refuse_raw(batch: RolloutBatch, name: str, found: str, quantity: str) -> None:
    raise SpecError(
        f"{name} as {quantity} log-probabilities",
        found=f"{found} ones, at temperature {batch.temperature:g}",
        rule="before and after the temperature they differ by two normalizers, which need all logits of each token",
        fix="have the engine report log-probabilities after the temperature (vLLM: --logprobs-mode), "
        "or sample at temperature 1",
    )
