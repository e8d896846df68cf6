"""Stochastic arithmetic: every operation of a forward pass computed in float64 and rounded up or down at random.

Within `RandomRounding`, each operation that torch dispatches takes its inputs as they are, computes in float64, and
rounds its outputs to the dtype that they would have had: up or down, with the probabilities that make the result right
in the mean (stochastic rounding). So a model keeps its own places of rounding, float32 norms in a bfloat16 trunk
included, and no list of modules is needed. The variance of this rounding is twice that of rounding to nearest: over
the place x between two neighbours, E[x (1 - x)] = 1/6 against 1/12 of a squared unit, so its standard deviation over
sqrt(2) is that of an independent rounding to nearest.

A GEMM in float32 adds its products one by one, in runs: their partial sums are rounded as well. The variance of that is
drawn from the partial sums of `BLOCKS` parts of each run. On a CPU runs are of `RUN` products; a GPU's libraries cut
sums by the sizes of all three dimensions, so there the error on random numbers tells into how many. A GEMM in bfloat16
or float16 adds in float32, whose rounding is 2^-16 or 2^-13 of its own.

Source: Parker, Monte Carlo Arithmetic (1997); Connolly, Higham, Mary, Stochastic rounding and its probabilistic
        backward error analysis, SIAM J. Sci. Comput. 43 (2021), for the mean and variance.

Letters: N rows | K inner dimension | M columns | B batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from workbench.errors import SpecError

NEAREST = math.sqrt(2.0)
"""Standard deviation of stochastic rounding over that of rounding to nearest."""
RUN = 192
"""Products that a float32 GEMM of a CPU adds before it adds the sum to those of other runs.

As measured for inner dimensions of 16 to 1536 of torch 2.13 with MKL on x86-64, whose error is that of one sum up to
192, and grows no further."""
MOST_RUNS = 64
"""Runs up to which a GPU's sums are tried to be cut; a convention: of 3,072 products these are 48 each."""
BLOCKS = 8
"""Parts of a run at which the size of its sum is taken."""
MANTISSA = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
"""Bits of the significand, the hidden one included. Source: IEEE 754; bfloat16, Intel whitepaper 40."""
GEMMS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"


