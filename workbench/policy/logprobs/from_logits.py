"""Token log-probabilities from given logits, for models that return them.

With z the logits over temperature, m their maximum, and sums over the whole vocabulary:
    s = sum exp(z - m),   u = sum exp(z - m) (z - m),   q = sum z^2,   a = z_target - m
    logprob = a - log s     entropy = log s - u / s     logsumexp = m + log s     mean squared logit = q / V
    dz_v = g_logprob (1[v = target] - p_v) + g_logsumexp p_v - g_entropy p_v (log p_v + entropy) + g_squares 2 z_v / V
The mean logit, over the columns that are not padding, is one sum of its own, by torch.
Each way reads the logits once; backward may write the gradient over them. Over tp, forward needs one maximum and one
sum, backward nothing.

Letters: T tokens | B rows of a block | V vocabulary (this rank's columns) | K scalars of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs import fastest, triton_unsupported_reason
from workbench.policy.logprobs.engine import plan_chunks
from workbench.policy.logprobs.head import (
    TokenLogprobs,
    check_dtype,
    check_outputs,
    check_targets,
    local_columns,
    logit_divisor,
    tiled_vocabulary_size,
)
from workbench.shapes import check_shapes
from workbench.sharding.collectives import all_max, all_sum, sum_identity
from workbench.sharding.mesh import Axis

IMPLEMENTATIONS = ("torch", "triton")
BLOCK_BYTES = 2**27
"""Size of the widened logits that the torch implementation holds at a time."""


def token_logprobs_from_logits(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    implementation: str = "auto",
    temperature: float | Tensor = 1.0,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    axis: Axis | None = None,
    first_token: int = 0,
    inplace_backward: bool = False,
) -> TokenLogprobs:
    """Log-probability of each target under softmax(logits / temperature), and further statistics of it.

    Args:
        logits_TV: logits, or this rank's columns of them. Columns of padding hold -inf.
        targets_T: ids in the whole vocabulary. A token whose id is negative is ignored: it returns 0 without gradient.
        implementation: one of `IMPLEMENTATIONS`, or auto: triton where it can run, torch elsewhere.
        temperature: divides logits; one number, or [T], one for each token.
        outputs: any of entropy, logsumexp, mean_squared_logit, mean_logit.
        axis: the tensor-parallel axis, where ranks hold different columns, any number each.
        first_token: vocabulary id of the first local column.
        inplace_backward: write the gradient over the logits, which must not be read afterwards: half the memory.
            Autograd raises an error if another operation saved the logits for its backward.

    Shapes:   logits_TV [T, V], targets_T [T] -> [T] each, float32 (float64 for float64).
    Units:    nats.
    Backward: to the logits, through every result, in their dtype; local on tp. The incoming gradients must be the
              same on every tp rank.
    Raises:   ShapeError: sizes disagree, ids outside the vocabulary, a temperature that is not positive and finite.
              SpecError: an implementation that is unknown or cannot run here, or an in-place gradient over a leaf.
    """
    check_shapes("token_logprobs_from_logits", logits_TV=logits_TV, targets_T=targets_T)
    outputs = frozenset(outputs)
    check_outputs("token_logprobs_from_logits", outputs, "request only those")
    check_dtype("token_logprobs_from_logits: logits", logits_TV)
    check_targets("token_logprobs_from_logits", targets_T)
    if inplace_backward:
        _refuse_what_must_stay(logits_TV)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    divisor = logit_divisor(temperature, targets_T, wide)
    vocabulary = tiled_vocabulary_size(first_token, logits_TV.shape[1], axis, logits_TV.device)
    if targets_T.numel() and int(targets_T.max()) >= vocabulary:
        raise ShapeError(
            "token_logprobs_from_logits: targets",
            found=f"ids up to {int(targets_T.max())}",
            rule=f"id < {vocabulary}, the whole vocabulary; a negative id is ignored",
            fix="replace ids that are not trained by -100",
        )
    passes = _passes(implementation, logits_TV)
    call = _Call(passes, targets_T, divisor, outputs, vocabulary, axis, first_token, inplace_backward)
    # Before the logits may be overwritten by their gradient: this sum needs their places, never their values.
    mean_T = _mean_logit(logits_TV, targets_T, divisor, wide, axis) if "mean_logit" in outputs else None
    return TokenLogprobs(*_FromLogits.apply(logits_TV, call))._replace(mean_logit_T=mean_T)


def _mean_logit(
    logits_TV: Tensor, targets_T: Tensor, divisor: float | Tensor, wide: torch.dtype, axis: Axis | None
) -> Tensor:
    """Mean of the logits over temperature over the columns of all tp ranks that are not padding; 0 if ignored.

    Shapes:   [T, v] -> [T].
    Backward: 1 / (columns of all ranks that are not padding) on each of them, over the temperature; local.
    """
    ignored_T, exists_TV = targets_T < 0, logits_TV != -torch.inf
    sums_T = logits_TV.masked_fill(~exists_TV | ignored_T[:, None], 0).sum(-1, dtype=wide)
    counts_T = exists_TV.sum(-1).to(wide)
    if axis is not None:
        sums_T, counts_T = sum_identity(sums_T, axis), all_sum(counts_T, axis)
    divisor_T = divisor[:, 0] if isinstance(divisor, Tensor) else divisor
    return (sums_T / counts_T / divisor_T).masked_fill(ignored_T, 0)


def _refuse_what_must_stay(logits_TV: Tensor) -> None:
    """Reject in-place gradients over logits that are a leaf or a view of one, or whose elements share memory."""
    whole = logits_TV if logits_TV._base is None else logits_TV._base
    found, rule = "logits that are a leaf, or a view of one", "a leaf's value outlives its gradient"
    if not (whole.is_leaf and whole.requires_grad):
        if all(stride or size < 2 for size, stride in zip(logits_TV.shape, logits_TV.stride(), strict=True)):
            return
        found, rule = f"strides {logits_TV.stride()}", "each logit has its own memory"
    raise SpecError(
        "token_logprobs_from_logits: inplace_backward = True", found=found, rule=rule, fix="pass inplace_backward=False"
    )


def _passes(implementation: str, logits_TV: Tensor) -> Any:
    """Return the implementation of the two passes over logits."""
    if implementation == "auto":
        implementation = "triton" if fastest(logits_TV.dtype, logits_TV.device) == "triton" else "torch"
    if implementation == "torch":
        return _TorchPasses()
    if implementation != "triton":
        raise SpecError(
            f"token_logprobs_from_logits: implementation = {implementation!r}",
            rule=f"one of auto, {', '.join(IMPLEMENTATIONS)}",
            fix="use auto",
        )
    if why := triton_unsupported_reason(logits_TV.dtype, logits_TV.device):
        raise SpecError(
            "token_logprobs_from_logits: implementation = 'triton'",
            found=why,
            rule="Triton needs what it can compute with",
            fix="use auto, or torch",
        )
    from workbench.policy.logprobs.from_logits_kernels import TritonPasses

    return TritonPasses()


@dataclass(frozen=True)
class _Call:
    """Arguments of one call besides the logits."""

    passes: Any
    targets_T: Tensor
    divisor: float | Tensor
    requested: frozenset[str]
    vocabulary: int
    axis: Axis | None
    first_token: int
    inplace_backward: bool


class _FromLogits(Function):
    """Logits to the fields of `TokenLogprobs`; None if not requested."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, call: _Call) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        local_T = call.targets_T - call.first_token
        target_T, highest_T, sum_T, weighted_T, squares_T = call.passes.forward(
            logits_TV, local_T, call.divisor, call.requested
        ).unbind()
        if call.axis is not None:
            local_highest_T = highest_T
            highest_T = all_max(local_highest_T, call.axis)
            # a rank without a finite logit adds nothing
            lower_T = (local_highest_T - highest_T).masked_fill(sum_T == 0, 0)
            weighted_T, sum_T = lower_T.exp() * (weighted_T + lower_T * sum_T), lower_T.exp() * sum_T
            target_T = torch.where(local_columns(local_T, logits_TV.shape[1])[1], target_T + lower_T, 0)
            target_T, sum_T, weighted_T, squares_T = all_sum(
                torch.stack([target_T, sum_T, weighted_T, squares_T]), call.axis
            )
        ignored_T = call.targets_T < 0
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - weighted_T / sum_T
        inputs = [call.targets_T, *([call.divisor] if isinstance(call.divisor, Tensor) else [])]
        ctx.save_for_backward(logits_TV, highest_T, log_sum_T, entropy_T, *inputs)
        ctx.call = call
        output = TokenLogprobs(
            target_T - log_sum_T,
            entropy_T if "entropy" in call.requested else None,
            highest_T + log_sum_T if "logsumexp" in call.requested else None,
            squares_T / call.vocabulary if "mean_squared_logit" in call.requested else None,
        )
        return tuple(output.map(lambda x_T: x_T.masked_fill(ignored_T, 0)))[:4]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_T: Tensor | None) -> tuple[Tensor | None, None]:
        call: _Call = ctx.call
        logits_TV, highest_T, log_sum_T, entropy_T, *_ = ctx.saved_tensors
        zero_T = torch.zeros_like(entropy_T)
        logprob_T, bend_T, normal_T, squares_T = (
            zero_T if g_T is None else g_T.to(zero_T.dtype).masked_fill(call.targets_T < 0, 0) for g_T in gradients_T
        )
        row_KT = torch.stack(
            [normal_T - logprob_T, bend_T, squares_T * 2 / call.vocabulary, logprob_T, highest_T, log_sum_T, entropy_T]
        )
        out_TV = logits_TV.detach() if call.inplace_backward else torch.empty_like(logits_TV)
        call.passes.backward(logits_TV.detach(), out_TV, call.targets_T - call.first_token, call.divisor, row_KT)
        if call.inplace_backward:
            torch.autograd.graph.increment_version(logits_TV)  # autograd does not see the writes of a kernel
        return out_TV, None


