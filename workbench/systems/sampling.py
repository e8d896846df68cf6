"""Quantity of the sampler log-probabilities of another system's rollouts, from its own options of the sampler.

    trl        top_k, top_p, min_p of `GRPOConfig`; vLLM with logprobs_mode processed_logprobs
    prime_rl   top_k, top_p, min_p of its sampling; vLLM with processed_logprobs
    openrlhf   top_p; vLLM with processed_logprobs where is_correction_enable is on, else none are kept
    slime      rollout_top_k, rollout_top_p; SGLang, whose log-probabilities are those after the temperature alone

All of them train on log-probabilities over the whole vocabulary after the temperature, but for slime with its mask
kept.

Source: TRL 1.16.0 trl/trainer/grpo_trainer.py (logprobs_mode); prime-rl src/prime_rl/inference/config.py; OpenRLHF
        0.11.2 vllm_engine.py; slime 624b824a; huggingface/trl#6789 for the factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.errors import SpecError
from workbench.rollouts.sampling import Quantity, Sampling


class _Names(NamedTuple):
    """Options of a system by what they set, and what its sampler reports."""

    top_k: str | None
    top_p: str | None
    min_p: str | None
    reports: Quantity
    replays: str | None = None


_SYSTEMS: Mapping[str, _Names] = {
    "trl": _Names("top_k", "top_p", "min_p", "truncated"),
    "prime_rl": _Names("top_k", "top_p", "min_p", "truncated"),
    "openrlhf": _Names(None, "top_p", None, "truncated"),
    "slime": _Names("rollout_top_k", "rollout_top_p", None, "scaled", replays="keep_mask"),
}


def sampling_of(system: str, options: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a system's rollouts, for `workbench.load_rollouts`.

    Values that switch a truncation off (None; top_k of 0 or below; top_p of 1; min_p of 0) are no truncation.

    Raises:
        SpecError: a system whose sampler is not known here, or an option that is none of its sampler's.

    Example:
        >>> sampling_of("trl", {"top_p": 0.9, "top_k": 0})
        Sampling(top_k=None, top_p=0.9, min_p=0.0, sampler_logprobs='truncated', trainer_logprobs='scaled')
    """
    names = _SYSTEMS.get(system)
    if names is None:
        raise SpecError(
            f"the sampling of {system}",
            rule=f"one of {', '.join(_SYSTEMS)}",
            fix="build rollouts.sampling.Sampling from what its engine was started with",
        )
    known = [name for name in (names.top_k, names.top_p, names.min_p, names.replays) if name is not None]
    if unknown := sorted(set(options) - set(known)):
        raise SpecError(
            f"the sampling of {system} with {', '.join(unknown)}",
            rule=f"its options are {', '.join(known)}",
            fix="leave the others out; the temperature is that of load_rollouts",
        )
    top_k, top_p, min_p = (options.get(name) if name else None for name in (names.top_k, names.top_p, names.min_p))
    sampling = Sampling(
        top_k if top_k is not None and top_k > 0 else None,
        1.0 if top_p is None else float(top_p),
        0.0 if min_p is None else float(min_p),
        names.reports,
        "truncated" if names.replays and options.get(names.replays) else "scaled",
    )
    return sampling if sampling.truncates else Sampling()