class RandomRounding(TorchDispatchMode):
    """Round the outputs of every operation inside at random; ``generator`` draws, on the device of the operations.

    Raises:
        SpecError: in a float64 model, which has no rounding to speak of.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(ATTENTION):
            return self._attention(func, args, kwargs)
        returns = func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return func(*args, **kwargs)  # a view
        if func._schema.is_mutable:
            return self._in_place(name, func, args, kwargs)
        if name in STEPS and args[0].dtype in MANTISSA:
            return STEPS[name](self, args, func(*args, **kwargs).dtype)
        plain = func(*args, **kwargs)
        outputs = plain if isinstance(plain, tuple | list) else (plain,)
        if not any(isinstance(one, Tensor) and one.dtype in MANTISSA for one in outputs):
            return plain
        wide = func(*tree_map(_wide, args), **tree_map(_wide, kwargs))
        wides = wide if isinstance(wide, tuple | list) else (wide,)
        rounded = [self._rounded(w, p) for w, p in zip(wides, outputs, strict=True)]
        if name in GEMMS and outputs[0].dtype == torch.float32:
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            runs = 0 if left.device.type == "cpu" else measured_runs(left.shape, right.shape)
            error = self.partial_sums(left.double(), right.double(), runs)
            rounded[0] = self.round(wides[0] + error, torch.float32)
        return type(plain)(rounded) if isinstance(plain, tuple | list) else rounded[0]

    def round(self, wide: Tensor, dtype: torch.dtype) -> Tensor:
        """Round float64 values at random."""
        return stochastic(wide, dtype, self.generator)

    def _in_place(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        changed = args[0]
        if not isinstance(changed, Tensor) or "out" in kwargs:
            raise SpecError(
                "measure the floor",
                found=f"an operation that writes to an argument, {name}",
                rule="operations with new outputs, or in place on their first argument",
                fix="use a model of transformers without it",
            )
        if changed.dtype not in MANTISSA:
            return func(*args, **kwargs)
        wide = func(changed.double(), *tree_map(_wide, args[1:]), **tree_map(_wide, kwargs))
        return changed.copy_(self.round(wide, changed.dtype))

    def _rounded(self, wide: Any, plain: Any) -> Any:
        if not isinstance(wide, Tensor) or plain.dtype not in MANTISSA:
            return plain
        return stochastic(wide, plain.dtype, self.generator)

    def partial_sums(self, left: Tensor, right: Tensor, runs: int = 0) -> Tensor:
        """A draw of the error of adding float32 products one by one, in so many runs.

        0 runs: as many as `RUN` asks for on a CPU, and one elsewhere, as in a kernel of attention.

        Shapes: [.., N, K], [.., K, M] -> [.., N, M].
        """
        on_cpu = left.device.type == "cpu"
        variance = variance_of_sums(left, right, runs or (-(-left.shape[-1] // RUN) if on_cpu else 1))
        draw = torch.randn(variance.shape, generator=self.generator, device=left.device, dtype=torch.float64)
        return draw * variance.sqrt()

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention as flash kernels compute it: scores and sums in float32, weights rounded before the second GEMM."""
        plain, given = func(*args, **kwargs), by_name(func, args, kwargs)
        query, key, value = (a.double() for a in args[:3])
        dtype, wide = args[0].dtype, torch.float32
        scale = given.get("scale") or 1 / math.sqrt(query.shape[-1])
        if key.shape[1] != query.shape[1]:
            key, value = (a.repeat_interleave(query.shape[1] // a.shape[1], 1) for a in (key, value))
        products = query @ key.transpose(-1, -2)
        scores = self.round((products + self.partial_sums(query, key.transpose(-1, -2))) * scale, wide).double()
        mask = given.get("attn_mask", given.get("attn_bias"))
        if given["is_causal"]:
            rows, columns = scores.shape[-2:]
            scores = scores.masked_fill(
                torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1), -torch.inf
            )
        elif mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        away = self.round(scores - scores.amax(-1, keepdim=True), wide).double()
        weights = self.round(away.exp(), wide).double()
        total = self.round(weights.sum(-1, keepdim=True), wide).double()
        kept = self.round(weights, dtype).double()
        mixed = self.round(kept @ value + self.partial_sums(kept, value), wide).double()
        output = self.round(mixed / total, dtype)
        return (output, *plain[1:]) if isinstance(plain, tuple | list) else output


def variance_of_sums(left: Tensor, right: Tensor, runs: int) -> Tensor:
    """Variance of stochastic rounding in sums of float64 products that are added one by one in float32, in runs.

    Shapes: [.., N, K], [.., K, M] -> [.., N, M].
    """
    total = left[..., :0] @ right[..., :0, :]
    variance = torch.zeros_like(total)
    for first, last in _even(0, left.shape[-1], runs):
        own = torch.zeros_like(total)
        for start, end in _even(first, last, BLOCKS):
            own = own + left[..., start:end] @ right[..., start:end, :]
            variance = variance + (end - start) * unit(own, torch.float32).square() / 6
        total = total + own
        variance = variance + (unit(total, torch.float32).square() / 6 if runs > 1 else 0)
    return variance


@functools.cache
def measured_runs(left: torch.Size, right: torch.Size, device: str = "cuda") -> int:
    """Runs whose error is nearest to that of this device's float32 GEMM on normal random numbers, once per shapes.

    A power of two up to `MOST_RUNS`.
    """
    generator = torch.Generator(device).manual_seed(0)
    transposed = torch.Size((*right[:-2], right[-1], right[-2]))  # as weights are: kernels depend on it
    one, other = (torch.randn(shape, generator=generator, device=device) for shape in (left, transposed))
    other = other.mT
    exact = one.double() @ other.double()
    real = float(((one @ other).double() - exact).square().mean())
    last = unit(exact, torch.float32).square() / 12  # the rounding of the sum itself, to nearest

    def apart(runs: int) -> float:
        expected = float((variance_of_sums(one.double(), other.double(), runs) / 2 + last).mean())
        return abs(math.log(expected / real)) if real else float(runs)

    return min((2**power for power in range(MOST_RUNS.bit_length())), key=apart)


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema: kernels have them in orders of their own."""
    arguments = func._schema.arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return defaults | dict(zip((one.name for one in arguments), args, strict=False)) | dict(kwargs)


def _log_softmax(mode: RandomRounding, args: Any, dtype: torch.dtype) -> Tensor:
    """Differences from the largest, the log of their sum, and the difference of both, each rounded in float32."""
    values, dim = args[0].double(), args[1]
    away = mode.round(values - values.amax(dim, keepdim=True), torch.float32).double()
    total = mode.round(mode.round(away.exp(), torch.float32).double().sum(dim, keepdim=True), torch.float32)
    return mode.round(away - mode.round(total.double().log(), torch.float32).double(), dtype)


def _softmax(mode: RandomRounding, args: Any, dtype: torch.dtype) -> Tensor:
    values, dim = args[0].double(), args[1]
    away = mode.round(values - values.amax(dim, keepdim=True), torch.float32).double()
    weights = mode.round(away.exp(), torch.float32).double()
    return mode.round(weights / mode.round(weights.sum(dim, keepdim=True), torch.float32).double(), dtype)


def _silu(mode: RandomRounding, args: Any, dtype: torch.dtype) -> Tensor:
    values = args[0].double()
    below = mode.round(1 + mode.round((-values).exp(), torch.float32).double(), torch.float32).double()
    return mode.round(values / below, dtype)


STEPS = {"_log_softmax": _log_softmax, "_softmax": _softmax, "silu": _silu}
"""Operations that round in float32 inside."""


def _even(first: int, last: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cut a range into even parts, of which none is empty."""
    cuts = [first + (last - first) * part // parts for part in range(parts + 1)]
    yield from ((start, end) for start, end in pairwise(cuts) if end > start)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in MANTISSA:
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value in MANTISSA else value


def unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbours of a dtype around float64 values; at zero that of the smallest normal number."""
    info = torch.finfo(dtype)
    exponent = values.abs().clamp(info.tiny, info.max).view(torch.int64) >> 52  # of float64, whose sign is 0 here
    return (exponent + (1 - MANTISSA[dtype]) << 52).view(torch.float64)


def stochastic(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float64 values to a dtype, up or down at random so that the mean is right; what it has stays as it is."""
    if not values.is_floating_point() or not values.numel():
        return values.to(dtype)
    step = unit(values, dtype)
    place = values / step
    draw = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float64)
    rounded = (torch.floor(place + draw) * step).to(dtype)
    return torch.where(values.isfinite(), rounded, values.to(dtype))
