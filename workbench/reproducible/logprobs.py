"""Log-probabilities from hidden states, block by block and piece by piece of the vocabulary.

Each piece c gives its largest logit m_c, s_c = sum exp(z - m_c), u_c = sum exp(z - m_c) (z - m_c) and q_c = sum z^2.
With m the largest of all, and sums over pieces by pairs:
    s = sum e^(m_c - m) s_c      u = sum e^(m_c - m) (u_c + (m_c - m) s_c)      q = sum q_c
    logprob = z_target - m - log s     entropy = log s - u / s     logsumexp = m + log s     mean square = q / V
Logits exist for one block, or fewer tokens where their number changes no bit, and one piece at a time, and are
recomputed in backward; their gradients for a few blocks.

Letters: T tokens of a rank | b tokens of a block, or fewer | C pieces of the vocabulary | V vocabulary | v columns of a
piece | D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.reproducible.exact_sums import Accumulator
from workbench.reproducible.modules import Pieces
from workbench.reproducible.rows import sum_by_pairs, sum_over_pieces
from workbench.sharding.collectives import gather_equal

TOGETHER = 4096
"""Tokens whose gradients of logits exist at a time, so that the head's exact sum is updated once for all of them."""


@dataclass(frozen=True)
class ExactHead:
    """Output head of this rank.

    Attributes:
        weight_VD: its rows.
        first: index of the first row.
        vocabulary: rows of all ranks.
        width: rows of a piece; the last piece may be short.
        into: accumulates the gradient, a partial per block.
        pieces: canonical pieces.
    """

    weight_VD: Tensor
    first: int
    vocabulary: int
    width: int
    into: Accumulator
    pieces: Pieces

    def parts(self) -> list[tuple[int, Tensor]]:
        """Each piece of this rank: index of its first row, and its rows."""
        return [
            (self.first + start, self.weight_VD[start : start + self.width])
            for start in range(0, len(self.weight_VD), self.width)
        ]

    def logits(self, hidden_bD: Tensor, rows_vD: Tensor) -> Tensor:
        """Logits before division by the temperature, in float32. [b, D] -> [b, v]."""
        return self.pieces.kernels.matmul(hidden_bD, rows_vD, len(hidden_bD), len(rows_vD), torch.float32)


def from_hidden(hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor, head: ExactHead) -> tuple[Tensor, ...]:
    """Log-probability of each target, entropy, logsumexp and mean squared logit of each distribution.

    Hidden states are the same on every tp rank, targets ids in the whole vocabulary; a token with a negative one is
    ignored: 0 without gradient.

    Shapes:   -> four of [T], float32, the same on every tp rank.
    Units:    nats.
    Backward: to hidden: summed over the pieces of all tp ranks by pairs.
    """
    return _FromHidden.apply(hidden_TD, head.weight_VD, targets_T, temperature_T, head)


class _FromHidden(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature_T: Tensor, head: ExactHead
    ) -> tuple[Tensor, ...]:
        hidden_TD = hidden_TD.contiguous()
        block, statistics = head.pieces.block, head.pieces.kernels.piece_statistics
        few, outputs = head.pieces.kernels.rows_of_logits(block), []
        for hidden_bD, targets_b, divisor_b in _blocks(few, hidden_TD, targets_T, temperature_T):
            logits = ((first, head.logits(hidden_bD, rows_vD)) for first, rows_vD in head.parts())
            outputs.append(
                torch.stack([statistics(logits_bv, targets_b - first, divisor_b) for first, logits_bv in logits])
            )
        pieces_C5T = gather_equal(torch.cat(outputs, 2), head.pieces.tp).flatten(0, 1)
        blocks = pieces_C5T.split(block, 2)
        merged_4T = torch.cat([_merged(part_C5b.contiguous(), head.vocabulary) for part_C5b in blocks], 1)
        ctx.save_for_backward(hidden_TD, targets_T, temperature_T, merged_4T)
        ctx.head = head
        return tuple(merged_4T.masked_fill(targets_T < 0, 0).unbind())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TD, targets_T, temperature_T, merged_4T), head = ctx.saved_tensors, ctx.head
        kernels, block, into = head.pieces.kernels, head.pieces.block, head.into
        gradients_4T = torch.stack(gradients).masked_fill(targets_T < 0, 0)
        gradients_4T[3] /= head.vocabulary
        few, together = kernels.rows_of_logits(block), block * max(1, TOGETHER // block)  # tokens
        dtype = None if head.pieces.is_whole else torch.float32
        parts_T: list[list[Tensor]] = []
        for group in _blocks(together, hidden_TD, targets_T, temperature_T, merged_4T.T, gradients_4T.T):
            parts = []
            for first, rows_vD in head.parts():
                d_tv = torch.empty(len(group[0]), len(rows_vD), dtype=hidden_TD.dtype, device=hidden_TD.device)
                for d_bv, hidden_bD, targets_b, divisor_b, merged_b4, gradients_b4 in _blocks(few, d_tv, *group):
                    _, entropy_b, logsumexp_b, _ = merged_b4.T.contiguous()
                    kernels.piece_gradient(
                        head.logits(hidden_bD, rows_vD),
                        targets_b - first,
                        divisor_b,
                        logsumexp_b,
                        entropy_b,
                        gradients_b4.T.contiguous(),
                        d_bv,
                    )
                start = first - head.first
                parts.append(kernels.matmul_backward(d_tv, rows_vD, block, rows_vD.shape[1], dtype))
                total_vD = into.total[start : start + len(rows_vD)]
                kernels.add_outer(total_vD, into.peak, into.scale, d_tv, group[0], block, tuple(rows_vD.shape))
            parts_T.append(parts)
        pieces_T = [torch.cat(blocks) for blocks in zip(*parts_T, strict=True)]
        return sum_over_pieces(pieces_T, head.pieces.tp).to(hidden_TD.dtype), None, None, None, None


def _blocks(block: int, *values_T: Tensor) -> Any:
    return zip(*(one_T.split(block) for one_T in values_T), strict=True)


def _merged(pieces_C5b: Tensor, vocabulary: int) -> Tensor:
    """[4, b] outputs over the whole vocabulary, from those of its pieces."""
    highest_Cb, sums_Cb, weighted_Cb, squares_Cb, targets_Cb = pieces_C5b.unbind(1)
    highest_b = highest_Cb.amax(0)
    shift_Cb = highest_Cb - highest_b
    factor_Cb = shift_Cb.exp()
    sum_b = sum_by_pairs((factor_Cb * sums_Cb).unbind())
    weighted_b = sum_by_pairs((factor_Cb * (weighted_Cb + shift_Cb * sums_Cb)).unbind())
    log_sum_b = sum_b.log()
    return torch.stack(
        [
            targets_Cb.amax(0) - highest_b - log_sum_b,
            log_sum_b - weighted_b / sum_b,
            highest_b + log_sum_b,
            sum_by_pairs(squares_Cb.unbind()) / vocabulary,
        ]
    )
