"""GEMMs of a trunk's linear layers in FP8: both operands, or the weights alone, as engines store them.

    fp8_weights_tensorwise   weights in e4m3, one scale a tensor; activations stay
    fp8_weights_rowwise      one scale an output channel
    fp8_weights_blockwise    one scale a block of 128 x 128

The other formats are those of `workbench.policy.gemm_formats`, which rounds activations as well. Weights of experts,
which are one tensor, are rounded with the weights-only formats, expert by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.policy.gemm_formats import rounded, use_gemm_formats

WEIGHTS_ONLY = "fp8_weights_"


def use_gemms(model: Any, name: str) -> Any:
    """Compute the linear layers of the trunk in a format, in place; "dense": as they are."""
    if name == "dense":
        return model
    if not name.startswith(WEIGHTS_ONLY):
        dense = {"mlp": "dense"} if _has_experts(model) else {"mlp": name}
        return use_gemm_formats(model, {"attention": name, **dense})
    form = f"fp8_{name.removeprefix(WEIGHTS_ONLY)}"
    head = model.get_output_embeddings()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                module.weight.copy_(_round(module.weight, form))
            elif type(module).__name__.endswith("Experts"):
                for weight in module.parameters():
                    for one_OI in weight if weight.dim() == 3 else []:
                        one_OI.copy_(_round(one_OI, form))
            del path
    return model


def _round(weight_OI: Tensor, form: str) -> Tensor:
    return rounded(weight_OI, form, "weight").to(weight_OI.dtype)


def _has_experts(model: Any) -> bool:
    return any(type(module).__name__.endswith("Experts") for module in model.modules())
