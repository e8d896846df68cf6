"""The torch-only engine: the logits of a chunk, and one pass over them each way.

With z the logits as they enter the softmax, m their maximum, and sums over the whole vocabulary:
    s = sum exp(z - m),   u = sum exp(z - m) (z - m),   q = sum z^2,   l = sum z
    logprob = (z_target - m) - log s     entropy = log s - u / s     logsumexp = m + log s     mean square = q / V
    mean logit = l / V
    dz_v = g_logprob (1[v = target] - p_v) - g_entropy p_v (log p_v + entropy) + g_logsumexp p_v
           + (2 g_square z_v + g_mean) / V
It represents every logit that the dtype can, so it is the exact engine that others fall back to.

Letters: C rows of a chunk | B rows of a block of it | V vocabulary (this rank's valid rows of the head)
| D model dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.policy.logprobs.engine import (
    Accumulators,
    Chunk,
    Keep,
    RowGradients,
    add_gemm_,
    count_gemm,
    exact_float32,
    plan_chunks,
    rows_with_gradient,
)
from workbench.policy.logprobs.head import Head, TokenLogprobs, local_columns
from workbench.sharding.collectives import all_max, all_sum

BLOCK_BYTES = 2**28
"""Size of the block of logits that is turned into probabilities or gradients at a time."""


class ChunkedEngine:
    """Logits of a chunk in float32 (float64 for float64), overwritten by their gradient."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._scratch = head.weight_VD.new_empty(0, dtype=head.wide)

    def saved_bytes(self, rows: int) -> int:
        """Bytes of the logits of this many rows."""
        return rows * self.head.valid * self.head.wide.itemsize

    def forward(
        self, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor, *, outputs: frozenset[str], keep: Keep
    ) -> Chunk:
        """See `engine.Engine.forward`."""
        head, rows = self.head, len(hidden_CD)
        logits_CV = self._buffer(rows, keep)
        weight_VD = head.weight_VD[: head.valid]
        with exact_float32(hidden_CD.dtype):
            _product_(logits_CV, hidden_CD, weight_VD)
        count_gemm(rows)
        divisor_C1 = self._divisor(temperature)
        bias_V = None if head.bias_V is None else head.bias_V[: head.valid].to(head.wide)
        head.logits_(logits_CV, bias_V, divisor_C1)
        head_output = self._outputs(logits_CV, targets_C, outputs)
        return Chunk(hidden_CD, targets_C, temperature, head_output, None if keep == "no" else logits_CV)

    def backward(self, chunk: Chunk, gradients: RowGradients, into: Accumulators, rows: slice, *, first: bool) -> None:
        """See `engine.Engine.backward`."""
        head, logits_CV = self.head, chunk.saved
        chunk.saved = None
        nonzero_C1 = rows_with_gradient(gradients, len(logits_CV), logits_CV.device)[:, None]
        for block in self._blocks(len(logits_CV)):
            self._to_gradient_(chunk, gradients, logits_CV, block, nonzero_C1)
        weight_VD = head.weight_VD[: head.valid]
        if into.bias_V is not None:
            bias_V = into.bias_V.zero_() if first else into.bias_V
            bias_V[: head.valid] += logits_CV.sum(0)
        gradient_CV = logits_CV.to(chunk.hidden_CD.dtype)
        hidden_CD = chunk.hidden_CD.masked_fill(~nonzero_C1, 0)
        if into.hidden_TD is not None:
            with exact_float32(gradient_CV.dtype):
                torch.mm(gradient_CV, weight_VD, out=into.hidden_TD[rows])
            count_gemm(len(logits_CV))
        if into.weight_VD is not None:
            with exact_float32(gradient_CV.dtype):
                add_gemm_(into.weight_VD[: head.valid], gradient_CV, hidden_CD, first=first)
            if first:
                into.weight_VD[head.valid :].zero_()
            count_gemm(len(logits_CV))

    def _buffer(self, rows: int, keep: Keep) -> Tensor:
        shape = rows, self.head.valid
        if keep == "own":
            return self._scratch.new_empty(shape)
        if self._scratch.numel() < rows * self.head.valid:
            self._scratch = self._scratch.new_empty(rows * self.head.valid)
        return self._scratch[: rows * self.head.valid].view(shape)

    def _blocks(self, rows: int) -> list[slice]:
        return plan_chunks(rows, max(1, BLOCK_BYTES // max(1, self.saved_bytes(1))))

    def _divisor(self, temperature: float | Tensor) -> float | Tensor:
        return temperature.to(self.head.wide)[:, None] if isinstance(temperature, Tensor) else temperature

    def _local(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """See `local_columns`."""
        return local_columns(targets_C - self.head.first_token, self.head.valid)

    def _outputs(self, logits_CV: Tensor, targets_C: Tensor, requested: frozenset[str]) -> TokenLogprobs:
        head = self.head
        rows, columns = logits_CV.shape
        highest_C = logits_CV.amax(-1) if columns else logits_CV.new_full((rows,), -torch.inf)
        if head.axis is not None:
            highest_C = all_max(highest_C, head.axis)
        sums_5C = logits_CV.new_zeros(5, rows)
        if columns:
            local_C, is_local_C = self._local(targets_C)
            sums_5C[0] = (logits_CV.gather(1, local_C[:, None])[:, 0] - highest_C).masked_fill(~is_local_C, 0)
        for block in self._blocks(rows):
            shifted_BV = logits_CV[block] - highest_C[block, None]
            exp_BV = shifted_BV.exp()
            sums_5C[1, block] = exp_BV.sum(-1)
            if "entropy" in requested:
                sums_5C[2, block] = shifted_BV.masked_fill_(exp_BV == 0, 0).mul_(exp_BV).sum(-1)
            if "mean_squared_logit" in requested:
                sums_5C[3, block] = _finite(logits_CV[block]).square().sum(-1)
            if "mean_logit" in requested:
                sums_5C[4, block] = logits_CV[block].sum(-1)
        if head.axis is not None:
            sums_5C = all_sum(sums_5C, head.axis)
        target_C, sum_C, weighted_C, squares_C, plain_C = sums_5C
        log_sum_C = sum_C.log()
        return TokenLogprobs(
            target_C - log_sum_C,
            log_sum_C - weighted_C / sum_C if "entropy" in requested else None,
            highest_C + log_sum_C,
            squares_C / head.vocabulary if "mean_squared_logit" in requested else None,
            plain_C / head.vocabulary if "mean_logit" in requested else None,
        )

    def _to_gradient_(
        self, chunk: Chunk, gradients: RowGradients, logits_CV: Tensor, block: slice, nonzero_C1: Tensor
    ) -> None:
        """Overwrite a block of logits with the gradient of its dot products."""
        head, head_output, logits_BV = self.head, chunk.head_output, logits_CV[block]
        divisor = self._divisor(chunk.temperature)
        divisor_B1 = divisor[block] if isinstance(divisor, Tensor) else divisor
        assert head_output.logsumexp_T is not None, "`_outputs` always returns it"
        log_p_BV = logits_BV - head_output.logsumexp_T[block, None]
        p_BV = log_p_BV.exp()
        zero_B = torch.zeros_like(head_output.logprobs_T[block])
        logprob_B, entropy_B, logsumexp_B, square_B, mean_B = (
            zero_B if gradient_C is None else gradient_C[block].to(head.wide) for gradient_C in gradients
        )
        if gradients.entropy_T is None:
            gradient_BV = p_BV * (logsumexp_B - logprob_B)[:, None]
        else:
            assert head_output.entropy_T is not None, "only a requested output has a gradient"
            surprise_BV = log_p_BV.masked_fill_(p_BV == 0, 0) + head_output.entropy_T[block, None]
            gradient_BV = p_BV * ((logsumexp_B - logprob_B)[:, None] - entropy_B[:, None] * surprise_BV)
        if gradients.mean_squared_logit_T is not None:
            gradient_BV += _finite(logits_BV) * (2 / head.vocabulary * square_B)[:, None]
        if gradients.mean_logit_T is not None:
            gradient_BV += (mean_B / head.vocabulary)[:, None]
        if head.valid:
            local_C, is_local_C = self._local(chunk.targets_C[block])
            gradient_BV.scatter_add_(1, local_C[:, None], (logprob_B * is_local_C)[:, None])
        gradient_BV = head.back_(gradient_BV, logits_BV, divisor_B1)
        torch.where(nonzero_C1[block], gradient_BV, gradient_BV.new_zeros(()), out=logits_BV)


def _finite(logits_BV: Tensor) -> Tensor:
    """Logits with 0 for -inf: a column that does not exist adds no square."""
    return logits_BV.masked_fill(logits_BV == -torch.inf, 0)


def _product_(logits_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
    """Compute ``logits_CV = hidden_CD @ weight_VD.T`` without rounding to the dtype of the operands."""
    if hidden_CD.dtype == logits_CV.dtype:
        torch.mm(hidden_CD, weight_VD.T, out=logits_CV)
    elif hidden_CD.is_cuda:
        torch.mm(hidden_CD, weight_VD.T, out_dtype=logits_CV.dtype, out=logits_CV)
    else:
        torch.mm(hidden_CD.to(logits_CV.dtype), weight_VD.to(logits_CV.dtype).T, out=logits_CV)
