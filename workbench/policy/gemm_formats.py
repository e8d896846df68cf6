"""GEMMs of a decoder in TF32, FP8 or MXFP8: by tensor cores where these have the format, else with its values.

Each operand of a linear layer's three GEMMs (output, input gradient, weight gradient) is rounded to the format along
the dimension that the GEMM sums over. Where tensor cores multiply such operands, they do (`in_hardware`; bfloat16
results). Elsewhere the rounded values are multiplied in float32 (float64 in a float64 run): the arithmetic of the
format with accumulation in float32, and not its speed; the record of a run names the formats that were emulated.

    tf32             10 bits of mantissa
    fp8_tensorwise   one scale a tensor; activations and weights in e4m3, output gradients in e5m2
    fp8_rowwise      one scale a row of each operand; e4m3
    fp8_blockwise    tiles of 1 x 128 of activations and gradients, blocks of 128 x 128 of weights; e4m3
    mxfp8            one power of two for 32 numbers; e4m3

Source: torchao's float8 recipes (tensorwise, rowwise); DeepSeek-V3, arXiv 2412.19437, section 3.3.2 (blockwise); OCP
        Microscaling Formats specification 1.0, sections 5.1 and 6.3 (mxfp8).

Letters: T tokens | I inputs of a layer | O its outputs | K the dimension that a GEMM sums over | N, M rows of operands
         n, k tiles of a dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, cast

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
        output_TO = gemm(hidden_TI, weight_OI, name, ("activation", "weight"))
        return output_TO.reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight_OI = ctx.saved_tensors
        hidden_TI = hidden.reshape(-1, hidden.shape[-1])
        gradient_TO = gradients[0].reshape(-1, weight_OI.shape[0])
        to_hidden = gemm(gradient_TO, weight_OI.T, ctx.name, ("gradient", "weight"))
        to_weight = gemm(gradient_TO.T, hidden_TI.T, ctx.name, ("gradient", "activation"))
        return to_hidden.to(hidden.dtype).reshape(hidden.shape), to_weight.to(weight_OI.dtype), None


def gemm(left_NK: Tensor, right_MK: Tensor, name: str, roles: tuple[Role, Role]) -> Tensor:
    """Multiply two operands that are rounded to a format, in hardware where it has it; in the dtype of the left.

    Shapes: [N, K], [M, K] -> [N, M].
    """
    if in_hardware(name, left_NK.device, left_NK.dtype, right_MK.shape[0]):
        return _tf32_gemm(left_NK, right_MK) if name == "tf32" else _fp8_gemm(left_NK, right_MK, name, roles)
    product_NM = rounded(left_NK, name, roles[0]) @ rounded(right_MK, name, roles[1]).T
    return product_NM.to(left_NK.dtype)


def in_hardware(name: str, device: torch.device, dtype: torch.dtype, columns: int) -> bool:
    """True if tensor cores compute a GEMM of this format with so many columns (M), from operands of this dtype.

    Source: ``torch.nn.functional.scaled_mm`` (from torch 2.10) on CUDA: scales of tensors from compute capability 8.9,
            of rows from 9.0, of blocks on 9.0 with CUDA 12.9; M is a multiple of 16. cuBLAS has TF32 from 8.0.
    """
    if device.type != "cuda" or _emulated.get():
        return False
    capability = torch.cuda.get_device_capability(device)
    if name == "tf32":
        return dtype == torch.float32 and capability >= (8, 0)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    has = {
        "fp8_tensorwise": capability >= (8, 9),
        "fp8_rowwise": capability >= (9, 0),
        "fp8_blockwise": capability == (9, 0) and cuda >= (12, 9),
    }
    fits = dtype == torch.bfloat16 and columns % 16 == 0
    return fits and has.get(name, False) and hasattr(nn.functional, "scaled_mm")


_emulated: ContextVar[bool] = ContextVar("emulated", default=False)


@contextmanager
def emulating() -> Iterator[None]:
    """Emulate every format inside, whatever the device has: each operation is one of torch's own dtypes then."""
    token = _emulated.set(True)
    try:
        yield
    finally:
        _emulated.reset(token)


