"""Keys and values as they travel: one tensor, token by token.

Tokens come first, so that what several ranks send stands in one piece, and a kernel that works token by token reads it
where it is. Decoders make keys and values in this order too.

Letters: t tokens | h key heads | d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def joined(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Keys and values, or their gradients, side by side. [1, h, t, d] each -> [t, 2 h, d]."""
    _, heads, tokens, features = key.shape
    both = key.new_empty(tokens, 2 * heads, features, dtype=dtype or key.dtype)
    both[:, :heads].copy_(key[0].transpose(0, 1))
    both[:, heads:].copy_(value[0].transpose(0, 1))
    return both


def parted(both: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the two. [t, 2 h, d] -> [1, h, t, d] each."""
    key, value = both.transpose(0, 1)[None].chunk(2, dim=1)
    return key, value
