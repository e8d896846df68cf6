"""Attention of a decoder: the workbench's over shards, checked against the stock model's, or torch's own.

Both have names in the attention registry of `transformers`, under which no mask is built from positions: on a rank that
holds the head and the tail of a row, "sdpa" would take increasing positions for packed documents. A replacement of
``torch.nn.functional.scaled_dot_product_attention`` (as torch's context parallelism makes) takes effect under `TORCH`.

Letters: B rows | T tokens | V vocabulary | D model dimension | d head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workbench.errors import SpecError
from workbench.policy.decoder import head_of
from workbench.policy.logprobs.head import make_head
from workbench.sharding.attention import AttentionShard, sharded_attention

SHARDED = "workbench_sharded"
TORCH = "workbench_torch"


PREDICTION_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Names, in configurations of `transformers`, of the number of layers for multi-token prediction. It loads a model
without them, so without `policy.prediction` their weights would be lost."""


def refuse_unknown(model: Any, *, depths: int = 0) -> None:
    """Reject features that are known to be unsupported; `with_our_attention` measures the rest.

    ``depths`` is the number of layers for multi-token prediction that the policy adds.
    """
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    refused = [f"attn_logit_softcapping = {cap}"] if cap else []
    known = ("full_attention", "sliding_attention")
    refused += [
        f"{name} = {layers}, layers that predict several tokens and are not part of the model's forward"
        for name in PREDICTION_COUNTS
        if (layers := getattr(config, name, None)) and not depths
    ]
    refused += [f"layers of type {kind!r}" for kind in getattr(config, "layer_types", None) or () if kind not in known]
    # These derive their frequencies from the longest position, which differs by rank and by packing.
    refused += [
        f"rotary embedding {module.rope_type!r}"
        for module in model.modules()
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope")
    ]
    if refused:
        raise SpecError(
            f"policy of model type {config.model_type!r}",
            found=", ".join(dict.fromkeys(refused)),
            rule="causal attention, full or with a sliding window; rotary angles from a token's own position; one "
            "prediction of each token",
            fix="use a model without these; train layers for multi-token prediction with prediction.depths, or set "
            "their number in config.json to 0",
        )


def with_our_attention(model: Any) -> Any:
    """Set a decoder's attention to the workbench's, and reject the model if its logits change.

    Two short documents in one packed row, its tokens in a shuffled order, must get the logits that the stock model
    gives each alone, from our hidden states and the head that its configuration describes. This detects what a list of
    names cannot: another scale on the logits, positions that the model counts itself, attention that bypasses the
    registry. Sliding windows are made shorter than the documents for the check: a window of thousands of tokens
    that is not passed to attention would go unnoticed.

    Raises:
        SpecError: it does not run with our attention, or gives other logits.
    """
    from transformers import AttentionInterface

    with _short_windows(model), torch.no_grad():
        documents = (_PROBE[None] % model.config.get_text_config().vocab_size).split([5, 3], dim=1)
        stock = torch.cat([model(input_ids=tokens, use_cache=False).logits[0] for tokens in documents])
        AttentionInterface.register(SHARDED, sharded_attention)
        model.set_attn_implementation(SHARDED)
        check_logits(model, probe_logits(model, "packed"), stock, what="packed run")
    return model


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Limit sliding windows to three tokens, wherever the model and its configuration have one."""
    owners: dict[int, Any] = {
        id(one): one for module in model.modules() for one in (module, getattr(module, "config", None))
    }
    with contextlib.ExitStack() as restore:
        for owner in owners.values():
            if isinstance(window := getattr(owner, "sliding_window", None), int):
                restore.callback(setattr, owner, "sliding_window", window)
                owner.sliding_window = min(window, 3)
        yield


_PROBE = torch.tensor([1, 3, 2, 5, 4, 2, 6, 1])
_PROBE_ORDER = torch.tensor([4, 0, 6, 2, 7, 1, 5, 3])


def probe_logits(model: Any, what: str) -> Tensor:
    """Logits of two packed documents in document order, computed as a policy does, from a shuffled row."""
    shard = AttentionShard(_PROBE_ORDER[None, None], documents_T=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])[_PROBE_ORDER]
    config = model.config.get_text_config()
    try:
        with torch.no_grad():
            tokens = _PROBE[_PROBE_ORDER] % config.vocab_size
            hidden_TD = model.base_model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, shard=shard
            ).last_hidden_state[0]
            head = make_head(**head_of(model))
            logits_TV = head.logits_(hidden_TD @ head.weight_VD.T, head.bias_V, 1.0)
            return logits_TV[torch.argsort(_PROBE_ORDER)]
    except (TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise SpecError(
            f"policy of model type {config.model_type!r}: {what}",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            rule="a decoder whose attention goes through the attention registry of transformers",
            fix="use a dense decoder such as Llama, Qwen2, Qwen3 or Mistral",
        ) from None


def check_logits(model: Any, actual_TV: Tensor, expected_TV: Tensor, *, what: str) -> None:
    """Reject a model whose logits have changed."""
    relative_error = float((actual_TV.double() - expected_TV.double()).abs().max() / expected_TV.double().abs().max())
    if not relative_error <= 1e-3:  # far above the rounding of float32; the negation also catches NaN
        raise SpecError(
            f"policy of model type {model.config.get_text_config().model_type!r}: {what}",
            found=f"logits off by {relative_error:.2g} of the largest, relative to the stock model's",
            rule="logits are hidden states times the head's weight, scaled and capped as the configuration says; "
            "documents in a packed row do not attend to each other; norms and rotary "
            "embeddings are of a known kind",
            fix="use a dense decoder such as Llama, Qwen2, Qwen3 or Mistral",
        )


def with_torch_attention(model: Any) -> Any:
    """Set a `transformers` decoder's attention to torch's without a mask; return the decoder.

    Rows must be one document each, padded at the end if at all: a causal query never attends to later padding.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(TORCH, torch_attention)
    model.set_attn_implementation(TORCH)
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
