"""Of the copies of a key head only one gives its gradient back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from workbench.faults import Fault


class _FirstCopy(Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return heads.repeat_interleave(copies, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.unflatten(1, (-1, ctx.copies))[:, :, 0], None


def _broken(repeated: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    def repeat_and_forget(heads: Tensor, copies: int) -> Tensor:
        return _FirstCopy.apply(heads, copies)

    return repeat_and_forget


FAULT = Fault(
    family="S",
    what="key and value heads are repeated for ranks that exchange heads, and the adjoint takes one copy for their sum",
    origin="no single report: grouped heads repeated for DeepSpeed-Ulysses (arXiv 2309.14509) without the adjoint of "
    "it",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them too small, q_proj, "
    "o_proj and MLP right; below it everything wrong; nothing where the ranks are no more than the key "
    "heads",
    seam="workbench.sharding.attention.ulysses:repeated",
    broken=_broken,
    shows_in={"layout": {"cp": 4, "attention": "ulysses"}},
    hidden_in={"layout": {"cp": 2}},
    changes_metrics=False,
)
