"""Log-probabilities over the truncated support of the sampler: top-k, top-p and min-p, replayed token by token.

A sampler that truncates its distribution draws from q = softmax(z over the support), not from p. With K the truncated
support of a token, the target always in it, and z as in `head`:
    logprob = z_target - log sum_{v in K} exp z_v          entropy = - sum_{v in K} q_v log q_v
    dz_v = g_logprob (1[v = target] - q_v) - g_entropy q_v (log q_v + entropy),   v in K
A support of one token gives 0 without gradient. An empty set stands for the whole vocabulary: no truncation.

Only the logits in the support are computed, pair by pair, independent of the vocabulary size. Sums have a fixed order:
the same call gives bitwise the same outputs and gradients.

Letters: T tokens | C rows of a chunk | V vocabulary (this rank's rows of the head) | D model dimension
| P pairs of a token and an id of its support | S = T + 1 offsets | U pairs that share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShapeError
from workbench.policy.logprobs.engine import Accumulators, plan_chunks, rows_with_gradient
from workbench.policy.logprobs.head import Head, TokenLogprobs
from workbench.sharding.collectives import all_max, all_sum

BLOCK_BYTES = 2**26
"""Size of the rows of the head that are gathered at a time."""

SUPPORT_FIELDS = ("support_logprobs_T", "support_entropy_T")
"""Fields of truncated supports, which an engine does not compute."""


@dataclass(frozen=True, eq=False)
class TruncatedSupport:
    """Truncated support of each token, of any size, stored one after another.

    Attributes:
        ids_P: [P] vocabulary ids. A repeated id counts once; the target is always included, listed or not.
        offsets_S: [T + 1] on the host: the set of token t is ``ids_P[offsets_S[t]:offsets_S[t + 1]]``.

    Raises:
        ShapeError: not two rows of integers; offsets that do not begin at 0, decrease, or do not end at P; a negative
            id.

    Example:
        >>> TruncatedSupport.of([[3, 1], [], [2]]).offsets_S
        tensor([0, 2, 2, 3])
    """

    ids_P: Tensor
    offsets_S: Tensor

    def __post_init__(self) -> None:
        for name, row in (("ids_P", self.ids_P), ("offsets_S", self.offsets_S)):
            if not isinstance(row, Tensor) or row.dim() != 1 or row.dtype not in (torch.int64, torch.int32):
                found = f"{row.dtype} of shape {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
                raise ShapeError(
                    f"TruncatedSupport: {name}",
                    found=found,
                    rule="a row of integers, int64 or int32",
                    fix="build sets from lists of ids with TruncatedSupport.of",
                )
        object.__setattr__(self, "offsets_S", self.offsets_S.cpu())
        offsets, pairs = self.offsets_S, len(self.ids_P)
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != pairs or bool((offsets.diff() < 0).any()):
            raise ShapeError(
                "TruncatedSupport: offsets_S",
                found=f"{offsets[:5].tolist()} ... for {pairs} ids",
                rule="T + 1 offsets: from 0, never decreasing, to the number of ids",
                fix="build them with TruncatedSupport.of, or torch.cumsum of the sizes with a 0 in front",
            )
        if pairs and int(self.ids_P.min()) < 0:
            raise ShapeError(
                "TruncatedSupport: ids_P",
                found=f"id {int(self.ids_P.min())}",
                rule="vocabulary ids",
                fix="leave out the padding of a top-k table: sets are ragged",
            )

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> TruncatedSupport:
        """Build supports from one list of ids per token."""
        ids = [token for ids in sets for token in ids]
        offsets = torch.tensor([0, *(len(ids) for ids in sets)]).cumsum(0)
        return cls(torch.tensor(ids, dtype=torch.int64, device=device), offsets)

    @classmethod
    def of_table(cls, ids_TK: Tensor) -> TruncatedSupport:
        """Build supports from a table [T, K] of ids, filled up with negative numbers."""
        is_id_TK = ids_TK >= 0
        offsets_S = torch.cat([torch.zeros(1, dtype=torch.int64), is_id_TK.sum(dim=1).cpu().cumsum(0)])
        return cls(ids_TK[is_id_TK].to(torch.int64), offsets_S)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.offsets_S) - 1

    def rows(self, rows: slice | Tensor) -> TruncatedSupport:
        """Select the supports of some tokens, by a slice of step 1 or by indices in any order."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            first, last = int(self.offsets_S[start]), int(self.offsets_S[stop])
            return _unchecked(self.ids_P[first:last], self.offsets_S[start : stop + 1] - first)
        rows = rows.cpu()
        starts, sizes = self.offsets_S[rows], self.offsets_S.diff()[rows]
        offsets_S = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        within_P = torch.arange(int(offsets_S[-1])) + (starts - offsets_S[:-1]).repeat_interleave(sizes)
        return _unchecked(self.ids_P[within_P.to(self.ids_P.device)], offsets_S)

    def untruncated(self, device: torch.device | str) -> Tensor | None:
        """[T] bool: True if the token's set is empty and stands for the whole vocabulary; None: no set is empty."""
        whole_T = self.offsets_S.diff() == 0
        return whole_T.to(device) if bool(whole_T.any()) else None


