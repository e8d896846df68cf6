"""Canonical pieces of a network in plain torch: a loop over blocks of tokens, any device.

Every GEMM is of one block of tokens with one piece of a weight, so that its shape, and with it the kernel that a
library selects and its order of summation, is the same in every layout. Everything else is elementwise.

Letters: T tokens | b tokens of a block | K, N columns and rows of a weight | D width | S keys | H heads | d head
dimension | v columns of a piece of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.policy.logprobs.head import local_columns
from workbench.reproducible.blocks import Span
from workbench.reproducible.rows import mean_by_halves
from workbench.sharding.attention.kernels import KERNELS, Kernel

NAME = "plain"
ALIGNMENT = 64
"""Bytes: a BLAS may take another code path for an operand of another alignment."""


def rows_of_logits(block: int) -> int:
    """Return the number of tokens whose logits are computed at a time: those of a block."""
    return block


def canonical(values: Tensor) -> Tensor:
    """Return the values contiguous, with the same alignment in every layout."""
    values = values.contiguous()
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()


def matmul(x_TK: Tensor, weight_NK: Tensor, block: int, width: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x @ weight.T, a block of rows and some columns at a time. -> [T, N], by default in the dtype of x."""
    return _products(x_TK, [canonical(piece).T for piece in weight_NK.split(width)], block, out_dtype)


def matmul_backward(
    dy_TN: Tensor, weight_NK: Tensor, block: int, width: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply dy @ weight, a block of rows and some columns at a time. -> [T, K], by default in the dtype of dy."""
    return _products(dy_TN, [canonical(piece) for piece in weight_NK.split(width, 1)], block, out_dtype)


def _products(x_TK: Tensor, pieces_KN: list[Tensor], block: int, out_dtype: torch.dtype | None) -> Tensor:
    rows = []
    for x_bK in map(canonical, x_TK.split(block)):
        columns = [_multiplied(x_bK, piece_KN, out_dtype or x_TK.dtype) for piece_KN in pieces_KN]
        rows.append(columns[0] if len(columns) == 1 else torch.cat(columns, 1))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _multiplied(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices, summed in float32 or better, rounded once to a dtype."""
    if dtype == left.dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def add_outer(
    total_NK: Tensor, peak: Tensor, scale: float, dy_TN: Tensor, x_TK: Tensor, block: int, tile: tuple[int, int]
) -> None:
    """Add each block's dy.T @ x, rounded to multiples of 1 / scale, to integers; update the largest magnitude.

    The integers may be a view of a larger tensor. ``peak``, float32, is the largest magnitude of a partial so far, and
    NaN is propagated. ``scale`` is a power of two, ``block`` the tokens per partial, ``tile`` the rows and columns that
    are computed at a time.
    """
    height, width = tile
    dtype = torch.promote_types(x_TK.dtype, torch.float32)
    tiles = [total_nK.split(width, 1) for total_nK in total_NK.split(height)]
    for dy_bN, x_bK in zip(dy_TN.split(block), x_TK.split(block), strict=True):
        columns = [canonical(x) for x in x_bK.split(width, 1)]
        for dy, totals in zip(dy_bN.split(height, 1), tiles, strict=True):
            dy_nb = canonical(dy).T
            for x, total_nk in zip(columns, totals, strict=True):
                _add(total_nk, peak, scale, _multiplied(dy_nb, x, dtype))


def add_rows(total: Tensor, peak: Tensor, scale: float, rows_TD: Tensor, index_T: Tensor | None = None) -> None:
    """Add each row, rounded to multiples of 1 / scale, to one row of integers [D], or to a row of [V, D] by index.

    Rows with a negative index are not added. ``peak`` and ``scale`` as in `add_outer`.
    """
    if index_T is None:
        for rows_bD in rows_TD.split(_ROWS):
            total += fixed(rows_bD, scale).sum(0)
            _raise(peak, rows_bD)
        return
    rows_TD = rows_TD.masked_fill((index_T < 0)[:, None], 0)
    with determinism(False):  # integer sums do not depend on the order
        total.index_add_(0, index_T.clamp_min(0), fixed(rows_TD, scale))
    _raise(peak, rows_TD)


_ROWS = 4096
"""Rows whose integers exist at a time."""


def raise_head_peaks(peak_H: Tensor, values_kHd: Tensor) -> None:
    """Update each head's peak with the largest magnitude of its values, in place. NaN is propagated."""
    torch.maximum(peak_H, values_kHd.abs().amax((0, 2)).float(), out=peak_H)


def add_scaled(total_kHd: Tensor, scale_H: Tensor, values_kHd: Tensor) -> None:
    """Add values, rounded to multiples of 1 / scale of their head, to integers, which may be strided."""
    total_kHd += fixed(values_kHd, scale_H[:, None])


def to_gradient(total: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Multiply integers by a power of two, rounding to float64, to float32 and to a dtype."""
    gradient = torch.empty(total.shape, dtype=dtype, device=total.device)
    for some, integers in zip(gradient.view(-1).split(_ELEMENTS), total.reshape(-1).split(_ELEMENTS), strict=True):
        some.copy_((integers.double() * factor).float())
    return gradient


def largest(values: Tensor) -> Tensor:
    """Largest magnitude, float32; NaN is propagated; 0 if empty."""
    return values.abs().amax().float() if values.numel() else torch.zeros((), device=values.device)


def sum_of_squares(values: Tensor, scale: Tensor) -> Tensor:
    """Sum of all squares, each rounded to a multiple of 1 / scale, a power of two, as an integer.

    The square of a float32 number is exact in float64.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for some in values.reshape(-1).split(_ELEMENTS):
        total += some.double().square_().mul_(scale).round_().to(torch.int64).sum()
    return total


_ELEMENTS = 2**24
"""Elements whose 64-bit values exist at a time."""


def fixed(values: Tensor, scale: float | Tensor) -> Tensor:
    """Convert values to integer multiples of 1 / scale, a power of two."""
    return values.float().mul(scale).round_().to(torch.int64)


def _add(total: Tensor, peak: Tensor, scale: float, partial: Tensor) -> None:
    _raise(peak, partial)
    total += partial.mul_(scale).round_().to(torch.int64)


def _raise(peak: Tensor, partial: Tensor) -> None:
    if partial.numel():
        torch.maximum(peak, torch.linalg.vector_norm(partial.float(), torch.inf), out=peak)


@contextmanager
def determinism(enabled: bool) -> Iterator[None]:
    """Enable torch's deterministic mode, without its filling of uninitialized memory, or disable it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose class has the property, unknown to mypy
    filling = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    settings.fill_uninitialized_memory = filling and not enabled
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm, and the reciprocal root mean square of each row, [T, D] and [T]."""
    wide_TD = x_TD.float()
    rstd_T1 = torch.rsqrt(mean_by_halves(wide_TD.square()) + eps)
    return weight_D * (wide_TD * rstd_T1).to(x_TD.dtype), rstd_T1[:, 0]


def norm_back(
    dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, weight_D: Tensor, total_D: Tensor, peak: Tensor, scale: float
) -> Tensor:
    """Gradient of x; that of the weight is added to the integers, a partial per row.

    Formula:  g = dy * weight; dx = rstd * (g - x rstd * mean(g * x rstd))
    """
    normed_TD = x_TD.float() * rstd_T[:, None]
    dy_TD = dy_TD.float()
    add_rows(total_D, peak, scale, dy_TD * normed_TD.to(x_TD.dtype).float())
    inner_TD = dy_TD * weight_D.float()
    return (rstd_T[:, None] * (inner_TD - normed_TD * mean_by_halves(inner_TD * normed_TD))).to(x_TD.dtype)


def elementwise(function: Callable[[Tensor], Tensor], x_TK: Tensor, block: int, width: int) -> Tensor:
    """Apply an elementwise function. On a CPU piece by piece: a vector's body and its tail may round differently."""
    if x_TK.is_cuda:
        return function(x_TK)
    return torch.cat(
        [torch.cat([function(canonical(piece)) for piece in x_bK.split(width, 1)], 1) for x_bK in x_TK.split(block)]
    )


def elementwise_back(
    function: Callable[[Tensor], Tensor], dy_TK: Tensor, x_TK: Tensor, block: int, width: int
) -> Tensor:
    """Gradient of x; the function is recomputed."""

    def back(dy: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = canonical(x).detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf, canonical(dy))[0]

    if x_TK.is_cuda:
        return back(dy_TK, x_TK)
    rows = []
    for dy_bK, x_bK in zip(dy_TK.split(block), x_TK.split(block), strict=True):
        columns = zip(dy_bK.split(width, 1), x_bK.split(width, 1), strict=True)
        rows.append(torch.cat([back(dy, x) for dy, x in columns], 1))
    return torch.cat(rows)


def attend(
    query_tHd: Tensor, key_SHd: Tensor, value_SHd: Tensor, spans: Sequence[Span], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each block of queries over its own range of keys: output [t, Hq, d], log-normaliser [Hq, t]."""
    outs, lses = [], []
    for span in spans:
        query, key, value = _of_span(span, query_tHd, key_SHd, value_SHd)
        out, lse = _kernel(query, key, span).forward(query, key, value, span.seen, scale)
        outs.append(_tokens_first(out.to(query.dtype)))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def attend_back(
    d_out_tHd: Tensor,
    query_tHd: Tensor,
    key_SHd: Tensor,
    value_SHd: Tensor,
    out_tHd: Tensor,
    lse_Ht: Tensor,
    spans: Sequence[Span],
    scale: float,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of the queries, and for each block those of its keys and values, [k, Hk, d] each."""
    d_queries, d_keys_values = [], []
    for span in spans:
        query, key, value = _of_span(span, query_tHd, key_SHd, value_SHd)
        out, d_out = (_heads_first(rows[span.queries]) for rows in (out_tHd, d_out_tHd))
        kernel = _kernel(query, key, span)
        # flash is deterministic in torch's deterministic mode; the plain kernel always is
        with determinism(True) if kernel.name == "flash" else nullcontext():
            lse = canonical(lse_Ht[:, span.queries])[None]
            d_query, d_key, d_value = kernel.backward(d_out, query, key, value, out, lse, span.seen, scale)
        d_queries.append(_tokens_first(d_query.to(query.dtype)))
        d_keys_values.append((_tokens_first(d_key), _tokens_first(d_value)))
    return torch.cat(d_queries), d_keys_values


def _kernel(query: Tensor, key: Tensor, span: Span) -> Kernel:
    """First supported kernel among those that are not compiled per shape."""
    return next(kernel for kernel in KERNELS if kernel.name != "flex" and kernel.refusal(query, key, span.seen) is None)


def _of_span(span: Span, query_tHd: Tensor, key_SHd: Tensor, value_SHd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _heads_first(query_tHd[span.queries]), _heads_first(key_SHd[span.keys]), _heads_first(value_SHd[span.keys])


def _heads_first(rows_nHd: Tensor) -> Tensor:
    """[n, H, d] -> [1, H, n, d], with token-major memory."""
    return canonical(rows_nHd).transpose(0, 1)[None]


def _tokens_first(heads_Hnd: Tensor) -> Tensor:
    return heads_Hnd[0].transpose(0, 1).contiguous()


def piece_statistics(logits_bv: Tensor, local_b: Tensor, divisor_b: Tensor) -> Tensor:
    """[5, b] statistics of each row over a piece of the vocabulary, from which those of the whole one are merged.

    Largest logit m, sum of exp(z - m), sum of exp(z - m) (z - m), sum of z^2, target's logit or -inf. The logits, dot
    products of hidden states and head in float32, are divided by each row's temperature, in place; ``local_b`` is the
    column of each target, out of range if it is in another piece.
    """
    logits_bv.div_(divisor_b[:, None])
    highest_b = logits_bv.amax(1)
    shifted_bv = logits_bv - highest_b[:, None]
    exp_bv = shifted_bv.exp()
    index_b, here_b = local_columns(local_b, logits_bv.shape[1])
    target_b = logits_bv.gather(1, index_b[:, None])[:, 0].masked_fill(~here_b, -torch.inf)
    return torch.stack([highest_b, exp_bv.sum(1), (exp_bv * shifted_bv).sum(1), logits_bv.square().sum(1), target_b])


def piece_gradient(
    logits_bv: Tensor,
    local_b: Tensor,
    divisor_b: Tensor,
    logsumexp_b: Tensor,
    entropy_b: Tensor,
    gradients_4b: Tensor,
    out_bv: Tensor,
) -> None:
    """Gradient of the dot products with a piece of the vocabulary.

    Formula:  p = exp(z - logsumexp);  dz = g_logprob 1[target] + (g_logsumexp - g_logprob) p
                                            - g_entropy p (log p + entropy) + 2 g_square z

    Logits (overwritten), targets and divisors as in `piece_statistics`; logsumexp and entropy of the whole vocabulary;
    gradients of log-probability, entropy, logsumexp and sum of squares. ``out_bv`` receives dz over the temperature, in
    its own dtype.
    """
    logprob_b, entropy_gradient_b, normaliser_b, square_b = gradients_4b
    logits_bv.div_(divisor_b[:, None])
    log_p_bv = logits_bv - logsumexp_b[:, None]
    p_bv = log_p_bv.exp()
    d_bv = (normaliser_b - logprob_b)[:, None] - entropy_gradient_b[:, None] * (log_p_bv + entropy_b[:, None])
    d_bv.mul_(p_bv).add_(logits_bv.mul_(2 * square_b[:, None]))
    index_b, here_b = local_columns(local_b, logits_bv.shape[1])
    with determinism(False):  # one element per row, so no sum
        d_bv.scatter_add_(1, index_b[:, None], (logprob_b * here_b)[:, None])
    out_bv.copy_(d_bv.div_(divisor_b[:, None]))
