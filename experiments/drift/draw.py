"""Drawn calls of the policy losses of installed systems: options by the systems' own names, and arrays.

Letters: B rows | C padded length | V vocabulary | D model dimension.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY, WIDTH = 5, 7, 11, 4
SPREADS = (0.02, 0.2, 1.0)
"""Standard deviations of log ratios in nats: close to the old policy, moved, far."""
EMPTY_EVERY = 12
"""Every so many cases, nothing counts."""

KINDS = {
    "openrlhf": ("policy_loss", "PolicyLoss.forward"),
    "verl": ("policy_loss", "compute_policy_loss"),
    "trl": ("policy_loss", "GRPOTrainer._compute_loss"),
    "areal": ("policy_loss", "ppo_actor_loss_fn"),
    "liger": ("fused_linear_policy_loss", "LigerFusedLinearGRPOLoss"),
    "skyrl": ("policy_loss", "PolicyLossRegistry.get"),
}
"""System -> (kind of replay, function)."""


def draw(system: str, number: int) -> dict[str, Any]:
    """Draw a call: kind, function, options and arrays, in float64."""
    choose = random.Random(1000 * number + 17)
    g = torch.Generator().manual_seed(number)
    config = OPTIONS[system](choose)
    arrays = _arrays(g, choose, empty=number % EMPTY_EVERY == EMPTY_EVERY - 1)
    kind, function = KINDS[system]
    if system == "verl":
        function += f"_{config['policy_loss']['loss_mode']}"
    if system == "areal" and config["use_sapo_loss"]:
        function = "sapo_loss_fn"
    return {"kind": kind, "function": function, "config": config, "arrays": _taken(system, config, arrays, g, choose)}


def _arrays(g: torch.Generator, choose: random.Random, *, empty: bool) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = [choose.randint(0, LENGTH) for _ in range(ROWS)]
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).double()
    mask[choose.randrange(ROWS), choose.randrange(LENGTH)] = 0
    mask[choose.randrange(ROWS), 0] = 1
    spread = choose.choice(SPREADS)
    logprobs = -normal(ROWS, LENGTH).abs() - 0.01
    old = logprobs + spread * normal(ROWS, LENGTH)
    by_token = choose.random() < 0.3
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": old + choose.choice((0.01, 0.1, 0.5)) * normal(ROWS, LENGTH),
        "ref_logprobs": logprobs + 0.2 * normal(ROWS, LENGTH),
        "entropies": normal(ROWS, LENGTH).abs(),
        "advantages": normal(ROWS, LENGTH) if by_token else normal(ROWS, 1).expand(ROWS, LENGTH).clone(),
        "mask": torch.zeros_like(mask) if empty else mask,
    }


def _taken(
    system: str, config: Mapping[str, Any], arrays: dict[str, Tensor], g: torch.Generator, choose: random.Random
) -> dict[str, Tensor]:
    """Return the arrays that a system's function takes."""
    names = ["logprobs", "old_logprobs", "advantages", "mask"]
    if system in ("openrlhf", "areal"):
        return {name: arrays[name] for name in (*names, "rollout_logprobs")}
    if system == "verl":
        weights = {"is_weights": arrays["entropies"] + 0.1} if choose.random() < 0.3 else {}
        return {name: arrays[name] for name in names} | weights
    if system == "skyrl":
        prompts = torch.tensor([0, 0, 1, 1, 1])[:, None].expand(ROWS, LENGTH).clone()
        sampler = arrays["rollout_logprobs"].clamp(max=-0.001)  # dppo takes its probability
        return {**arrays, "rollout_logprobs": sampler, "group_ids": prompts}
    of_weights = {"token": arrays["entropies"] + 0.1, "sequence": arrays["entropies"][:, :1] + 0.1}
    weights = {"is_weights": of_weights[config["vllm_is"]]} if config.get("vllm_is") else {}
    if system == "trl":
        kept = names if choose.random() < 0.9 else [name for name in names if name != "old_logprobs"]
        return {name: arrays[name] for name in (*kept, "ref_logprobs", "entropies")} | weights

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    head = {"hidden": normal(ROWS, LENGTH, WIDTH), "weight": normal(VOCABULARY, WIDTH)}
    targets = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=g)
    logits = (head["hidden"] @ head["weight"].t()) / config["temperature"]
    own = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    moved = arrays["old_logprobs"] - arrays["logprobs"]
    more = {"ref_logprobs": own + 0.2 * moved} if config["use_ref_model"] else {}
    given = {"targets": targets, "old_logprobs": own + moved, "advantages": arrays["advantages"][:, 0].clone()}
    return head | given | {"mask": arrays["mask"]} | more | weights


