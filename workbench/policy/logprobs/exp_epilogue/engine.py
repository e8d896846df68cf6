"""The engine whose GEMM writes exponentials: the speed of the GEMMs alone, and the memory of one chunk.

A chunk saves E = exp(z - z_target) in the operands' width; `kernels` and `gradient_kernels` have the formulas. If the
loss depends only on the log-probability (and the log-normaliser), backward is one element and two GEMMs:

    d hidden = scale (E @ W),       d weight += E^T @ (scale hidden)

An entropy or squared-logit gradient, a soft cap and float16 take one pass over E in between. Over tp, one all-reduce of
C numbers completes the targets' logits and one of up to 3C the chunk; no maximum is reduced.

The mean logit needs no logits: it is the hidden state times the mean of the head's rows, unless a soft cap bends it:

    mean z = logit_scale (h . mean w + mean b) / temperature

A row whose target is less likely than exp(-60) overflows. If the head is not sharded, a slow kernel computes its
outputs with its maximum; its gradient is zero, and the driver computes it by an exact engine.

Source:   the exponential in the GEMM's epilogue: quack 0.6.5, `linear_cross_entropy` scaled-exp, which shifts each
tile by its own maximum; one shift per row, its target's logit, makes plain GEMMs of E sufficient.

Letters: C rows of a chunk | V vocabulary (this rank's valid rows of the head) | D model dimension | N tiles
| F sums of a row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.errors import SpecError
from workbench.policy.logprobs.engine import (
    Accumulators,
    Chunk,
    Keep,
    RowGradients,
    add_gemm_,
    count_gemm,
    exact_float32,
)
from workbench.policy.logprobs.exp_epilogue import gradient_kernels, kernels
from workbench.policy.logprobs.exp_epilogue.tiles import Tile, aligned, block_of, choose_tile, processors
from workbench.policy.logprobs.head import Head, TokenLogprobs
from workbench.sharding.collectives import all_sum


@dataclass(frozen=True)
class Saved:
    """Tensors that a chunk saves for its backward.

    Attributes:
        exponentials_CV: exp(z - shift), or the negative exponent in bits if that would underflow (``exponents``).
        totals_FC: S, and X in bits if entropy was requested, over all ranks.
        shifts_C: the targets' logits.
        exponents: True if exponents too small for an exponential are stored instead of it.
    """

    exponentials_CV: Tensor
    totals_FC: Tensor
    shifts_C: Tensor
    exponents: bool


class ExpEpilogueEngine:
    """Exponentials of a chunk's shifted logits, and their row sums, from one GEMM.

    A tile of None takes the fastest on this device.

    Raises:
        SpecError: operands that the kernels cannot take.
    """

    def __init__(self, head: Head, *, tile: Tile | None = None) -> None:
        weight_VD = head.weight_VD
        if why := kernels.unsupported_reason(weight_VD.dtype, weight_VD.device):
            raise SpecError(
                "token_logprobs: implementation 'triton'",
                found=why,
                rule=f"one of {kernels.DTYPES} on CUDA",
                fix="choose implementation='chunked', which needs only torch",
            )
        self.head = head
        self._tile = tile or choose_tile(weight_VD.dtype, weight_VD.device)
        self._weight_VD = aligned(weight_VD[: head.valid])
        self._bias_V = None if head.bias_V is None else head.bias_V[: head.valid].to(torch.float32).contiguous()
        self._weight_tiles = None
        if head.valid:
            block = [self._tile.columns, self._tile.depth]
            self._weight_tiles = TensorDescriptor.from_tensor(self._weight_VD, block)
        self._scratch = torch.empty(0, dtype=self._kept_dtype, device=weight_VD.device)

    def saved_bytes(self, rows: int) -> int:
        """Bytes of the exponentials of this many rows, and their sums."""
        return rows * (self._stride * self._kept_dtype.itemsize + 16)  # 16: shift and up to three sums in float32

    def forward(
        self, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor, *, outputs: frozenset[str], keep: Keep
    ) -> Chunk:
        """See `engine.Engine.forward`."""
        with self._on_device():
            hidden_CD = aligned(hidden_CD)
            shifts_C = self._target_logits(hidden_CD, targets_C, temperature)
            exponents = keep != "no" and "mean_squared_logit" in outputs
            exponentials_CV = None if keep == "no" else self._buffer(len(hidden_CD), keep)
            sums_FNC = self._exponentials(hidden_CD, shifts_C, temperature, exponentials_CV, outputs, exponents)
            out, overflowed_C, totals_FC = self._outputs(hidden_CD, temperature, sums_FNC, shifts_C, outputs)
            if "mean_logit" in outputs:
                out = out._replace(mean_logit_T=self._mean_logits(hidden_CD, temperature))
        count_gemm(len(hidden_CD))
        saved = None if exponentials_CV is None else Saved(exponentials_CV, totals_FC, shifts_C, exponents)
        return Chunk(
            hidden_CD, targets_C, temperature, out, saved, overflowed_C, outputs_are_exact=not self.head.is_split
        )

    def backward(self, chunk: Chunk, gradients: RowGradients, into: Accumulators, rows: slice, *, first: bool) -> None:
        """See `engine.Engine.backward`."""
        head, hidden_CD, depth = self.head, chunk.hidden_CD, chunk.hidden_CD.shape[1]
        with self._on_device(), exact_float32(hidden_CD.dtype):
            gradient_CV, scaled_CD, scales_C = self._gradient(chunk, gradients)
            chunk.saved = None
            if into.hidden_TD is not None:
                hidden_gradient_CD = into.hidden_TD[rows]
                torch.mm(gradient_CV, self._weight_VD, out=hidden_gradient_CD)
                gradient_kernels.scale_rows[(len(hidden_CD),)](
                    hidden_gradient_CD, scales_C, depth, *hidden_gradient_CD.stride(), BLOCK=block_of(depth)
                )
                count_gemm(len(hidden_CD))
            if into.weight_VD is not None:
                add_gemm_(into.weight_VD[: head.valid], gradient_CV, scaled_CD, first=first)
                if first:
                    into.weight_VD[head.valid :].zero_()
                count_gemm(len(hidden_CD))
            if into.bias_V is not None:
                self._add_bias(gradient_CV, scales_C, into.bias_V, first=first)
            if gradients.mean_logit_T is not None:
                self._add_mean_logits(chunk, gradients.mean_logit_T, into, rows)

    @property
    def _kept_dtype(self) -> torch.dtype:  # the range of float32 in 16 bits: float16 would overflow
        return torch.float32 if self.head.weight_VD.dtype == torch.float32 else torch.bfloat16

    @property
    def _stride(self) -> int:
        """Elements from one row of exponentials to the next: whole cache lines."""
        return -(-max(1, self.head.valid) // 64) * 64

    @property
    def _soft_cap(self) -> float:
        return 1.0 if self.head.soft_cap is None else self.head.soft_cap

    def _on_device(self) -> AbstractContextManager[Any]:
        weight_VD = self._weight_VD
        return torch.cuda.device(weight_VD.device) if weight_VD.is_cuda else nullcontext()

    def _buffer(self, rows: int, keep: Keep) -> Tensor:
        size = rows * self._stride
        if keep != "own" and len(self._scratch) < size:
            self._scratch = self._scratch.new_empty(0)  # free the smaller one first
            self._scratch = self._scratch.new_empty(size)
        buffer = self._scratch.new_empty(size) if keep == "own" else self._scratch[:size]
        if (
            not buffer.is_cuda
        ):  # oneDNN's AMX GEMM multiplies one column past an odd K by zero: NaN if it is (torch 2.13)
            buffer.zero_()
        return buffer.view(rows, self._stride)[:, : self.head.valid]

    def _temperatures(self, temperature: float | Tensor) -> tuple[Tensor | None, float]:
        if isinstance(temperature, Tensor):
            return temperature.to(torch.float32).contiguous(), 1.0
        return None, temperature

    def _target_logits(self, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor) -> Tensor:
        head, (rows, depth) = self.head, hidden_CD.shape
        temperatures_C, one = self._temperatures(temperature)
        logits_C = torch.empty(rows, dtype=torch.float32, device=hidden_CD.device)
        kernels.target_logits[(rows,)](
            hidden_CD,
            self._weight_VD,
            self._bias_V,
            targets_C,
            temperatures_C,
            logits_C,
            head.valid,
            depth,
            hidden_CD.stride(0),
            self._weight_VD.stride(0),
            head.first_token,
            head.logit_scale,
            self._soft_cap,
            one,
            BIAS=self._bias_V is not None,
            CAP=head.soft_cap is not None,
            PER_ROW=temperatures_C is not None,
            BLOCK=block_of(depth),
        )
        return all_sum(logits_C, head.axis) if head.axis is not None and head.is_split else logits_C

    @cached_property
    def _sum_D(self) -> Tensor:
        """Sum of this rank's rows of the head, in float32."""
        if self.head.soft_cap is not None:
            raise SpecError(
                "token_logprobs: mean_logit by implementation 'triton'",
                found=f"soft_cap = {self.head.soft_cap}",
                rule="the mean of the logits is a product with the mean row of the head, which a soft cap breaks",
                fix="take implementation='chunked' (policy.logprobs: chunked), which needs only torch",
            )
        return self._weight_VD.sum(0, dtype=torch.float32)

    def _slope(self, temperature: float | Tensor) -> float | Tensor:
        """Derivative of logits by dot products, one or [C], in float32 whatever the dtype of temperatures."""
        temperatures_C, one = self._temperatures(temperature)
        return self.head.logit_scale / (one if temperatures_C is None else temperatures_C)

    def _mean_logits(self, hidden_CD: Tensor, temperature: float | Tensor) -> Tensor:
        """Mean over the whole vocabulary of each row's logits; [C], float32."""
        head, bias_V = self.head, self._bias_V
        last = self._sum_D.new_zeros(1) if bias_V is None else bias_V.sum()[None]
        local = torch.cat([self._sum_D, last])
        whole = all_sum(local, head.axis) if head.axis is not None and head.is_split else local
        mean = whole / head.vocabulary
        return (hidden_CD.float() @ mean[:-1] + mean[-1]) * self._slope(temperature)

    def _add_mean_logits(self, chunk: Chunk, gradient_C: Tensor, into: Accumulators, rows: slice) -> None:
        """Add the adjoint of `_mean_logits`; an overflowed row, which the exact engine takes, adds nothing."""
        head, hidden_CD = self.head, chunk.hidden_CD
        slope_C = gradient_C.to(torch.float32) * self._slope(chunk.temperature) / head.vocabulary
        if chunk.overflowed_C is not None:
            slope_C = slope_C.masked_fill(chunk.overflowed_C, 0)
        if into.hidden_TD is not None:
            into.hidden_TD[rows] += slope_C[:, None] * self._sum_D
        if into.weight_VD is not None:
            counted_CD = hidden_CD.float().masked_fill((slope_C == 0)[:, None], 0)
            into.weight_VD[: head.valid] += slope_C @ counted_CD
        if into.bias_V is not None:
            into.bias_V[: head.valid] += slope_C.sum()

    def _exponentials(
        self,
        hidden_CD: Tensor,
        shifts_C: Tensor,
        temperature: float | Tensor,
        exponentials_CV: Tensor | None,
        requested: frozenset[str],
        exponents: bool,
    ) -> Tensor:
        """S, and X and Q if requested, [F, N, C]: by tiles, or over all ranks of a split head (N is 1).

        Exponentials are written if a buffer is given.
        """
        head, tile, (rows, depth) = self.head, self._tile, hidden_CD.shape
        temperatures_C, one = self._temperatures(temperature)
        entropy, squares = "entropy" in requested, "mean_squared_logit" in requested
        tiles, kinds = triton.cdiv(head.valid, tile.columns), 1 + entropy + squares
        sums_FNC = torch.empty(kinds, max(1, tiles), rows, dtype=torch.float32, device=hidden_CD.device)
        if self._weight_tiles is None:
            sums_FNC.zero_()
        else:
            hidden_tiles = TensorDescriptor.from_tensor(hidden_CD, [tile.rows, tile.depth])
            out_tiles, store = hidden_tiles, exponentials_CV is not None
            if store:
                out_tiles = TensorDescriptor.from_tensor(exponentials_CV, [tile.rows, tile.columns // 2])
            at_once = processors(hidden_CD.device)
            kernels.exp_gemm[(min(at_once, triton.cdiv(rows, tile.rows) * tiles),)](
                hidden_tiles,
                self._weight_tiles,
                out_tiles,
                self._bias_V,
                shifts_C,
                temperatures_C,
                sums_FNC,
                rows,
                head.valid,
                depth,
                head.logit_scale,
                self._soft_cap,
                one,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                DEPTH=tile.depth,
                GROUP=tile.group,
                PROGRAMS=at_once,
                PRECISION=tile.precision,
                STORE=store,
                EXPONENTS=exponents,
                ENTROPY=entropy,
                SQUARES=squares,
                BIAS=self._bias_V is not None,
                CAP=head.soft_cap is not None,
                PER_ROW=temperatures_C is not None,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        if head.axis is None or not head.is_split:
            return sums_FNC
        totals_FC = sums_FNC.new_empty(kinds, rows)
        kernels.add_tiles[(triton.cdiv(rows, 32), kinds)](
            sums_FNC, totals_FC, rows, sums_FNC.shape[1], ROWS=32, TILES=32
        )
        return all_sum(totals_FC, head.axis)[:, None]

    def _outputs(
        self,
        hidden_CD: Tensor,
        temperature: float | Tensor,
        sums_FNC: Tensor,
        shifts_C: Tensor,
        requested: frozenset[str],
    ) -> tuple[TokenLogprobs, Tensor, Tensor]:
        """Head outputs from the sums, overflowed rows, and totals [F, C].

        Outputs of overflowed rows are from the logits, unless other ranks hold some of them.
        """
        head, (rows, depth) = self.head, hidden_CD.shape
        entropy, squares = "entropy" in requested, "mean_squared_logit" in requested
        outputs = logprobs_C, entropy_C, logsumexp_C, squares_C = shifts_C.new_empty(4, rows).unbind()
        overflowed_C = torch.empty(rows, dtype=torch.int8, device=shifts_C.device)
        kinds, tiles, _ = sums_FNC.shape
        totals_FC = sums_FNC.new_empty(kinds, rows)
        kernels.write_outputs[(triton.cdiv(rows, 32),)](
            sums_FNC,
            totals_FC,
            shifts_C,
            *outputs,
            overflowed_C,
            rows,
            tiles,
            float(head.vocabulary),
            ENTROPY=entropy,
            SQUARES=squares,
            ROWS=32,
            TILES=32,
        )
        if not head.is_split:
            temperatures_C, one = self._temperatures(temperature)
            kernels.write_overflowed_outputs[(triton.cdiv(rows, 8),)](
                hidden_CD,
                self._weight_VD,
                self._bias_V,
                shifts_C,
                temperatures_C,
                overflowed_C,
                *outputs,
                rows,
                head.valid,
                float(head.vocabulary),
                depth,
                hidden_CD.stride(0),
                self._weight_VD.stride(0),
                head.logit_scale,
                self._soft_cap,
                one,
                ENTROPY=entropy,
                SQUARES=squares,
                BIAS=self._bias_V is not None,
                CAP=head.soft_cap is not None,
                PER_ROW=temperatures_C is not None,
                ROWS=8,
                COLUMNS=64,
                DEPTH=min(128, triton.next_power_of_2(depth)),
            )
        output = TokenLogprobs(logprobs_C, entropy_C if entropy else None, logsumexp_C, squares_C if squares else None)
        return output, overflowed_C.view(torch.bool), totals_FC

    def _gradient(self, chunk: Chunk, gradients: RowGradients) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of the logits up to a scale per row [C, V], hidden rows times their scales, and the scales."""
        head, hidden_CD, saved = self.head, chunk.hidden_CD, chunk.saved
        rows, depth = hidden_CD.shape
        temperatures_C, one = self._temperatures(chunk.temperature)
        logprob_C, entropy_C, logsumexp_C, squares_C = (
            None if g_C is None else g_C.to(torch.float32).contiguous() for g_C in gradients[:4]
        )
        exponentials_CV, gradient_CV = saved.exponentials_CV, saved.exponentials_CV.view(hidden_CD.dtype)
        scaled_CD = torch.empty((rows, depth), dtype=hidden_CD.dtype, device=hidden_CD.device)
        scales_C = torch.empty_like(saved.shifts_C)
        stride, hidden_stride = exponentials_CV.stride(0), hidden_CD.stride(0)
        needs_pass = (
            entropy_C is not None
            or squares_C is not None
            or head.soft_cap is not None
            or saved.exponents
            or hidden_CD.dtype == torch.float16
        )
        if needs_pass and head.valid:
            gradient_kernels.write_gradient[(rows * triton.cdiv(head.valid, 4096),)](
                exponentials_CV,
                gradient_CV,
                hidden_CD,
                scaled_CD,
                scales_C,
                saved.totals_FC,
                saved.shifts_C,
                chunk.targets_C,
                temperatures_C,
                chunk.overflowed_C,
                logprob_C,
                logsumexp_C,
                entropy_C,
                squares_C,
                rows,
                head.valid,
                float(head.vocabulary),
                depth,
                stride,
                hidden_stride,
                head.first_token,
                head.logit_scale,
                self._soft_cap,
                one,
                LOGPROB=logprob_C is not None,
                LOGSUMEXP=logsumexp_C is not None,
                ENTROPY=entropy_C is not None,
                SQUARES=squares_C is not None,
                EXPONENTS=saved.exponents,
                CAP=head.soft_cap is not None,
                PER_ROW=temperatures_C is not None,
                FAST=hidden_CD.is_cuda,
                BLOCK=4096,
                DEPTH=block_of(depth),
                num_warps=8,
            )
        else:
            gradient_kernels.fold_target[(rows,)](
                exponentials_CV,
                hidden_CD,
                scaled_CD,
                scales_C,
                saved.totals_FC,
                chunk.targets_C,
                temperatures_C,
                chunk.overflowed_C,
                logprob_C,
                logsumexp_C,
                head.valid,
                depth,
                stride,
                hidden_stride,
                head.first_token,
                head.logit_scale,
                one,
                LOGPROB=logprob_C is not None,
                LOGSUMEXP=logsumexp_C is not None,
                PER_ROW=temperatures_C is not None,
                BLOCK=block_of(depth),
            )
        return gradient_CV, scaled_CD, scales_C

    def _add_bias(self, gradient_CV: Tensor, scales_C: Tensor, bias_V: Tensor, *, first: bool) -> None:
        rows, columns = gradient_CV.shape
        if first:
            bias_V[columns:].zero_()
        if columns:
            gradient_kernels.add_columns[(triton.cdiv(columns, 128),)](
                gradient_CV, scales_C, bias_V, rows, columns, gradient_CV.stride(0), FIRST=first, ROWS=32, BLOCK=128
            )
