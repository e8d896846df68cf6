"""FlashAttention of torch over a block: bfloat16 and float16 on a GPU, no scores in memory.

A block becomes a few calls of the variable-length operator (`workbench.sharding.attention.segments`). The inputs of a
call are views if the block's keys are already in the order of the call; otherwise keys are gathered, some for several
segments, and their gradients are summed in float32.

Letters: q queries | k keys | d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.sharding.attention.kernels.row_sums import parts_of_rows, sum_rows
from workbench.sharding.attention.segments import Call, Rows, find_calls, segments_of
from workbench.sharding.attention.shard import Block

MOST_CALLS = 8
"""Maximum number of calls per block; a window over keys with gaps needs one per truncated width."""
MOST_REPEATS = 8
"""Maximum number of gathered keys, as a multiple of the block's keys."""

_SEGMENTS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD = ("query", "key", "value", *_SEGMENTS, "return_debug_mask")
_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp", *_SEGMENTS, "rng_state", "unused")
_OPTIONS = ("scale", "window_size_left", "window_size_right")


@dataclass(frozen=True)
class Operators:
    """The two torch operators used here, or stand-ins with the same arguments."""

    forward: Any
    backward: Any

    @classmethod
    def of_torch(cls) -> Operators | None:
        """The operators of this build of torch; None if it has none with the expected arguments."""
        packets: list[Any] = [
            getattr(torch.ops.aten, name, None) for name in ("_flash_attention_forward", "_flash_attention_backward")
        ]
        if None in packets:
            return None
        operators = cls(*(packet.default for packet in packets))
        expected = zip((operators.forward, operators.backward), (_FORWARD, _BACKWARD), strict=True)
        return operators if all(_has_arguments(operator, names) for operator, names in expected) else None


def _has_arguments(operator: Any, names: tuple[str, ...]) -> bool:
    arguments = operator._schema.arguments
    positional = tuple(argument.name for argument in arguments if not argument.kwarg_only)
    options = {argument.name for argument in arguments if argument.kwarg_only}
    return positional == names and options.issuperset(_OPTIONS)