class _TorchPasses:
    """Both passes in torch, a block of rows at a time."""

    def forward(self, logits_TV: Tensor, local_T: Tensor, divisor: float | Tensor, outputs: frozenset[str]) -> Tensor:
        """[5, T]: a (0 if another rank has the target), m, s, u and q, of the local columns."""
        rows, columns = logits_TV.shape
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        sums_5T = logits_TV.new_zeros(5, rows, dtype=wide)
        sums_5T[1] = -torch.inf
        for block in _blocks(logits_TV) if columns else ():
            z_BV = logits_TV[block].to(wide) / _of(divisor, block)
            index_B, is_local_B = local_columns(local_T[block], columns)
            highest_B = z_BV.amax(-1)
            finite_B = highest_B.masked_fill(highest_B == -torch.inf, 0)
            shifted_BV = z_BV - finite_B[:, None]
            exp_BV = shifted_BV.exp()
            sums_5T[0, block] = (z_BV.gather(1, index_B[:, None])[:, 0] - finite_B).masked_fill(~is_local_B, 0)
            sums_5T[1, block] = highest_B
            sums_5T[2, block] = exp_BV.sum(-1)
            sums_5T[3, block] = exp_BV.mul_(shifted_BV.masked_fill_(exp_BV == 0, 0)).sum(-1)
            if "mean_squared_logit" in outputs:
                sums_5T[4, block] = z_BV.masked_fill_(z_BV == -torch.inf, 0).square_().sum(-1)
        return sums_5T

    def backward(
        self, logits_TV: Tensor, out_TV: Tensor, local_T: Tensor, divisor: float | Tensor, row_KT: Tensor
    ) -> None:
        """Write the gradient of the logits to a tensor that may be the logits."""
        columns = logits_TV.shape[1]
        for block in _blocks(logits_TV) if columns else ():
            z_BV = logits_TV[block].to(row_KT.dtype) / _of(divisor, block)
            slope_B1, bend_B1, square_B1, own_B1, highest_B1, log_sum_B1, entropy_B1 = row_KT[:, block, None].unbind()
            log_p_BV = (z_BV - highest_B1) - log_sum_B1
            p_BV = log_p_BV.exp()
            gradient_BV = p_BV * (slope_B1 - bend_B1 * (log_p_BV.masked_fill_(p_BV == 0, 0) + entropy_B1))
            gradient_BV += square_B1 * z_BV.masked_fill_(z_BV == -torch.inf, 0)
            index_B, is_local_B = local_columns(local_T[block], columns)
            gradient_BV.scatter_add_(1, index_B[:, None], own_B1 * is_local_B[:, None])
            nonzero_B1 = (row_KT[:4, block] != 0).any(0)[:, None]
            out_TV[block] = (gradient_BV / _of(divisor, block)).masked_fill_(~nonzero_B1, 0)


def _blocks(logits_TV: Tensor) -> list[slice]:
    rows, columns = logits_TV.shape
    return plan_chunks(rows, max(1, BLOCK_BYTES // (8 * columns)))


def _of(divisor: float | Tensor, block: slice) -> float | Tensor:
    return divisor[block] if isinstance(divisor, Tensor) else divisor
