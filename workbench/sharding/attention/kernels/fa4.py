"""FlashAttention-4 over a block: the calls of the flash kernel, by the package flash-attn-4 (an optional extra).

One call for all documents of a row, as with flash, at the rate of the GPU's newer matrix instructions. torch can
register the package in place of its own flash operators (`torch.nn.attention.activate_flash_attention_impl`), for the
whole process and for the release of the package that it was written for; here it is called by name.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from workbench.sharding.attention.kernels.flash import FlashKernel, Operators
from workbench.sharding.attention.shard import Block


class Fa4Kernel(FlashKernel):
    """FlashAttention-4, variable-length, with native grouped heads.

    Source: `flash_attn.cute.interface` of flash-attn-4 4.0.0b36; masks are aligned to the last query and the last key.
    """

    name = "fa4"
    least_scores = 2**63
    """Never chosen by "auto": the package is a beta release that compiles for seconds at first use."""

    def __init__(self, operators: Operators | None = None) -> None:
        self.operators = operators or Operators(_forward, _backward)

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """See `Kernel.refusal`."""
        return self._refused_package(query) or super().refusal(query, key, block)

    def _refused_package(self, query: Tensor) -> str | None:
        if not _installed():
            return "fa4 needs the package flash-attn-4; pip install 'workbench[fa4]'"
        if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device)[0] not in (9, 10):
            return "fa4 needs a GPU of compute capability 9 or 10"
        if query.shape[-1] > 128:
            return f"fa4 takes head dimensions up to 128, not {query.shape[-1]}"
        return None


@functools.cache
def _installed() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def _package() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    debug: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Arguments of torch's operator, to those of the package."""
    lengths = {"max_seqlen_q": longest_query, "max_seqlen_k": longest_key}
    starts = {"cu_seqlens_q": query_starts, "cu_seqlens_k": key_starts}
    tensors = query, key, value
    out, lse, *_ = _package()._flash_attn_fwd(*tensors, **_mask(causal, options), **starts, **lengths, return_lse=True)
    return out, lse


def _backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = {"max_seqlen_q": longest_query, "max_seqlen_k": longest_key}
    starts = {"cu_seqlens_q": query_starts, "cu_seqlens_k": key_starts}
    tensors = query, key, value, out, d_out, lse
    d_query, d_key, d_value, *_ = _package()._flash_attn_bwd(*tensors, **_mask(causal, options), **starts, **lengths)
    return d_query, d_key, d_value


def _mask(causal: bool, options: dict[str, Any]) -> dict[str, Any]:
    """The package has None for a side without a limit, where torch has -1, and no window with a causal mask."""
    window = {name: None if causal or options[name] < 0 else options[name] for name in _SIDES}
    return {"softmax_scale": options["scale"], "causal": causal, **window}


_SIDES = ("window_size_left", "window_size_right")