# ---- options -------------------------------------------------------------------------------------------------------


def _openrlhf(choose: random.Random) -> dict[str, Any]:
    gating = choose.choice(("ratio", "ratio", "binary_kl", "tv"))
    level = choose.choice(("off", "token", "seq"))
    mode = choose.choice(("mask", "clip")) if (gating, level) == ("ratio", "token") else "mask"
    bounds = {"ratio": (0.9, 1.15), "binary_kl": (0.0, 0.01), "tv": (0.0, 0.05)}[gating]
    config = {
        "clip_eps_low": choose.choice((0.2, 0.05)),
        "clip_eps_high": choose.choice((0.2, 0.28)),
        "dual_clip": choose.choice((None, 1.5)),
        "token_level_loss": choose.random() < 0.5,
        "policy_loss_type": choose.choice(("ppo", "ppo", "ppo", "gspo")),
        "is_correction_level": level,
        "is_correction_mode": mode,
        "is_correction_gating": gating if level != "off" else "ratio",
        "is_correction_threshold": bounds if level != "off" else (0.5, 5.0),
    }
    counts = {"dp_size": 4, "batch_num_tokens": 211.0, "global_batch_size": 24.0}
    return config | (counts if choose.random() < 0.3 else {})


def _verl(choose: random.Random) -> dict[str, Any]:
    of_modes = {
        "vanilla": {},
        "gspo": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
        "sapo": {"tau_pos": 0.8},
        "gpg": {},
        "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3},
        "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.3},
        "dro": {"policy_loss": {"dro_beta": 0.3}},
        "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.3},
        "dppo_kl": {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 5.0},
        "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}},
    }
    mode = choose.choice(list(of_modes))
    aggregates = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    infos = ({}, {}, {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 9})
    own: dict[str, Any] = dict(of_modes[mode])
    own["policy_loss"] = {"loss_mode": mode, **own.get("policy_loss", {})}
    return {"loss_agg_mode": choose.choice(aggregates), "global_batch_info": choose.choice(infos), **own}


GRPO_KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")


def _trl(choose: random.Random) -> dict[str, Any]:
    kind = choose.choice(GRPO_KINDS)
    return {
        "loss_type": kind,
        "importance_sampling_level": choose.choice(("token", "sequence")),
        "beta": choose.choice((0.0, 0.07)),
        "epsilon_low": choose.choice((0.2, 0.05)),
        "epsilon_high": 1.4 if kind == "cispo" else choose.choice((0.2, 0.28)),
        "delta": choose.choice((None, None, 1.3)),
        "use_bias_correction_kl": choose.random() < 0.5,
        "off_policy_mask_threshold": choose.choice((None, None, 0.05)),
        "top_entropy_quantile": choose.choice((1.0, 1.0, 0.437)),  # whose threshold is on no token
        "entropy_coef": choose.choice((0.0, 0.0, 0.02)),
        "num_items_in_batch": choose.choice((41.0, 0.0)),
        "gradient_accumulation_steps": choose.choice((1, 4)),
        "steps_per_generation": choose.choice((1, 2)),
        "max_completion_length": 9,
        "sapo_temperature_pos": 0.8,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 1.5,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 0.5,
        "vllm_is": choose.choice((None, None, "token", "sequence")),
    }


