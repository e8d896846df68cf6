"""A whole decoder, ready to be sharded: with the workbench's attention, checked, in the dtype of its weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from workbench.policy.attention import check_logits, probe_logits, refuse_unknown, with_our_attention
from workbench.policy.decoder import TINY, copied, load_decoder
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.prediction import add_prediction

Places = tuple[str, str] | None
"""Attributes of a decoder's base that hold layers which predict further tokens, and the norm behind them."""


def prepare_decoder(
    source: str,
    *,
    project: Path | None,
    tied: bool | None,
    seed: int,
    depths: int,
    dtype: torch.dtype,
    lifted: bool,
) -> tuple[Any, Places]:
    """Return a decoder that is the caller's own, and where its added layers are; None: it has none.

    This process keeps tiny decoders, which their settings determine, and hands out copies: simulated ranks load one
    often.

    Args:
        source: see `decoder.load_decoder`.
        project: see there.
        tied: see there.
        seed: see there.
        depths: layers to add that predict further tokens; see `policy.prediction`.
        dtype: of the weights.
        lifted: everything is in float64, whatever ``dtype`` is; see `precision.lift_to_float64`.

    Raises:
        SpecError: no such checkpoint, an unsupported feature, or logits that are not those of the stock model.
    """
    settings: dict[str, Any] = {"tied": tied, "seed": seed, "depths": depths, "dtype": dtype, "lifted": lifted}
    if source in TINY:
        model, places = _prepared_tiny(source, **settings)
        return copied(model), places
    return _prepared(source, project=project, **settings)


def _prepared(
    source: str,
    *,
    project: Path | None = None,
    tied: bool | None,
    seed: int,
    depths: int,
    dtype: torch.dtype,
    lifted: bool,
) -> tuple[Any, Places]:
    model = load_decoder(source, project=project, tied=tied, seed=seed).eval()  # no dropout; gradients as in training
    refuse_unknown(model, depths=depths)
    model = with_our_attention(model)
    places = add_prediction(model, depths, seed=seed, from_checkpoint=source not in TINY) if depths else None
    model.get_input_embeddings().padding_idx = None  # a packed row has no padding id: every embedding is trained
    if not lifted:
        return cast(model, dtype), places
    expected = probe_logits(model, "float32")
    model = lift_to_float64(model)
    check_logits(model, probe_logits(model, "float64"), expected, what="float64 run")
    return model, places


_prepared_tiny = functools.lru_cache(maxsize=8)(_prepared)
"""`_prepared`, kept. Eight, by convention: settings of a run and of those it is compared with, a megabyte each."""
