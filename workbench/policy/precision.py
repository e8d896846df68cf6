"""Float64 all the way: norms and rotary embeddings that do not round through float32.

`transformers` computes RMS norms and rotary angles in float32 whatever the model's dtype. That snaps small
differences between layouts away, or makes them, so a float64 run replaces both.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError


def lift_to_float64(model: nn.Module) -> nn.Module:
    """Turn a model into float64, its norms and rotary embeddings included, in place.

    Raises:
        SpecError: a module that looks like a norm or a rotary embedding and is of a kind not known here.
    """
    model.double()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if hasattr(module, "variance_epsilon"):
            _lift_rms_norm(module, name, kind)
        elif hasattr(module, "inv_freq"):
            _lift_rotary(module)
        elif "Norm" in kind and not isinstance(module, nn.LayerNorm):
            raise SpecError(f"float64 run of a model with {kind} at {name}",
                            rule="RMS norms with `variance_epsilon` and `weight`, and torch LayerNorm, are known",
                            fix="use precision: float32, or teach policy/precision.py this norm")
    return model


def _lift_rms_norm(module: Any, name: str, kind: str) -> None:
    if "Gemma" in kind:
        raise SpecError(f"float64 run of a model with {kind} at {name}", rule="norms that multiply by their weight",
                        fix="use precision: float32 for this model")

    module.forward = types.MethodType(_exact_norm, module)  # bound: a deep copy's is bound to the copy


def _exact_norm(module: Any, hidden: Tensor) -> Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))


def _lift_rotary(module: Any) -> None:
    module.forward = types.MethodType(_exact_rotary, module)


def _exact_rotary(module: Any, hidden: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq
    both = torch.cat([angles, angles], dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling
