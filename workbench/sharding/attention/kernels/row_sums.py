"""Sums of rows that several segments of a kernel call computed, in float32.

Gathered keys occur in several segments, each with its part of their gradient. The parts of one key are added in the
order of the segments, so that the sum is the same in every run, which `Tensor.index_add_` on a GPU is not; and each is
read once, in its own dtype.

Letters: n rows of the parts | k rows of the sum | p the most parts of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def parts_of_rows(rows_n: Tensor, count: int) -> Tensor:
    """[k, p] int32: the places n that belong to each of ``count`` rows, in order; -1 where a row has fewer than p."""
    order_n = rows_n.argsort(stable=True)
    sorted_n = rows_n[order_n]
    counts_k = torch.bincount(rows_n, minlength=count)
    first_k = counts_k.cumsum(0) - counts_k
    number_n = torch.arange(len(rows_n), device=rows_n.device) - first_k[sorted_n]
    parts_kp = rows_n.new_full((count, int(counts_k.max())), -1, dtype=torch.int32)
    parts_kp[sorted_n, number_n] = order_n.to(torch.int32)
    return parts_kp


def sum_rows(parts_nHd: Tensor, parts_kp: Tensor) -> Tensor:
    """[k, H, d] sums of [n, H, d], in float32 or better; ``parts_kp`` is that of `parts_of_rows`.

    One kernel on a GPU, `sum_rows_by_torch` elsewhere.
    """
    if not parts_nHd.is_cuda:
        return sum_rows_by_torch(parts_nHd, parts_kp)
    from workbench.sharding.attention.kernels.row_sums_kernel import add_parts  # needs Triton

    return add_parts(parts_nHd.contiguous(), parts_kp)


def sum_rows_by_torch(parts_nHd: Tensor, parts_kp: Tensor) -> Tensor:
    """The same in torch, one part of every row after another."""
    dtype = torch.promote_types(parts_nHd.dtype, torch.float32)
    sums_kHd = parts_nHd.new_zeros(len(parts_kp), *parts_nHd.shape[1:], dtype=dtype)
    for places_k in parts_kp.unbind(1):
        part_kHd = parts_nHd.index_select(0, places_k.clamp_min(0)).to(dtype)
        sums_kHd += torch.where((places_k >= 0)[:, None, None], part_kHd, 0.0)
    return sums_kHd