def _liger(choose: random.Random) -> dict[str, Any]:
    kind = choose.choice(GRPO_KINDS)
    by_row = kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo") and choose.random() < 0.4
    return {
        "loss_type": kind,
        "importance_sampling_level": "sequence" if by_row else "token",
        "beta": choose.choice((0.0, 0.07)),
        "epsilon_low": 0.2,
        "epsilon_high": 1.4 if kind == "cispo" else 0.28,
        "temperature": choose.choice((1.0, 0.7)),
        "delta": choose.choice((None, None, 1.3)),
        "use_bias_correction_kl": choose.random() < 0.5,
        "use_ref_model": True,
        "num_items_in_batch": choose.choice((None, 41.0)),
        "chunk_size": choose.choice((1, 2)),
        "max_completion_length": 9,
        "sapo_temperature_pos": 0.8,
        "sapo_temperature_neg": 1.05,
        "vespo": {"k_pos": 1.5, "lambda_pos": 2.0, "k_neg": 3.0, "lambda_neg": 0.5},
        "vllm_is": choose.choice((None, None, "token", "sequence")),
    }


def _areal(choose: random.Random) -> dict[str, Any]:
    soft = choose.random() < 0.25
    rule = None
    if not soft and choose.random() < 0.7:
        metric = choose.choice(("ratio", "kl_k1", "kl_k2", "kl_k3"))
        by_ratio = metric == "ratio"
        level = choose.choice(("token", "sequence"))
        action = choose.choice(("mask", "clamp")) if by_ratio else "mask"
        bounds = choose.choice(((1.2, None), (1.1, 0.92)) if by_ratio else ((0.03, None), (0.05, 0.001)))
        agg = choose.choice(("sum", "mean", "max")) if level == "sequence" else "mean"
        rule = {"level": level, "action": action, "metric": metric, "agg": agg, "upper": bounds[0], "lower": bounds[1]}
    return {
        "eps_clip": choose.choice((0.2, 0.05)),
        "eps_clip_higher": choose.choice((None, 0.28)),
        "c_clip": choose.choice((None, 1.5)),
        "importance_sampling_level": choose.choice(("token", "sequence")),
        "rejection_sampling": rule,
        "use_sapo_loss": soft,
        "sapo_tau_pos": 1.0,
        "sapo_tau_neg": 1.05,
    }


def _skyrl(choose: random.Random) -> dict[str, Any]:
    kind = choose.choice(("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is", "dppo", "importance_sampling"))
    corrections: tuple[dict[str, Any], ...] = (
        {},
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.05},
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.02},
        {"sequence_mask_metric": "product", "product_mask_low": 0.9, "product_mask_high": 1.2},
        {"outlier_token_is_threshold_low": 0.8, "outlier_token_is_threshold_high": 1.3, "tis_ratio_type": "token"},
        {"token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 1.15, "tis_ratio_type": "token"},
    )
    corrected = kind not in ("rollout_is", "importance_sampling") and choose.random() < 0.6
    divergence = choose.choice(("binary_tv", "binary_kl"))
    return {
        "policy_loss_type": kind,
        "loss_reduction": choose.choice(("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")),
        "max_seq_len": 9,
        "eps_clip_low": choose.choice((0.2, 0.05)),
        "eps_clip_high": choose.choice((0.2, 0.28)),
        "clip_ratio_c": 1.5,
        "use_kl_loss": choose.random() < 0.5,
        "kl_loss_coef": 0.07,
        "kl_estimator_type": choose.choice(("k1", "k2", "k3", "abs")),
        "use_entropy_loss": choose.random() < 0.3,
        "entropy_loss_coef": 0.02,
        "off_policy_correction": choose.choice(corrections) if corrected else {},
        "sapo": {"tau_pos": 0.8, "tau_neg": 1.05},
        "cispo": {"cispo_eps_clip_low": choose.choice((0.0, 0.1)), "cispo_eps_clip_high": 0.3},
        "dppo": {"dppo_type": divergence, "delta_low": 0.05, "delta_high": 0.03},
    }


OPTIONS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "openrlhf": _openrlhf,
    "verl": _verl,
    "trl": _trl,
    "areal": _areal,
    "liger": _liger,
    "skyrl": _skyrl,
}
"""System -> its drawn options."""
