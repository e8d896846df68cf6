"""Float64 throughout: norms, rotary embeddings and routers that do not round to float32 in between.

`transformers` computes RMS norms, rotary angles and router probabilities in float32 for every model dtype. That hides
small differences between layouts, or creates them, so a float64 run replaces them.

Letters: t tokens | E experts | k experts of a token.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Of `transformers`: softmax over all experts, top k, renormalized to sum to 1 unless `norm_topk_prob` is off."""

SIGMOID_ROUTERS = ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter")
"""Of `transformers`: sigmoids, of which a bias moves the choice alone; top k within the best groups of experts."""

_UNCAST = ("inv_freq", "e_score_correction_bias")
"""Ends of the names of buffers that keep their dtype: small steps of a bias would be lost in bfloat16."""


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model to a dtype in place, as loading a checkpoint does; rotary frequencies, routing biases keep theirs.

    A frequency in bfloat16 is off by up to 0.2 percent, which at position 1000 is up to a radian.
    """
    uncast = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith(_UNCAST)
    ]
    model.to(dtype)
    for module, name, buffer in uncast:
        setattr(module, name, buffer)
    return model


def lift_to_float64(model: Any) -> Any:
    """Cast a model to float64 in place, including norms, rotary embeddings and routers.

    Experts are computed one by one: grouped GEMMs support at most 32 bits.

    Raises:
        SpecError: a module that looks like a norm or a router but is of an unknown kind.
    """
    model.double()
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation("eager")
    for name, module in model.named_modules():
        kind = type(module).__name__
        exact: Callable[..., Any] | None = None
        rule, fix = "", "use precision: float32 for this model"
        if hasattr(module, "variance_epsilon"):
            exact = None if "Gemma" in kind else _exact_norm
            rule = "norms that multiply by their weight"
        elif hasattr(module, "inv_freq"):
            exact = _exact_rotary_of_halves if kind == "GptOssRotaryEmbedding" else _exact_rotary
        elif "Norm" in kind and not isinstance(module, nn.LayerNorm):
            rule = "RMS norms with `variance_epsilon` and `weight`, and torch LayerNorm, are known"
            fix = "use precision: float32, or add this norm to policy/precision.py"
        elif "Router" in kind:
            exact = _EXACT_ROUTERS.get(kind)
            rule = f"known routers: {', '.join(_EXACT_ROUTERS)}"
            fix = "use precision: float32, or add this router to policy/precision.py"
        else:
            continue
        if exact is None:
            raise SpecError(f"float64 run of a model with {kind} at {name}", rule=rule, fix=fix)
        module.forward = types.MethodType(exact, module)  # a bound method: a deep copy binds to the copy
    return model


def _exact_norm(module: Any, hidden: Tensor) -> Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))


def _exact_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits_tE = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T
    weights_tk, experts_tk = torch.softmax(logits_tE, dim=-1).topk(module.top_k, dim=-1)
    if getattr(module, "norm_topk_prob", True):
        weights_tk = weights_tk / weights_tk.sum(dim=-1, keepdim=True)
    return logits_tE, weights_tk, experts_tk


def _exact_sigmoid_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits_tE = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T
    scores_tE = logits_tE.sigmoid()
    choice_tge = (scores_tE + module.e_score_correction_bias).unflatten(1, (module.num_group, -1))
    groups_tg = choice_tge.topk(2, dim=-1).values.sum(dim=-1)
    best_tg = torch.zeros_like(groups_tg, dtype=torch.bool)
    best_tg.scatter_(1, groups_tg.topk(module.topk_group, dim=-1).indices, True)
    choice_tE = choice_tge.masked_fill(~best_tg[..., None], -torch.inf).flatten(1)
    experts_tk = choice_tE.topk(module.top_k, dim=-1).indices
    gates_tk = scores_tE.gather(1, experts_tk)
    if module.norm_topk_prob:
        gates_tk = gates_tk / (gates_tk.sum(dim=-1, keepdim=True) + 1e-20)
    return logits_tE, gates_tk * module.routed_scaling_factor, experts_tk


def _exact_chosen_router(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits_tE = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T + module.bias
    largest_tk, experts_tk = logits_tE.topk(module.top_k, dim=-1)
    return logits_tE, torch.softmax(largest_tk, dim=-1), experts_tk


_EXACT_ROUTERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ROUTERS, _exact_router),
    **dict.fromkeys(SIGMOID_ROUTERS, _exact_sigmoid_router),
    "GptOssTopKRouter": _exact_chosen_router,
}
"""Kind of router -> its forward in the dtype of its input."""


def _exact_rotary_of_halves(module: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling


def _exact_rotary(module: Any, hidden: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq
    both = torch.cat([angles, angles], dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
