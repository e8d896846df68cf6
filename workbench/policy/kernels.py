"""Kernels of a decoder's trunk besides attention: norms, rotary embeddings and the product in the middle of an MLP.

A decoder of `transformers` computes each in several passes over memory, some in float32, and saves what lies between
them for backward: on an H200 half of a training step of a 0.6 B model. "compiled" is the same formula through
`torch.compile`, "liger" the Triton kernels of liger-kernel (an optional extra). "torch" changes nothing.

Modules keep their class, names, parameters and hooks; only their forward is replaced.

Letters: T tokens | D features | H heads | d head dimension.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import SpecError

KERNELS = ("torch", "compiled", "liger")
PARTS = ("norm", "rope", "mlp")
GRAPHS = 64
"""Graphs of a formula that torch may compile: one for each number of dimensions, dtype, gradient or none, and kind of
sizes. torch's own limit is 8; beyond it a formula runs uncompiled, at twice the time and memory, with one warning."""


def use_kernels(model: Any, kernels: Mapping[str, str]) -> Any:
    """Replace the kernels of a decoder, and return it.

    Args:
        model: of `transformers`.
        kernels: part ("norm", "rope", "mlp") -> one of `KERNELS`; "torch" and parts left out stay as they are.

    Backward: that of the formula; liger computes it in float32, as the forward.

    Raises:
        SpecError: no such part or kernel, liger-kernel is not installed or not on a GPU, or a model without such parts.
    """
    for part, kernel in kernels.items():
        if part not in PARTS or kernel not in KERNELS:
            raise SpecError(
                f"kernels.{part} = {kernel!r}",
                rule=f"{', '.join(PARTS)}: each one of {', '.join(KERNELS)}",
                fix="correct the name",
            )
        if kernel == "torch":
            continue
        replaced = sum(1 for _ in _REPLACE[part](model, _implementation(part, kernel)))
        if not replaced:
            raise SpecError(
                f"kernels.{part} = {kernel!r}",
                found=f"no module of model type {model.config.get_text_config().model_type!r} that it can replace",
                rule=_RULES[part],
                fix=f"use kernels.{part} torch for this model",
            )
    return model


_RULES = {
    "norm": "RMS norms that multiply by their weight, without an offset, as in Llama, Qwen and Mistral",
    "rope": "attention modules that call `apply_rotary_pos_emb` on whole heads, as in Llama, Qwen and Mistral",
    "mlp": "MLPs of gate_proj, up_proj and down_proj with SiLU, as in Llama, Qwen and Mistral",
}


# ---- the formulas, for torch.compile ------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm, in float32 or better, rounded before it is multiplied by the weight.

    Shapes: x [..., D], weight [D] -> [..., D].
    Source: arXiv 1910.07467; the order of roundings is that of Llama in `transformers`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, halves of a head as the two coordinates.

    Shapes: query [1, H, T, d], key [1, h, T, d], cosine and sine [1, T, d] -> as query and key.
    Source: arXiv 2104.09864; the pairing is that of Llama in `transformers`.
    """
    cosine, sine = cosine[:, None], sine[:, None]

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * cosine + torch.cat([-second, first], dim=-1) * sine

    return rotated(query), rotated(key)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate times the other branch. Source: arXiv 2002.05202, SwiGLU."""
    return functional.silu(gate) * up


def _implementation(part: str, kernel: str) -> Callable[..., Any]:
    if kernel == "compiled":
        return _compiled(part)
    operators = _liger()
    if part == "norm":
        # Not in place: the gradient of a norm's output may be read by others, such as hooks.
        return lambda x, weight, epsilon: operators.LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False)
    if part == "rope":
        return operators.LigerRopeFunction.apply
    return operators.LigerSiLUMulFunction.apply


@functools.cache
def _compiled(part: str) -> Callable[..., Any]:
    """Compiled once per process: all layers and models share it."""
    formulas: Mapping[str, Callable[..., Any]] = {"norm": rms_norm, "rope": rotate, "mlp": gated}
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
    return torch.compile(formulas[part])


def _liger() -> ModuleType:
    try:
        return importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise SpecError(
            "kernels: liger",
            found=str(error),
            rule="the package liger-kernel, and a GPU that Triton compiles for",
            fix="pip install 'workbench[kernels]', or use compiled",
        ) from None


# ---- the modules of a decoder -------------------------------------------------------------------------------------


def _replace_norms(model: nn.Module, kernel: Callable[..., Tensor]) -> Iterator[None]:
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        if type(module).__name__.endswith("RMSNorm") and epsilon is not None and isinstance(module.weight, Tensor):
            module.forward = functools.partial(_norm, module, kernel)
            yield


def _norm(module: Any, kernel: Callable[..., Tensor], hidden_states: Tensor) -> Tensor:
    return kernel(hidden_states, module.weight, module.variance_epsilon)


def _replace_mlps(model: nn.Module, kernel: Callable[..., Tensor]) -> Iterator[None]:
    for module in model.modules():
        branches = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        if (branches and isinstance(getattr(module, "act_fn", None), nn.SiLU)) or _is_silu(module):
            module.forward = functools.partial(_mlp, module, kernel)
            yield


def _is_silu(module: Any) -> bool:
    """`transformers` has a class of its own for SiLU."""
    branches = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return branches and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _mlp(module: Any, kernel: Callable[..., Tensor], x: Tensor) -> Tensor:
    return module.down_proj(kernel(module.gate_proj(x), module.up_proj(x)))


_ROPE: ContextVar[Callable[..., Any] | None] = ContextVar("rope", default=None)
"""The kernel of the attention module that computes now."""


def _replace_ropes(model: nn.Module, kernel: Callable[..., Any]) -> Iterator[None]:
    for module in model.modules():
        file: Any = sys.modules[type(module).__module__]
        if hasattr(module, "q_proj") and hasattr(module, "k_proj") and hasattr(file, "apply_rotary_pos_emb"):
            if not hasattr(file.apply_rotary_pos_emb, "takes_kernels"):
                file.apply_rotary_pos_emb = _rotation(file.apply_rotary_pos_emb)
            module.forward = functools.partial(_with_rope, module.forward, kernel)
            yield


def _with_rope(forward: Callable[..., Any], kernel: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    token = _ROPE.set(kernel)
    try:
        return forward(*inputs, **named)
    finally:
        _ROPE.reset(token)


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model file's rotation, or the kernel of the module that calls it: a decoder calls a function of its file.

    It stays in the file, and is a function as before, at which faults can be planted.
    """

    @functools.wraps(original)
    def rotation(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *more: Any, **named: Any) -> Any:
        kernel = _ROPE.get()
        if kernel is None or more or named or cosine.shape[-1] != query.shape[-1]:
            return original(query, key, cosine, sine, *more, **named)
        return kernel(query, key, cosine, sine)

    vars(rotation)["takes_kernels"] = True
    return rotation


_REPLACE: Mapping[str, Callable[[Any, Callable[..., Any]], Iterator[None]]] = {
    "norm": _replace_norms,
    "rope": _replace_ropes,
    "mlp": _replace_mlps,
}