def emulated_formats(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Formats of a model's GEMMs, computed in this dtype, that are emulated on its device in one layer at least."""
    found = set()
    for module in model.modules():
        if GEMM in vars(module):
            name, weight_OI = vars(module)[GEMM].args[0], cast(Tensor, module.weight)
            if not all(in_hardware(name, weight_OI.device, dtype, size) for size in weight_OI.shape):
                found.add(name)
    return sorted(found)


def _tf32_gemm(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        return left_NK @ right_MK.T
    finally:
        settings.fp32_precision = before


def _fp8_gemm(left_NK: Tensor, right_MK: Tensor, name: str, roles: tuple[Role, Role]) -> Tensor:
    rows, scaling = left_NK.shape[0], nn.functional.ScalingType
    pad = -left_NK.shape[1] % BLOCK  # zeros change neither scales nor sums
    left_NK = nn.functional.pad(left_NK, (0, pad, 0, -rows % 16))  # cuBLAS wants columns of scales that are aligned
    operands, scales, recipes = [], [], []
    for operand, role in ((left_NK, roles[0]), (nn.functional.pad(right_MK, (0, pad)), roles[1])):
        codes, scale = _compiled_quantize()(operand.contiguous(), name, _acting(name, role))
        operands.append(codes)
        scales.append(scale)
        blocks = scaling.BlockWise128x128 if role == "weight" else scaling.BlockWise1x128
        recipes.append({"fp8_tensorwise": scaling.TensorWise, "fp8_rowwise": scaling.RowWise}.get(name, blocks))
    if name == "fp8_rowwise":
        scales[1] = scales[1].T
    if name == "fp8_blockwise":  # cuBLAS: scales of 1 x 128 column by column; of blocks transposed, k padded to 4
        left_Nk, right_Mk = scales
        as_block = nn.functional.pad(right_Mk, (0, -right_Mk.shape[1] % 4)).T
        scales = [left_Nk.T.contiguous().T, as_block if roles[1] == "weight" else right_Mk.T.contiguous().T]
    product_NM: Tensor = nn.functional.scaled_mm(
        operands[0], operands[1].T, scales[0], recipes[0], scales[1], recipes[1], output_dtype=torch.bfloat16
    )
    return product_NM[:rows]


@functools.cache
def _compiled_quantize() -> Callable[[Tensor, str, Role], tuple[Tensor, Tensor]]:
    """`quantize` in one pass over the operand; its quotients may be rounded otherwise in the last bit of float32."""
    compiled: Callable[[Tensor, str, Role], tuple[Tensor, Tensor]] = torch.compile(quantize, dynamic=True)
    return compiled


def _acting(name: str, role: Role) -> Role:
    """The role, where it changes the format, so that few variants are compiled."""
    acts = {"fp8_tensorwise": "gradient", "fp8_blockwise": "weight"}.get(name)
    return role if role == acts else "activation"


def rounded(operand_NK: Tensor, name: str, role: Role) -> Tensor:
    """Round a GEMM operand to a format; the values, in float32, or float64 for a float64 operand.

    Shapes: [N, K] -> [N, K].
    """
    wide_NK = operand_NK.to(torch.promote_types(operand_NK.dtype, torch.float32))
    if name == "tf32":
        return round_to_tf32(wide_NK)
    codes_NK, scales_nk = quantize(wide_NK, name, role)
    return codes_NK.to(wide_NK.dtype) * _spread(scales_nk, wide_NK, _tile(name, role, wide_NK))


def quantize(operand_NK: Tensor, name: str, role: Role) -> tuple[Tensor, Tensor]:
    """Quantize a GEMM operand to FP8 or MXFP8: codes, and the scale of each tile; codes times scales are the values.

    Shapes: [N, K] -> [N, K] float8, [n, k] float32 or float64.
    """
    wide_NK = operand_NK.to(torch.promote_types(operand_NK.dtype, torch.float32))
    dtype = E5M2 if name == "fp8_tensorwise" and role == "gradient" else E4M3
    limit, tile = torch.finfo(dtype).max, _tile(name, role, wide_NK)
    largest_nk = _tile_maxima(wide_NK, *tile)
    largest_nk = largest_nk.where(largest_nk > 0, 1.0)
    if name == "mxfp8":
        emax = 8  # exponent of the largest power of two in e4m3
        scales_nk = torch.exp2((torch.floor(torch.log2(largest_nk)) - emax).clamp(min=-127.0))
    else:
        scales_nk = largest_nk / limit
    return (wide_NK / _spread(scales_nk, wide_NK, tile)).clamp(-limit, limit).to(dtype), scales_nk


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 to 10 bits of mantissa, halves away from zero; values that are not finite stay."""
    single = values.to(torch.float32)
    bits = (single.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(single.isfinite(), bits.view(torch.float32), single).to(values.dtype)


def _tile(name: str, role: Role, operand_NK: Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows, columns = operand_NK.shape
    return {
        "fp8_tensorwise": (rows, columns),
        "fp8_rowwise": (1, columns),
        "fp8_blockwise": (BLOCK if role == "weight" else 1, BLOCK),
        "mxfp8": (1, MX_BLOCK),
    }[name]


def _tile_maxima(values_NK: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each tile; the last ones of a dimension may be smaller. Shapes: [N, K] -> [n, k]."""
    padded = _padded(values_NK.abs(), rows, columns)
    tiles = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return tiles.amax(dim=(1, 3))


def _spread(scales_nk: Tensor, like_NK: Tensor, tile: tuple[int, int]) -> Tensor:
    """The scale of each element, or of all that share one along a dimension."""
    for dim in (0, 1):
        if scales_nk.shape[dim] > 1 and tile[dim] > 1:
            scales_nk = scales_nk.repeat_interleave(tile[dim], dim).narrow(dim, 0, like_NK.shape[dim])
    return scales_nk


def _padded(values_NK: Tensor, rows: int, columns: int) -> Tensor:
    below, right = -values_NK.shape[0] % rows, -values_NK.shape[1] % columns
    return nn.functional.pad(values_NK, (0, right, 0, below))
