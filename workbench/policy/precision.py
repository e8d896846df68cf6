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


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model to a dtype in place, as loading a checkpoint does: rotary frequencies keep their dtype.

    A frequency in bfloat16 is off by up to 0.2 percent, which at position 1000 is up to a radian.
    """
    frequencies = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    model.to(dtype)
    for module, name, buffer in frequencies:
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
            exact = _exact_rotary
        elif "Norm" in kind and not isinstance(module, nn.LayerNorm):
            rule = "RMS norms with `variance_epsilon` and `weight`, and torch LayerNorm, are known"
            fix = "use precision: float32, or add this norm to policy/precision.py"
        elif "Router" in kind:
            exact = _exact_router if kind in ROUTERS else None
            rule = f"routers that take the top k of a softmax are known: {', '.join(ROUTERS)}"
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


def _exact_rotary(module: Any, hidden: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq
    both = torch.cat([angles, angles], dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
