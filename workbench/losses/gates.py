"""Gates of a correction: which tokens a statistic of the old policy against the sampler lets through.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.losses.terms import LossInputs, clamped
from workbench.specs.losses import CorrectionSpec, GateSpec

BINARY_FLOOR = 1e-8
"""binary_kl: smallest distance of a probability from 0 and from 1."""
SAMPLER_FLOOR = 1e-6
"""sampler_binary_kl, total_variation: the same, of OpenRLHF."""


def through_gates(inputs: LossInputs, spec: CorrectionSpec, mu_T: Tensor) -> Tensor:
    """[T] bool: True if the token passes every gate. ``mu_T`` [T] float64 is log(old / sampler).

    Backward: none.
    """
    passed_T = torch.ones_like(inputs.counts_T)
    for gate in spec.gates:
        passed_T &= _passes(inputs, gate, clamped(mu_T, spec.log_clamp))
    return passed_T


def within(values_T: Tensor, low: float | None, high: float | None) -> Tensor:
    """[T] bool: at least low and at most high; NaN is not within a bound."""
    within_T = torch.ones_like(values_T, dtype=torch.bool)
    if low is not None:
        within_T &= values_T >= low
    if high is not None:
        within_T &= values_T <= high
    return within_T


def gathered(inputs: LossInputs, level: str, values_T: Tensor) -> Tensor:
    """[T] per-token values, summed or averaged over the token's segment or document."""
    values_T = torch.where(inputs.counts_T, values_T, 0.0)
    if level == "document_sum":
        return inputs.document_sums.document(values_T)
    return inputs.mean_over(level.removeprefix("given_").removesuffix("_mean"), values_T)


def _passes(inputs: LossInputs, gate: GateSpec, mu_T: Tensor) -> Tensor:
    if gate.statistic in _OF_PROBABILITIES:
        values_T = _OF_PROBABILITIES[gate.statistic](inputs)
    else:
        values_T = {
            "ratio": mu_T,
            "k1": -mu_T,
            "k2": 0.5 * mu_T.square(),
            "k3": mu_T.expm1() - mu_T,
            "inverse_k3": (-mu_T).expm1() + mu_T,
        }[gate.statistic]
    extreme = gate.level in ("document_max", "document_min")
    values_T = values_T if extreme else gathered(inputs, gate.level, values_T)
    values_T = values_T.exp() if gate.statistic == "ratio" else values_T
    if not extreme:
        return within(values_T, gate.low, gate.high)
    # An extreme value needs no maximum over ranks: the greatest is at most `high` if no token is above it, and at least
    # `low` if some token is. For the smallest, low and high swap.
    for_all_T, for_any_T = within(values_T, None, gate.high), within(values_T, gate.low, None)
    bounds = gate.high, gate.low
    if gate.level == "document_min":
        for_all_T, for_any_T, bounds = for_any_T, for_all_T, bounds[::-1]
    kept_T = torch.ones_like(inputs.counts_T)
    if bounds[0] is not None:
        kept_T &= inputs.document_sums.document((~for_all_T & inputs.counts_T).double()) == 0
    if bounds[1] is not None:
        kept_T &= inputs.document_sums.document((for_any_T & inputs.counts_T).double()) > 0
    return kept_T


def _binary_kl(inputs: LossInputs) -> Tensor:
    """[T] float64 KL of (this token, any other) between old and sampler; the greater of both directions."""
    old_T, sampler_T = _probabilities(inputs, BINARY_FLOOR)
    return torch.maximum(_divergence(old_T, sampler_T), _divergence(sampler_T, old_T))


def _sampler_binary_kl(inputs: LossInputs) -> Tensor:
    """[T] float64 KL of (this token, any other) from the sampler to the old policy."""
    old_T, sampler_T = _probabilities(inputs, SAMPLER_FLOOR)
    return _divergence(sampler_T, old_T)


def _total_variation(inputs: LossInputs) -> Tensor:
    """[T] float64 distance of the token's probabilities."""
    old_T, sampler_T = _probabilities(inputs, SAMPLER_FLOOR)
    return (sampler_T - old_T).abs()


def _probabilities(inputs: LossInputs, floor: float) -> tuple[Tensor, Tensor]:
    """[T] probabilities of old and sampler, at least ``floor`` from 0 and from 1."""
    old_T, sampler_T = (inputs.logprobs(policy).double().exp().clamp(floor, 1 - floor) for policy in ("old", "sampler"))
    return old_T, sampler_T


def _divergence(p_T: Tensor, q_T: Tensor) -> Tensor:
    return p_T * (p_T / q_T).log() + (1 - p_T) * ((1 - p_T) / (1 - q_T)).log()


_OF_PROBABILITIES: Mapping[str, Callable[[LossInputs], Tensor]] = {
    "binary_kl": _binary_kl,
    "sampler_binary_kl": _sampler_binary_kl,
    "total_variation": _total_variation,
}
