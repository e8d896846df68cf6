"""GEMMs of a decoder in TF32, FP8 or MXFP8: the values that such operands have, on any device.

Each operand of a linear layer's three GEMMs (output, input gradient, weight gradient) is rounded to the format along
the dimension that the GEMM sums over, and multiplied in float32 (float64 in a float64 run). That is the arithmetic of
the format with accumulation in float32, and not its speed: the record of a run says that it is emulated.

    tf32             10 bits of mantissa
    fp8_tensorwise   one scale a tensor; activations and weights in e4m3, output gradients in e5m2
    fp8_rowwise      one scale a row of each operand; e4m3
    fp8_blockwise    tiles of 1 x 128 of activations and gradients, blocks of 128 x 128 of weights; e4m3
    mxfp8            one power of two for 32 numbers; e4m3

Source: torchao's float8 recipes (tensorwise, rowwise); DeepSeek-V3, arXiv 2412.19437, section 3.3.2 (blockwise); OCP
        Microscaling Formats specification 1.0, sections 5.1 and 6.3 (mxfp8).

Letters: T tokens | I inputs of a layer | O its outputs | K the dimension that a GEMM sums over | N rows of an operand.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from workbench.errors import SpecError, listed
from workbench.sharding.tensor_parallel import GEMM

Role = Literal["activation", "weight", "gradient"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32

PLACES = {"attention": ".self_attn.", "mlp": ".mlp."}
"""Part of a decoder -> what the names of its linear layers contain, in `transformers`."""


def use_gemm_formats(model: Any, formats: Mapping[str, str]) -> Any:
    """Compute the linear layers of some parts of a decoder in other formats, and return it.

    Args:
        model: of `transformers`, whole or this tp rank's shard, of which each operand is then scaled by itself.
        formats: part (of `PLACES`) -> format, or "dense" for parts that stay as they are.

    Backward: the same formats; see the table above.

    Raises:
        SpecError: a model without such layers, or with experts, whose weights are one tensor.
    """
    for part, name in formats.items():
        if name == "dense":
            continue
        layers: dict[str, Any] = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear) and PLACES[part] in path
        }
        experts = [path for path, module in model.named_modules() if type(module).__name__.endswith("Experts")]
        if not layers or (part == "mlp" and experts):
            kind = model.config.get_text_config().model_type
            raise SpecError(
                f"mixed_precision.{part}_gemms = {name!r}",
                found=f"experts at {listed(experts)}" if layers or experts else f"no linear layer in a {kind} model",
                rule=f"linear layers whose names contain {PLACES[part]!r}; the weights of experts are one tensor",
                fix=f"leave {part}_gemms out for this model",
            )
        for module in layers.values():
            vars(module)[GEMM] = functools.partial(_product, name)
            if "forward" not in vars(module):  # a row-parallel layer of tp has one, which takes its product
                module.forward = functools.partial(_forward, module)
    return model


def _forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
    output: Tensor = vars(layer)[GEMM](hidden, layer.weight.T)
    return output if layer.bias is None else output + layer.bias


def _product(name: str, hidden: Tensor, weight_IO: Tensor) -> Tensor:
    output: Tensor = _RoundedLinear.apply(hidden, weight_IO.T, name)
    return output


class _RoundedLinear(Function):
    """x W^T with operands rounded to a format. Shapes: [..., I], [O, I] -> [..., O]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_OI: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(hidden, weight_OI)
        ctx.name = name
        hidden_TI = hidden.reshape(-1, hidden.shape[-1])
        output_TO = rounded(hidden_TI, name, "activation") @ rounded(weight_OI, name, "weight").T
        return output_TO.to(hidden.dtype).reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight_OI = ctx.saved_tensors
        hidden_TI = hidden.reshape(-1, hidden.shape[-1])
        gradient_TO = gradients[0].reshape(-1, weight_OI.shape[0])
        to_hidden = rounded(gradient_TO, ctx.name, "gradient") @ rounded(weight_OI.T, ctx.name, "weight").T
        to_weight = rounded(gradient_TO.T, ctx.name, "gradient") @ rounded(hidden_TI.T, ctx.name, "activation").T
        return to_hidden.to(hidden.dtype).reshape(hidden.shape), to_weight.to(weight_OI.dtype), None


def rounded(operand_NK: Tensor, name: str, role: Role) -> Tensor:
    """Round a GEMM operand to a format; the values, in float32, or float64 for a float64 operand.

    Shapes: [N, K] -> [N, K].
    """
    wide_NK = operand_NK.to(torch.promote_types(operand_NK.dtype, torch.float32))
    if name == "tf32":
        return round_to_tf32(wide_NK)
    dtype = E5M2 if name == "fp8_tensorwise" and role == "gradient" else E4M3
    if name == "fp8_tensorwise":
        return _scaled(wide_NK, wide_NK.abs().amax(), dtype)
    if name == "fp8_rowwise":
        return _scaled(wide_NK, wide_NK.abs().amax(dim=1, keepdim=True), dtype)
    if name == "mxfp8":
        largest = _tile_maxima(wide_NK, 1, MX_BLOCK)
        emax = 8  # exponent of the largest power of two in e4m3
        exponent = torch.floor(torch.log2(largest.where(largest > 0, 1.0))) - emax
        return _by_tile(wide_NK, torch.exp2(exponent.clamp(min=-127.0)), 1, MX_BLOCK, E4M3)
    rows = BLOCK if role == "weight" else 1
    largest = _tile_maxima(wide_NK, rows, BLOCK)
    return _by_tile(wide_NK, largest.where(largest > 0, 1.0) / torch.finfo(E4M3).max, rows, BLOCK, E4M3)


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 to 10 bits of mantissa, halves away from zero; values that are not finite stay."""
    single = values.to(torch.float32)
    bits = (single.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(single.isfinite(), bits.view(torch.float32), single).to(values.dtype)


def _scaled(values: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Round with scales that take the largest magnitude to the largest number of the dtype."""
    scale = largest.where(largest > 0, 1.0) / torch.finfo(dtype).max
    return _rounded(values / scale, dtype) * scale


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype).to(values.dtype)


def _tile_maxima(values_NK: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each tile; the last ones of a dimension may be smaller. Shapes: [N, K] -> [n, k]."""
    padded = _padded(values_NK.abs(), rows, columns)
    tiles = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return tiles.amax(dim=(1, 3))


def _by_tile(values_NK: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    scale_NK = whole[: values_NK.shape[0], : values_NK.shape[1]]
    return _rounded(values_NK / scale_NK, dtype) * scale_NK


def _padded(values_NK: Tensor, rows: int, columns: int) -> Tensor:
    below, right = -values_NK.shape[0] % rows, -values_NK.shape[1] % columns
    return nn.functional.pad(values_NK, (0, right, 0, below))
