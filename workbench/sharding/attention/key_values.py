"""Keys and values packed into one tensor for communication, token-major.

Tokens come first, so that tensors of several ranks concatenate contiguously, and a token-major kernel reads them in
place. Decoders produce keys and values in this order too.

Letters: t tokens | h key heads | d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_key_value(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack keys and values, or their gradients, into one tensor. [1, h, t, d] each -> [t, 2 h, d]."""
    _, heads, tokens, features = key.shape
    packed = key.new_empty(tokens, 2 * heads, features, dtype=dtype or key.dtype)
    packed[:, :heads].copy_(key[0].transpose(0, 1))
    packed[:, heads:].copy_(value[0].transpose(0, 1))
    return packed


def unpack_key_value(both: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack into views of keys and values. [t, 2 h, d] -> [1, h, t, d] each."""
    key, value = both.transpose(0, 1)[None].chunk(2, dim=1)
    return key, value
