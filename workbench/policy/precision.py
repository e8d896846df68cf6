"""Float64 all the way: norms, rotary embeddings and routers that do not round through float32.

`transformers` computes RMS norms, rotary angles and the probabilities of a router in float32 whatever the model's
dtype. That snaps small differences between layouts away, or makes them, so a float64 run replaces them.

Letters: t tokens | E experts | k experts of a token.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError

ROUTERS = ("Qwen3MoeTopKRouter", "Qwen2MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter")
"""Of `transformers`: softmax over all experts, the largest k of it, made to sum to 1 unless `norm_topk_prob` is off."""


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Turn a model into a dtype as a checkpoint is loaded in it, in place: rotary frequencies stay as they are.

    A frequency in bfloat16 is off by up to 0.2 percent, which at place 1000 is up to a radian.
    """
    frequencies = [
        (module, name, held)
        for module in model.modules()
        for name, held in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    model.to(dtype)
    for module, name, held in frequencies:
        setattr(module, name, held)
    return model


def lift_to_float64(model: Any) -> Any:
    """Turn a model into float64, its norms, rotary embeddings and routers included, in place.

    Experts are computed one by one: grouped products are of at most 32 bits.

    Raises:
        SpecError: a module that looks like a norm or a router and is of a kind not known here.
    """
    model.double()
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation("eager")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if hasattr(module, "variance_epsilon"):
            _lift_rms_norm(module, name, kind)
        elif hasattr(module, "inv_freq"):
            _lift_rotary(module)
        elif "Norm" in kind and not isinstance(module, nn.LayerNorm):
            raise SpecError(
                f"float64 run of a model with {kind} at {name}",
                rule="RMS norms with `variance_epsilon` and `weight`, and torch LayerNorm, are known",
                fix="use precision: float32, or teach policy/precision.py this norm",
            )
        elif "Router" in kind:
            _lift_router(module, name, kind)
    return model


def _lift_rms_norm(module: Any, name: str, kind: str) -> None:
    if "Gemma" in kind:
        raise SpecError(
            f"float64 run of a model with {kind} at {name}",
            rule="norms that multiply by their weight",
            fix="use precision: float32 for this model",
        )

    module.forward = types.MethodType(_exact_norm, module)  # bound: a deep copy's is bound to the copy


def _exact_norm(module: Any, hidden: Tensor) -> Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))


def _lift_router(module: Any, name: str, kind: str) -> None:
    if kind not in ROUTERS:
        raise SpecError(
            f"float64 run of a model with {kind} at {name}",
            rule=f"routers that take the top of a softmax are known: {', '.join(ROUTERS)}",
            fix="use precision: float32, or teach policy/precision.py this router",
        )

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_tE = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T
        weights_tk, experts_tk = torch.softmax(logits_tE, dim=-1).topk(module.top_k, dim=-1)
        if getattr(module, "norm_topk_prob", True):
            weights_tk = weights_tk / weights_tk.sum(dim=-1, keepdim=True)
        return logits_tE, weights_tk, experts_tk

    module.forward = forward


def _lift_rotary(module: Any) -> None:
    module.forward = types.MethodType(_exact_rotary, module)


def _exact_rotary(module: Any, hidden: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq
    both = torch.cat([angles, angles], dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
