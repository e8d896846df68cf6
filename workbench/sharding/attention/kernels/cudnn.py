"""cuDNN's fused attention, by torch's dense operator: a causal square or a full rectangle of scores at a time.

The operator knows no documents. Each segment of a block (`workbench.sharding.attention.segments`) is a square of its
last keys, causal, and a rectangle of the earlier ones, without a mask; both are merged by their log-normalisers, and
the backward of each gets the merged one.

torch also has a packed operator of cuDNN, with document boundaries. It is not used: in torch 2.11 its backward gave
NaN, each call took 44 ms of the host, and its causal mask is aligned to the first key (measured on an H200).

Letters: q queries | k keys | d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.sharding.attention.segments import Segment, segments_of
from workbench.sharding.attention.shard import Block

MOST_SHAPES = 32
"""Maximum number of shapes of a block: cuDNN plans each new one, which takes the host some 0.1 s."""

_FORWARD = (
    "query",
    "key",
    "value",
    "attn_bias",
    "compute_log_sumexp",
    "dropout_p",
    "is_causal",
    "return_debug_mask",
    "scale",
)
_BACKWARD = (
    "grad_out",
    "query",
    "key",
    "value",
    "out",
    "logsumexp",
    "philox_seed",
    "philox_offset",
    "attn_bias",
    "cum_seq_q",
    "cum_seq_k",
    "max_q",
    "max_k",
    "dropout_p",
    "is_causal",
    "scale",
)


@dataclass(frozen=True)
class Operators:
    """The two torch operators used here, or stand-ins with the same arguments."""

    forward: Any
    backward: Any

    @classmethod
    def of_torch(cls) -> Operators | None:
        """The operators of this build of torch; None if it has none with the expected arguments."""
        name = "_scaled_dot_product_cudnn_attention"
        packets: list[Any] = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]
        if None in packets:
            return None
        operators = cls(*(packet.default for packet in packets))
        expected = zip((operators.forward, operators.backward), (_FORWARD, _BACKWARD), strict=True)
        same = all(tuple(argument.name for argument in one._schema.arguments) == names for one, names in expected)
        return operators if same else None


class Part(NamedTuple):
    """A rectangle of scores between some queries and some of the sorted keys.

    Attributes:
        queries: rows of the queries.
        keys: rows of the keys, in the order of their positions.
        causal: a square in which a query sees the keys up to its own.
        queries_again: an earlier part has these queries too, so that both are merged; keys_again likewise.
    """

    queries: slice
    keys: slice
    causal: bool
    queries_again: bool
    keys_again: bool


class CudnnKernel:
    """cuDNN's attention with native grouped heads, for few long segments without a window.

    Source: `aten::_scaled_dot_product_cudnn_attention` and its backward, torch 2.11 to 2.13.
    """

    name = "cudnn"
    least_scores = 2**63
    """Never chosen by "auto": it is faster than flash on long documents alone (`experiments/step`)."""

    def __init__(self, operators: Operators | None = None) -> None:
        self.operators = operators or Operators.of_torch()

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """See `Kernel.refusal`."""
        return self._refused_tensors(query, key) or block.once("cudnn refused", lambda: _refused_block(block))

    def _refused_tensors(self, query: Tensor, key: Tensor) -> str | None:
        if query.device.type != "cuda" or torch.version.hip is not None:
            return f"cudnn runs on an NVIDIA GPU, and queries are on {query.device.type}"
        if query.dtype not in (torch.bfloat16, torch.float16) or key.dtype != query.dtype:
            return f"cudnn computes in bfloat16 or float16, and queries are {str(query.dtype).removeprefix('torch.')}"
        if self.operators is None or not torch.backends.cudnn.is_available():
            return f"torch {torch.__version__} has no cuDNN attention operator with the expected arguments"
        if torch.cuda.get_device_capability(query.device) < (9, 0):
            return "cudnn needs a GPU of compute capability 9.0: on earlier ones flash is as fast"
        if query.shape[-1] % 8 or query.shape[-1] > 128:
            return f"cudnn takes head dimensions that are multiples of 8 up to 128, not {query.shape[-1]}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output of the query's dtype, log-normalisers in float32."""
        assert self.operators is not None, "`refusal` says why there are none"
        key, value = _in_row_order(block, key, value)
        parts = parts_of(block)
        out = torch.zeros_like(query, dtype=torch.float32 if any(part.queries_again for part in parts) else None)
        lse = query.new_full((*query.shape[:3], 1), -torch.inf, dtype=torch.float32)
        for part in parts:
            rows, taken = part.queries, (query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys])
            part_out, part_lse, *_ = self.operators.forward(*taken, None, True, 0.0, part.causal, False, scale=scale)
            if part.queries_again:
                merged = torch.logaddexp(lse[:, :, rows], part_lse)
                part_out = out[:, :, rows] * (lse[:, :, rows] - merged).exp() + part_out * (part_lse - merged).exp()
                part_lse = merged
            out[:, :, rows] = part_out
            lse[:, :, rows] = part_lse
        return out.to(query.dtype), lse[..., 0]

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`.

        Gradients have the query's dtype; those that several parts add to are float32.
        """
        assert self.operators is not None, "`refusal` says why there are none"
        ordered_key, ordered_value = _in_row_order(block, key, value)
        of_queries = d_out.to(query.dtype), query, out.to(query.dtype), lse.float()[..., None]
        parts = parts_of(block)
        wide_q, wide_k = (
            torch.float32 if any(part[again] for part in parts) else None for again in (_QUERIES_AGAIN, _KEYS_AGAIN)
        )
        d_query = torch.zeros_like(query, dtype=wide_q)
        d_key, d_value = (torch.zeros_like(each, dtype=wide_k) for each in (key, value))
        unused = torch.empty((), dtype=torch.int64, device=query.device)  # random state: there is no dropout
        for part in parts:
            part_d_out, part_query, part_out, part_lse = (each[:, :, part.queries] for each in of_queries)
            part_key, part_value = ordered_key[:, :, part.keys], ordered_value[:, :, part.keys]
            lengths = part_query.shape[2], part_key.shape[2]
            grads = self.operators.backward(
                part_d_out,
                part_query,
                part_key,
                part_value,
                part_out,
                part_lse.contiguous(),  # the operator assumes its strides
                *(unused, unused, None, None, None, *lengths, 0.0, part.causal),
                scale=scale,
            )
            _put(d_query, part.queries, grads[0], add=part.queries_again)
            _put(d_key, part.keys, grads[1], add=part.keys_again)
            _put(d_value, part.keys, grads[2], add=part.keys_again)
        d_key, d_value = _in_block_order(block, d_key, d_value)
        return d_query, d_key, d_value


_QUERIES_AGAIN, _KEYS_AGAIN = Part._fields.index("queries_again"), Part._fields.index("keys_again")


def parts_of(block: Block) -> list[Part]:
    """The calls that compute a block; every score that counts is in exactly one of them."""
    return block.once("cudnn parts", lambda: list(_parts(segments_of(block))))


def _parts(segments: Sequence[Segment]) -> Iterator[Part]:
    """Squares first, then what earlier keys add to them."""
    keys_end = 0  # of the sorted keys that some part has seen
    rectangles = []
    for segment in segments:
        (query, stop), (key, end) = segment.queries, segment.keys
        rows = slice(query, stop)
        if not segment.causal:
            rectangles.append((rows, slice(key, end), False))
            continue
        square = end - (stop - query)
        yield Part(rows, slice(square, end), True, False, square < keys_end)
        keys_end = max(keys_end, end)
        if square > key:
            rectangles.append((rows, slice(key, square), True))
    for rows, keys, again in rectangles:
        yield Part(rows, keys, False, again, True)


def _put(into: Tensor, rows: slice, values: Tensor, *, add: bool) -> None:
    if add:
        into[:, :, rows] += values
    else:
        into[:, :, rows] = values


def _refused_block(block: Block) -> str | None:
    if any(segment.window is not None for segment in segments_of(block)):
        return "cudnn has no sliding window here"
    shapes = len({(_length(part.queries), _length(part.keys), part.causal) for part in parts_of(block)})
    if shapes > MOST_SHAPES:
        return f"cudnn plans each shape of a document's part, and this row has {shapes}, of at most {MOST_SHAPES}"
    return None


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _in_row_order(block: Block, *values: Tensor) -> tuple[Tensor, ...]:
    """[1, h, k, d] in the order of their positions."""
    order = _order(block, values[0].device)
    return values if order is None else tuple(value[:, :, order] for value in values)


def _in_block_order(block: Block, *values: Tensor) -> tuple[Tensor, ...]:
    """Undo `_in_row_order`."""
    order = _order(block, values[0].device)
    return values if order is None else tuple(torch.empty_like(value).index_copy_(2, order, value) for value in values)


def _order(block: Block, device: torch.device) -> Tensor | None:
    def make() -> Tensor | None:
        order = block.key_positions_k.argsort()
        return None if torch.equal(order, torch.arange(len(order))) else order.to(device)

    return block.once(("cudnn order", device), make)
