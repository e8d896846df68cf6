"""Modules of a decoder, computed in canonical pieces; gradients of weights go to exact sums, not through autograd.

A weight is an input of each function, so that outputs require a gradient, and is stored as an attribute of the context,
not as a saved tensor, which under checkpointing would be restored as another object.

Letters: T tokens of a rank | K, N columns and rows of a weight | D width | V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.reproducible.exact_sums import Accumulator
from workbench.reproducible.rows import sum_over_pieces
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class Pieces:
    """Canonical pieces: ``block`` tokens, and ``here`` pieces of each weight on this rank, the others over tp.

    ``kernels`` is the module that computes them.
    """

    kernels: ModuleType
    block: int
    here: int
    tp: Axis

    @property
    def is_whole(self) -> bool:
        """True if a weight is one piece, so that there is no sum over pieces."""
        return self.here == 1 and self.tp.size == 1


Sums = tuple[Accumulator, Accumulator | None]
"""Exact sums of the gradients of a weight, with a partial per block, and of its bias, with a partial per token."""


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, by_outputs: bool, into: Sums, pieces: Pieces) -> Tensor:
    """Multiply x @ weight.T + bias, with outputs or inputs sharded over tp.

    ``by_outputs``: the pieces are rows of this rank's shard of the weight (a column-parallel layer), not columns.

    Shapes:   [..., K] -> [..., N].
    Layout:   tp: replicated in, sharded out by outputs; by inputs sharded in, replicated out.
    Backward: to x; by outputs the sum over the pieces of all tp ranks, by pairs.
    """
    return _Linear.apply(x, weight_NK, bias_N, by_outputs, into, pieces)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, by_outputs: bool, into: Sums, pieces: Pieces
    ) -> Tensor:
        x_TK = x.contiguous().flatten(0, -2)
        ctx.save_for_backward(x_TK)
        ctx.weight_NK, ctx.shape, ctx.by_outputs, ctx.pieces = weight_NK, x.shape, by_outputs, pieces
        ctx.into = into
        matmul, here = pieces.kernels.matmul, pieces.here
        height = len(weight_NK)
        if by_outputs or pieces.is_whole:
            y_TN = matmul(x_TK, weight_NK, pieces.block, height // (here if by_outputs else 1))
        else:
            columns = zip(x_TK.chunk(here, 1), weight_NK.chunk(here, 1), strict=True)
            parts = [matmul(x, weight, pieces.block, height, torch.float32) for x, weight in columns]
            y_TN = sum_over_pieces(parts, pieces.tp).to(x.dtype)
        if bias_N is not None:
            y_TN = y_TN + bias_N
        return y_TN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_TK,), weight_NK, pieces, (into, into_bias) = ctx.saved_tensors, ctx.weight_NK, ctx.pieces, ctx.into
        kernels, here, width = pieces.kernels, pieces.here, weight_NK.shape[1]
        dy_TN = dy.contiguous().flatten(0, -2)
        tile = (len(weight_NK) // here, width) if ctx.by_outputs else (len(weight_NK), width // here)
        kernels.add_outer(into.total, into.peak, into.scale, dy_TN, x_TK, pieces.block, tile)
        if into_bias is not None:
            kernels.add_rows(into_bias.total, into_bias.peak, into.scale, dy_TN)
        if not ctx.by_outputs or pieces.is_whole:
            dx_TK = kernels.matmul_backward(dy_TN, weight_NK, pieces.block, tile[1])
        else:
            rows = zip(dy_TN.chunk(here, 1), weight_NK.chunk(here), strict=True)
            parts = [kernels.matmul_backward(dy, weight, pieces.block, width, torch.float32) for dy, weight in rows]
            dx_TK = sum_over_pieces(parts, pieces.tp).to(dy_TN.dtype)
        into.added()  # not before: the GEMM would wait for the processors that a sum over ranks takes
        return dx_TK.view(ctx.shape), None, None, None, None, None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, into: Accumulator, pieces: Pieces) -> Tensor:
    """Divide each row by its root mean square, times a weight; the weight's gradient has a partial per row.

    Shapes:   x [..., D], weight_D [D] -> [..., D].
    """
    return _RMSNorm.apply(x, weight_D, eps, into, pieces)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, into: Accumulator, pieces: Pieces) -> Tensor:
        x_TD = x.contiguous().flatten(0, -2)
        y_TD, rstd_T = pieces.kernels.norm(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, rstd_T)
        ctx.weight_D, ctx.into, ctx.pieces = weight_D, into, pieces
        return y_TD.resize_(x.shape)  # no view: FSDP2 hangs its hooks on what a module returns

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD, rstd_T), into = ctx.saved_tensors, ctx.into
        dx_TD = ctx.pieces.kernels.norm_back(
            dy.contiguous().flatten(0, -2), x_TD, rstd_T, ctx.weight_D, into.total, into.peak, into.scale
        )
        return dx_TD.view(dy.shape), None, None, None, None


def embedding(tokens: Tensor, weight_VD: Tensor, first: int, into: Accumulator, pieces: Pieces) -> Tensor:
    """Look up rows of a weight, of which this rank holds those from ``first`` on; gradients have a partial per token.

    Shapes:   tokens [...] -> [..., D].
    Layout:   tp: sharded(V) in, replicated out.
    """
    return _Embedding.apply(tokens, weight_VD, first, into, pieces)


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VD: Tensor, first: int, into: Accumulator, pieces: Pieces) -> Tensor:
        local = tokens - first
        ctx.here = (local >= 0) & (local < len(weight_VD))
        ctx.local, ctx.into, ctx.pieces = local.where(ctx.here, -1), into, pieces
        rows = weight_VD[local.where(ctx.here, 0)].masked_fill(~ctx.here[..., None], 0)
        return all_sum(rows + 0.0, pieces.tp)  # each row is on one rank; + 0.0 turns -0.0 into 0.0 also at tp = 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.into.add_at(ctx.pieces.kernels, dy.contiguous().flatten(0, -2), ctx.local.flatten())
        return None, None, None, None, None


def elementwise(x: Tensor, function: Callable[[Tensor], Tensor], pieces: Pieces) -> Tensor:
    """Apply an elementwise function, such as an activation. Shapes: [..., K] -> [..., K], sharded over tp."""
    return _Elementwise.apply(x, function, pieces)


class _Elementwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], pieces: Pieces) -> Tensor:
        x_TK = x.contiguous().flatten(0, -2)
        ctx.save_for_backward(x_TK)
        ctx.function, ctx.pieces = function, pieces
        return pieces.kernels.elementwise(function, x_TK, pieces.block, x_TK.shape[1] // pieces.here).view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x_TK,), pieces = ctx.saved_tensors, ctx.pieces
        dx_TK = pieces.kernels.elementwise_back(
            ctx.function, dy.contiguous().flatten(0, -2), x_TK, pieces.block, x_TK.shape[1] // pieces.here
        )
        return dx_TK.view(dy.shape), None, None


def rotary(
    function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, positions: Tensor, pieces: Pieces
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, block by block. Shapes: positions [1, T] -> [1, T, d] each."""
    blocks = [function(x, some) for some in positions.split(pieces.block, 1)]
    cos, sin = (torch.cat(one, 1) for one in zip(*blocks, strict=True))
    return cos, sin