def _unchecked(ids_P: Tensor, offsets_S: Tensor) -> TruncatedSupport:
    sets = object.__new__(TruncatedSupport)
    object.__setattr__(sets, "ids_P", ids_P)
    object.__setattr__(sets, "offsets_S", offsets_S)
    return sets


def check_support(kept: TruncatedSupport, targets_T: Tensor, head: Head) -> None:
    """Check truncated supports against the rows and the head.

    Raises:
        ShapeError: no `TruncatedSupport`, not one set per token, or an id outside the vocabulary.
    """
    if not isinstance(kept, TruncatedSupport):
        found, rule = type(kept).__name__, "TruncatedSupport"
        fix = "build them from lists of ids with TruncatedSupport.of"
    elif len(kept) != len(targets_T):
        found = f"{len(kept)} sets for {len(targets_T)} tokens"
        rule = "one set for each token; an empty one stands for the whole vocabulary"
        fix = "slice and shift the sets like the targets"
    elif len(kept.ids_P) and int(kept.ids_P.max()) >= head.vocabulary:
        found, rule = f"id {int(kept.ids_P.max())}", f"0 <= id < {head.vocabulary}, the whole vocabulary"
        fix = "take the ids from the tokenizer that the head was trained with"
    else:
        return
    raise ShapeError("token_logprobs: kept", found=found, rule=rule, fix=fix)


def full_where_empty(head_output: TokenLogprobs, whole_T: Tensor | None) -> TokenLogprobs:
    """Use the outputs over the whole vocabulary for tokens with an empty set; differentiable."""
    if whole_T is None or head_output.support_logprobs_T is None:
        return head_output
    chosen = {}
    for name in SUPPORT_FIELDS:
        full_T, support_T = getattr(head_output, name.removeprefix("support_")), getattr(head_output, name)
        if full_T is not None and support_T is not None:
            chosen[name] = torch.where(whole_T, full_T, support_T)
    return head_output._replace(**chosen)


@dataclass(frozen=True)
class SupportChunk:
    """Outputs over the truncated supports of a chunk, and tensors saved for their backward.

    Attributes:
        logprobs_C: of the target in its support; 0 if the set is empty.
        entropy_C: of the distribution over the support; 0 if the set is empty.
        hidden_CD: the rows.
        divisor_P: the temperature, one for all pairs or one each.
        row_P, id_P, logits_P: of each local pair, in order: its row, its local row of the head, and its z.
        is_target_P: True if it is its row's target.
        logsumexp_C: over the supports.
    """

    logprobs_C: Tensor
    entropy_C: Tensor
    hidden_CD: Tensor
    divisor_P: float | Tensor
    row_P: Tensor
    id_P: Tensor
    logits_P: Tensor
    is_target_P: Tensor
    logsumexp_C: Tensor


def forward(
    head: Head, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor, kept: TruncatedSupport
) -> SupportChunk:
    """Compute the outputs over the truncated supports of a chunk; over tp every rank computes its local pairs.

    Shapes:   hidden_CD [C, D], targets_C [C], C sets.
    """
    rows, device = len(targets_C), hidden_CD.device
    sizes_C = kept.offsets_S.diff().to(device)
    row_P = torch.arange(rows, device=device).repeat_interleave(sizes_C, output_size=len(kept.ids_P))
    targeted = torch.nonzero(sizes_C)[:, 0]
    # A row that is not computed may be among them, if the number of computed rows is a guess: its target may be any.
    own = targets_C[targeted].clamp(0, head.vocabulary - 1)
    # One number for each pair: sorted and unique, including the target's.
    pairs_P = torch.unique(
        torch.cat([row_P * head.vocabulary + kept.ids_P.to(device), targeted * head.vocabulary + own])
    )
    row_P, id_P = pairs_P // head.vocabulary, pairs_P % head.vocabulary - head.first_token
    if head.is_split:
        is_local_P = (id_P >= 0) & (id_P < head.valid)
        row_P, id_P = row_P[is_local_P], id_P[is_local_P]
    divisor_P = temperature[row_P].to(head.wide) if isinstance(temperature, Tensor) else temperature
    bias_P = None if head.bias_V is None else head.bias_V[id_P]
    logits_P = head.logits_(_dots(head, hidden_CD, row_P, id_P), bias_P, divisor_P)
    is_target_P = id_P == targets_C[row_P] - head.first_token

    lengths_C = torch.bincount(row_P, minlength=rows)
    highest_C = torch.segment_reduce(logits_P, "max", lengths=lengths_C, unsafe=True)
    if head.axis is not None:
        highest_C = all_max(highest_C, head.axis)
    shifted_P = logits_P - highest_C[row_P]
    exp_P = shifted_P.exp()
    weighted_P, target_P = exp_P * shifted_P.masked_fill(exp_P == 0, 0), shifted_P.masked_fill(~is_target_P, 0)
    sums_C = torch.stack([_segment_sum(values_P.double(), lengths_C) for values_P in (exp_P, weighted_P, target_P)])
    if head.axis is not None:
        sums_C = all_sum(sums_C, head.axis)
    sums_C = sums_C.to(head.wide)
    empty_C = sizes_C == 0
    sum_C, weighted_C, target_C = sums_C
    sum_C = sum_C.masked_fill(empty_C, 1)
    return SupportChunk(
        target_C - sum_C.log(),
        sum_C.log() - weighted_C / sum_C,
        hidden_CD,
        divisor_P,
        row_P,
        id_P,
        logits_P,
        is_target_P,
        highest_C.masked_fill(empty_C, 0) + sum_C.log(),
    )


