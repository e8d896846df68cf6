"""Coefficients of rows: the gradient of a loss by each head output of each row, known late up to a factor.

The factor is on the device, and is not synchronized. It is float32 for every gradient dtype: rounded to bfloat16, a
factor of 1/3 would be off by a thousandth.

Letters: C rows of a chunk | F requested fields of `TokenLogprobs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import triton_unsupported_reason
from workbench.policy.logprobs.head import TokenLogprobs
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis

RowLoss = Callable[[TokenLogprobs, Tensor], Tensor]
"""Head outputs of some rows, and their indices in the row of T -> their part of the loss, 0-dimensional."""

ROUNDING = 512
"""Tolerance in units in the last place between two evaluations of one coefficient, relative to the coefficient plus the
typical one: sums over other rows are added in another order."""


def slice_of(values_FC: Tensor, rows: slice, part: slice) -> Tensor:
    """Slice the values of some rows to those of a part of them."""
    return values_FC[:, part.start - rows.start : part.stop - rows.start]


def finite_or_zero(values_FC: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Values, with 0 for those that are not finite."""
    return torch.nan_to_num(values_FC, 0.0, 0.0, 0.0, out=out)


def slack(values_FC: Tensor) -> Tensor:
    """Tolerance between two evaluations of the same coefficients.

    Typical is the geometric mean of those that are not 0, and at most the mean: a few huge coefficients, of tokens
    whose probability is nearly 1 and which move no weight, would otherwise allow all others any difference.
    """
    size_FC = values_FC.abs()
    nonzero_FC = size_FC.masked_fill(size_FC == 0, torch.nan)
    geometric_F1 = nonzero_FC.log().nanmean(-1, keepdim=True).exp().nan_to_num(0.0)
    typical_F1 = torch.minimum(geometric_F1, size_FC.mean(-1, keepdim=True))
    return ROUNDING * torch.finfo(values_FC.dtype).eps * (size_FC + typical_F1)


def are_near(one_FC: Tensor, other_FC: Tensor) -> Tensor:
    """True if two evaluations of the same coefficients differ by rounding only."""
    return ((one_FC - other_FC).abs() <= slack(one_FC)).all()


def common_factor(truth_FC: Tensor, trial_FC: Tensor) -> Tensor:
    """Least-squares factor s of s * trial to the true coefficients; [1], 0 if undefined."""
    truth_FC, wide_FC = truth_FC.double(), trial_FC.double()
    scale = (truth_FC * wide_FC).sum() / wide_FC.square().sum()
    return torch.where(scale.isfinite(), scale, 0.0).to(trial_FC.dtype).reshape(1)


def on_any_rank(flags: Tensor, axis: Axis | None) -> Tensor:
    """Combine flags over tp ranks by or, because they decide about collectives."""
    return flags if axis is None else all_sum(flags.int(), axis) > 0


def gradients_of(loss: Any, leaves: Sequence[Tensor], *, check: bool) -> tuple[Tensor | None, ...]:
    """Derivatives of a caller's loss by head outputs; None for those that it does not use.

    A check rejects a loss that depends on another trained tensor.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ShapeError(
            "fused_loss: loss_fn",
            found=found,
            fix="sum over the rows",
            rule="a 0-dimensional tensor, the rows' part of the loss",
        )
    if not loss.requires_grad:
        return (None,) * len(leaves)
    if check:
        _refuse_other_leaves(loss, leaves)
    with torch.autograd.set_multithreading_enabled(False):  # a graph this small costs less than another thread
        return torch.autograd.grad(loss, leaves, _one(loss.dtype, loss.device), allow_unused=True)


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """1, the cotangent of every loss: written once, not by a launch for each."""
    return torch.ones((), dtype=dtype, device=device)


def _refuse_other_leaves(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """Reject a loss that depends on another trained tensor than the head outputs: that gradient would be lost."""
    known, seen, waiting = {id(leaf) for leaf in leaves}, set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise SpecError(
                "fused_loss: loss_fn",
                found=f"a gradient to another tensor, {list(variable.shape)}",
                rule="a pure loss: the head outputs are the only trained tensors that it depends on",
                fix="detach it, or use token_logprobs and call backward on the loss yourself",
            )
        waiting += [function for function, _ in node.next_functions]


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Compute ``gradient *= factor``, of one element, and return it; a factor of 1 reads and writes nothing."""
    if _kernels(gradient):
        from workbench.policy.logprobs.exp_epilogue.gradient_kernels import scale_in_place

        scale_in_place(gradient, factor)
        return gradient
    if gradient.is_cuda or bool(factor != 1):
        gradient.copy_(gradient * factor.reshape(1))
    return gradient


def add_scaled_(into: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """Compute ``into += factor * gradient``, rounded once, with a factor of one element, and return ``into``."""
    if _kernels(into):
        from workbench.policy.logprobs.exp_epilogue.gradient_kernels import add_in_place

        add_in_place(into, gradient, factor)
        return into
    return into.copy_(into + gradient * factor.reshape(1))


def _kernels(value: Tensor) -> bool:
    return value.is_cuda and value.dtype != torch.float64 and value.is_contiguous() and _triton_runs()


@functools.cache
def _triton_runs() -> bool:
    return triton_unsupported_reason(torch.float32, torch.device("cuda")) is None
