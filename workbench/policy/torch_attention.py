"""A decoder whose attention is torch's own function, called for plain causal attention.

Under the name "sdpa" `transformers` builds a mask if positions do not increase by one, which it takes for packed
documents: on a rank that holds the head and the tail of a row that mask is wrong. Under this name it builds none.
A replacement of ``torch.nn.functional.scaled_dot_product_attention`` (as torch's context parallelism makes) takes
effect here too.

Letters: B rows | T tokens | d head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from workbench.errors import SpecError

ATTENTION = "workbench_torch"


def with_torch_attention(model: Any) -> Any:
    """Set a `transformers` decoder's attention to torch's without a mask; return the decoder.

    Rows must be one document each, padded at the end if at all: a causal query never attends to later padding.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, torch_attention)
    model.set_attn_implementation(ATTENTION)
    return model


def torch_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows, with the signature of a `transformers` attention function.

    Shapes:   query [B, Hq, T, d], key and value [B, Hk, T, d] -> [B, T, Hq, d]; Hk divides Hq.
    Backward: torch's.
    Raises:   SpecError: a mask, dropout, a window, or another change of attention.
    """
    options = {"attention_mask": attention_mask, "dropout": dropout or None, "sliding_window": sliding_window}
    options |= {name: other.get(name) for name in ("s_aux", "softcap", "position_bias")}
    if refused := [name for name, value in options.items() if value is not None]:
        raise SpecError(
            f"torch's attention with {', '.join(refused)}",
            rule="plain causal attention over the row",
            fix="use a model without it, or train without it (model.eval() disables dropout)",
        )
    mixed = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return mixed.transpose(1, 2).contiguous(), None