def backward(
    head: Head,
    chunk: SupportChunk,
    logprobs_gradient_C: Tensor | None,
    entropy_gradient_C: Tensor | None,
    into: Accumulators,
    rows: slice,
) -> None:
    """Add the gradients of a chunk to hidden (partial over tp), weight and bias; None is zero.

    A row whose gradients are all zero adds nothing, even if its hidden state is not finite.
    """
    nonzero_C = rows_with_gradient(
        (logprobs_gradient_C, entropy_gradient_C), len(chunk.hidden_CD), chunk.hidden_CD.device
    )
    hidden_CD = chunk.hidden_CD.masked_fill(~nonzero_C[:, None], 0)
    log_q_P = chunk.logits_P - chunk.logsumexp_C[chunk.row_P]
    q_P = log_q_P.exp()
    gradient_P = torch.zeros_like(q_P)
    if logprobs_gradient_C is not None:
        gradient_P += logprobs_gradient_C[chunk.row_P] * (chunk.is_target_P.to(q_P.dtype) - q_P)
    if entropy_gradient_C is not None:
        surprise_P = log_q_P.masked_fill(q_P == 0, 0) + chunk.entropy_C[chunk.row_P]
        gradient_P -= entropy_gradient_C[chunk.row_P] * q_P * surprise_P
    gradient_P = head.back_(gradient_P, chunk.logits_P, chunk.divisor_P).masked_fill_(~nonzero_C[chunk.row_P], 0)
    for block in _blocks(head, len(gradient_P)):
        row_B, id_B, gradient_B1 = chunk.row_P[block], chunk.id_P[block], gradient_P[block, None]
        if into.hidden_TD is not None:
            _add_sorted(into.hidden_TD[rows], row_B, gradient_B1 * head.weight_VD[id_B].to(head.wide))
        order_B = torch.argsort(id_B, stable=True)
        if into.weight_VD is not None:
            _add_sorted(into.weight_VD, id_B[order_B], (gradient_B1 * hidden_CD[row_B].to(head.wide))[order_B])
        if into.bias_V is not None:
            _add_sorted(into.bias_V, id_B[order_B], gradient_P[block][order_B])


def _blocks(head: Head, pairs: int) -> list[slice]:
    return plan_chunks(pairs, max(1, BLOCK_BYTES // (head.weight_VD.shape[1] * head.wide.itemsize)))


def _dots(head: Head, hidden_CD: Tensor, row_P: Tensor, id_P: Tensor) -> Tensor:
    """Dot product of hidden state and head row of each pair, a block at a time."""
    dots_P = hidden_CD.new_empty(len(row_P), dtype=head.wide)
    for block in _blocks(head, len(row_P)):
        dots_P[block] = (hidden_CD[row_P[block]].to(head.wide) * head.weight_VD[id_P[block]].to(head.wide)).sum(-1)
    return dots_P


def _segment_sum(values_P: Tensor, lengths_C: Tensor) -> Tensor:
    return torch.segment_reduce(values_P, "sum", lengths=lengths_C, unsafe=True)


def _add_sorted(out: Tensor, index_B: Tensor, values_B: Tensor) -> None:
    """Add values to the rows given by a sorted index; each row is summed once, in order."""
    unique_U, lengths_U = torch.unique_consecutive(index_B, return_counts=True)
    out.index_add_(0, unique_U, _segment_sum(values_B, lengths_U).to(out.dtype))
