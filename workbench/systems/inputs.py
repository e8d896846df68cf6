"""The arrays that each system's functions take, as data. An array that a function does not take is refused by name.

Another array would be left aside without a word, and the replay would return other numbers than the system. An array
that a function takes may still be without effect under some options (a reference where the KL's coefficient is 0):
then the system leaves it aside, too. Several systems hand their functions the whole batch, of which they look at a
part: the log-probabilities, advantages and values of a batch are taken there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from workbench.errors import SpecError
from workbench.systems.case import Case, flags_of_logits

_LOGPROBS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
_TOKENS: Mapping[str, tuple[str, ...]] = {
    "nemo_rl": (*_LOGPROBS, "sample_mask", "rewards", "logprobs_unfiltered"),
    "verl": (*_LOGPROBS, "is_weights", "entropies"),
    "trl": (*_LOGPROBS, "is_weights", "entropies"),
    "liger": ("old_logprobs", "ref_logprobs", "is_weights"),
    "fast_llm": ("old_logprobs", "label_counts", "num_labels"),
    "prime_rl": ("rollout_logprobs", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"),
    "openrlhf": ("old_logprobs", "rollout_logprobs"),
    "slime": (*_LOGPROBS, "entropies", "sample_denominators"),
    "areal": _LOGPROBS,
    "pipelinerl": (
        "old_logprobs",
        "ref_logprobs",
        "rewards",
        "group_tokens",
        "label_counts",
        "num_labels",
        "overflow",
        "token_ids",
    ),
    "nous_torchtitan": _LOGPROBS,
}
"""System -> what its policy loss takes beside the policy itself, advantages and a mask."""

_ALWAYS = ("advantages", "mask", "document_index")
_HEAD = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias", "targets")
_VALUES = ("values", "old_values", "returns", "mask", "document_index")
_ESTIMATOR = ("logprobs", "ref_logprobs", "mask", "cotangent")
_CORRECTION = ("old_logprobs", "rollout_logprobs", "mask")
_BATCH = ("logprobs", *_LOGPROBS, "advantages", "mask")

_FURTHER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "nemo_rl": {
        "nll": (*_BATCH, "sample_mask"),
        "dpo": (*_BATCH, "sample_mask"),
        "preference": ("rewards", "sample_mask"),
        "value_loss": (*_VALUES, "sample_mask"),
        "kl_estimator": _ESTIMATOR,
        "advantage": (*_BATCH, "rewards", "group_ids", "values", "sample_mask"),
        "reward_shaping": ("rewards", "response_lengths", "truncated"),
    },
    "verl": {
        "kl_estimator": (*_BATCH, "cotangent"),
        "aggregation": _VALUES,
        "value_loss": _VALUES,
        "advantage": (
            *_BATCH,
            "token_rewards",
            "rewards",
            "group_ids",
            "values",
            "baselines",
            "sum_pi_squared",
            "is_weights",
        ),
        "is_correction": _BATCH,
    },
    "trl": {
        "is_correction": _CORRECTION,
        "advantage": ("rewards_per_func", "reward_weights", "group_ids"),
    },
    "liger": {"fused_linear_dpo": _HEAD},
    "fast_llm": {
        "cross_entropy_family": ("logits", "target", "mask", "grad_logits_in"),
        "z_loss": ("logits", "mask", "grad_logits_in"),
        "dpo_packed": ("logits", "ref_logits", "targets", "grad_logits_in"),
    },
    "openrlhf": {
        "value_loss": _VALUES,
        "dpo_from_sums": (
            "chosen_logprob_sums",
            "rejected_logprob_sums",
            "ref_chosen_logprob_sums",
            "ref_rejected_logprob_sums",
        ),
        "kl_estimator": _ESTIMATOR,
        "reward_shaping": ("rewards", "kl", "mask"),
    },
    "slime": {
        "logprobs": ("logits", "targets", "cotangent_logprobs", "cotangent_entropy", "keep_mask"),
        "advantage": ("token_rewards", "values"),
    },
    "areal": {"value_loss": _VALUES, "normalization": ("values", "mask")},
    "pipelinerl": {"advantage": ("rewards", "group_ids")},
    "nous_torchtitan": {"aggregation": ("values", "mask", "cotangent"), "advantage": ("rewards", "group_ids")},
}
"""System -> kind that is no policy loss -> what its function takes."""

_INSTEAD = {
    ("openrlhf", "ref_logprobs"): "OpenRLHF's PolicyLoss has no KL term; replay the KL as the kind kl_estimator",
    ("openrlhf", "entropies"): "OpenRLHF's PolicyLoss has no entropy bonus",
    ("prime_rl", "old_logprobs"): "prime-rl takes its ratio against the sampler; give rollout_logprobs",
}
"""(system, array) -> why its function does not take the array, and what to do."""


def inputs_of(system: str, kind: str) -> tuple[str, ...]:
    """The names of the arrays that a system's function takes.

    Args:
        system: one of `SYSTEMS`.
        kind: of case, as in `replay`.

    Raises:
        SpecError: the system has no such kind.
    """
    further = _FURTHER.get(system, {})
    if kind in further:
        return further[kind]
    if kind == "logprobs":
        return ("logits", "targets", "cotangent_logprobs", "cotangent_entropy")
    tokens = (*_ALWAYS, *_TOKENS[system])
    before = ("grad_logits_in",) if system == "fast_llm" else ()
    policy = {
        "policy_loss": ("logprobs",),
        "policy_loss_packed": ("logprobs",),
        "policy_loss_logits": ("logits", "targets", *before),
        "fused_linear_policy_loss": _HEAD,
    }
    if kind not in policy:
        raise SpecError(
            f"arrays of {kind!r} of {system}",
            rule=f"one of {', '.join([*policy, 'logprobs', *further])}",
            fix="choose one of them",
        )
    return (*policy[kind], *tokens)


def refuse_unused(case: Case) -> None:
    """Refuse arrays that the function of a case does not take.

    Raises:
        SpecError: there is one; the message names it, what the function takes, and the nearest name of that.
    """
    taken = inputs_of(case.system, case.kind)
    if case.system == "slime" and case.config.get("keep_mask"):  # flags of all logits, whatever they are called
        taken = (*taken, *flags_of_logits(case)[:1])
    elif "keep_mask" in taken:
        taken = tuple(name for name in taken if name != "keep_mask")
    unused = [name for name in case.inputs if name not in taken]
    if not unused:
        return
    near = [
        f"did you mean {match!r} for {name!r}?"
        for name in unused
        for match in difflib.get_close_matches(name, [each for each in taken if each not in case.inputs], n=1)
    ]
    reasons = [_INSTEAD[case.system, name] for name in unused if (case.system, name) in _INSTEAD]
    raise SpecError(
        f"replay of {case.kind} of {case.system} with {', '.join(map(repr, unused))}",
        found=f"nothing in this replay uses {', '.join(unused)}: the numbers would be those without",
        rule=f"its arrays are {', '.join(taken)}",
        fix="; ".join([*reasons, *near]) or "leave the array out, or give it under the name of one of them",
    )