class FlashKernel:
    """FlashAttention-2 (or the implementation that torch has registered), variable-length, with native grouped heads.

    Source: arXiv 2307.08691; `aten::_flash_attention_forward` and `_backward`, torch 2.11 to 2.13. With several segment
            lengths a causal mask is aligned to the last query and the last key.
    """

    name = "flash"
    least_scores = 0

    def __init__(self, operators: Operators | None = None) -> None:
        self.operators = operators or Operators.of_torch()

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """See `Kernel.refusal`."""
        return self._refused_tensors(query, key) or _refused_block(block)

    def _refused_tensors(self, query: Tensor, key: Tensor) -> str | None:
        if query.device.type != "cuda" or torch.version.hip is not None:
            return f"flash runs on an NVIDIA GPU, and queries are on {query.device.type}"
        if query.dtype not in (torch.bfloat16, torch.float16) or key.dtype != query.dtype:
            return f"flash computes in bfloat16 or float16, and queries are {str(query.dtype).removeprefix('torch.')}"
        if self.operators is None or not torch.backends.cuda.is_flash_attention_available():
            return f"torch {torch.__version__} has no flash attention operator with the expected arguments"
        if torch.cuda.get_device_capability(query.device) < (8, 0):
            return "flash needs a GPU of compute capability 8.0"
        if query.shape[-1] % 8 or query.shape[-1] > 256:
            return f"flash takes head dimensions that are multiples of 8 up to 256, not {query.shape[-1]}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output of the query's dtype, log-normalisers in float32."""
        calls = _calls(block, query.device)
        query_qHd, key_kHd, value_kHd = map(_rows, (query, key, value))
        outputs = [(call, *self._forward(call, (query_qHd, key_kHd, value_kHd), scale)) for call in calls]
        if len(calls) == 1 and _is_all(calls[0].query_rows, query_qHd):
            _, out_qHd, lse_Hq = outputs[0]
        else:
            out_qHd = torch.zeros_like(query_qHd)
            lse_Hq = query.new_full((query.shape[1], query.shape[2]), -torch.inf, dtype=torch.float32)
            for call, call_out_qHd, call_lse_Hq in outputs:
                _put(out_qHd, call.query_rows, call_out_qHd)
                _put(lse_Hq.T, call.query_rows, call_lse_Hq.T)
        return _heads(out_qHd), lse_Hq[None]

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

        Gradients have the query's dtype; those of keys and values that several calls or segments add to are float32.
        """
        calls = _calls(block, query.device)
        query_qHd, key_kHd, value_kHd = _rows(query), _rows(key), _rows(value)
        d_out_qHd, out_qHd = _rows(d_out.to(query.dtype)), _rows(out.to(query.dtype))
        lse_Hq = lse[0].float()
        of_queries, of_keys = (d_out_qHd, query_qHd, out_qHd), (key_kHd, value_kHd)
        grads = [(call, self._backward(call, of_queries, of_keys, lse_Hq, scale)) for call in calls]
        d_query = _heads(_placed([(call.query_rows, of_call[0]) for call, of_call in grads], query_qHd))
        if len(calls) <= 1 and not any(call.repeats for call in calls):
            d_key, d_value = (
                _heads(_placed([(call.key_rows, of_call[i]) for call, of_call in grads], key_kHd)) for i in (1, 2)
            )
            return d_query, d_key, d_value
        parts_kp = block.once(("parts of keys", query.device), lambda: _parts_of_keys(block).to(query.device))
        d_keys, d_values = ([of_call[i] for _, of_call in grads] for i in (1, 2))
        return d_query, _heads(sum_rows(_together(d_keys), parts_kp)), _heads(sum_rows(_together(d_values), parts_kp))

    def _forward(self, call: Call, inputs: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        assert self.operators is not None, "`refusal` says why there are none"
        rows = call.query_rows, call.key_rows, call.key_rows
        taken = map(_take, inputs, rows)
        out_qHd, lse_Hq, *_ = self.operators.forward(
            *taken, *_lengths_and_mask(call), False, scale=scale, **_window(call)
        )
        return out_qHd, lse_Hq

    def _backward(
        self, call: Call, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor], lse_Hq: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.operators is not None, "`refusal` says why there are none"
        d_out_qHd, query_qHd, out_qHd = (_take(one_qHd, call.query_rows) for one_qHd in of_queries)
        key_kHd, value_kHd = (_take(one_kHd, call.key_rows) for one_kHd in of_keys)
        inputs = d_out_qHd, query_qHd, key_kHd, value_kHd, out_qHd, _take(lse_Hq.T, call.query_rows).T.contiguous()
        unused = torch.empty(2, dtype=torch.uint64, device=lse_Hq.device)  # random state: there is no dropout
        return self.operators.backward(*inputs, *_lengths_and_mask(call), unused, unused, scale=scale, **_window(call))


def _calls(block: Block, device: torch.device) -> list[Call]:
    return block.once(("calls", device), lambda: [call.to(device) for call in find_calls(block)])


def _refused_block(block: Block) -> str | None:
    def why() -> str | None:
        segments = segments_of(block)
        gathered = sum(segment.keys[1] - segment.keys[0] for segment in segments)
        masks = len({(segment.causal, segment.window) for segment in segments if segment.causal is not None})
        if masks > MOST_CALLS:
            needed = f"{masks}, of at most {MOST_CALLS}"
            return f"flash needs one call for each mask of this order of tokens and this window: {needed}"
        if gathered > MOST_REPEATS * block.shape[1]:
            return (
                f"flash would gather {gathered} keys of {block.shape[1]} for {len(segments)} runs of queries, "
                f"and takes at most {MOST_REPEATS} times the number of keys; ring attention needs fewer"
            )
        return None

    return block.once("flash", why)


def _lengths_and_mask(call: Call) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """Starts and longest lengths, dropout 0, and True if the mask is causal without a window."""
    # With longest query 1 the operator takes a special path that assumes one query per segment; ours may have none.
    longest = max(call.longest_query, 2), call.longest_key
    return call.query_starts, call.key_starts, *longest, 0.0, call.causal and call.window is None


def _window(call: Call) -> dict[str, int]:
    """Number of visible keys before and after the diagonal; -1: all."""
    return {
        "window_size_left": -1 if call.window is None else call.window - 1,
        "window_size_right": 0 if call.causal else -1,
    }


def _rows(heads: Tensor) -> Tensor:
    """[1, H, n, d] -> [n, H, d], a view unless the operator needs a copy."""
    rows_nHd = heads[0].transpose(0, 1)
    aligned = rows_nHd.stride(2) == 1 and not any(stride % 8 for stride in rows_nHd.stride()[:2])
    return rows_nHd if aligned else rows_nHd.contiguous()


def _heads(rows_nHd: Tensor) -> Tensor:
    return rows_nHd.transpose(0, 1)[None]


def _take(values_n: Tensor, rows: Rows) -> Tensor:
    return values_n[rows] if isinstance(rows, slice) else values_n.index_select(0, rows)


def _put(into_n: Tensor, rows: Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        into_n[rows] = values
    else:
        into_n.index_copy_(0, rows, values)


def _is_all(rows: Rows, values_n: Tensor) -> bool:
    return rows == slice(0, len(values_n)) if isinstance(rows, slice) else False


def _placed(pieces: list[tuple[Rows, Tensor]], like_n: Tensor) -> Tensor:
    """Scatter gradients of rows into one tensor; 0 for rows without a gradient."""
    if len(pieces) == 1 and _is_all(pieces[0][0], like_n):
        return pieces[0][1]
    whole = like_n.new_zeros(like_n.shape)
    for rows, values in pieces:
        _put(whole, rows, values)
    return whole


def _parts_of_keys(block: Block) -> Tensor:
    """Places of each key of a block among the keys of all its calls, one call after another."""
    keys_k = torch.arange(block.shape[1])
    return parts_of_rows(torch.cat([keys_k[call.key_rows] for call in find_calls(block)]), len(keys_k))


def _together(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
