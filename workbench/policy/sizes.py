"""Sizes of a decoder from its configuration alone: no torch, no weights, no model.

Only what the configuration states is known: a family that names its sizes otherwise is left to the ranks, which build
the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import SpecError
from workbench.policy.decoder import SIZES, TINY
from workbench.sharding import divisibility
from workbench.untrusted import parse_json

CONFIG = "config.json"
TINY_VOCABULARY, TINY_FEATURES, TINY_EXPERTS = (
    19,
    192,
    4,
)  # of `load_decoder` and of the tiny models; a test compares them
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Sizes:
    """Sizes that a layout must divide; None where the configuration does not state one.

    Attributes:
        heads: query heads.
        key_heads: key/value heads.
        vocabulary: rows of the embedding.
        features: between the two layers of each feed-forward; None for a mixture of experts, of which only some layers
            may be dense.
        experts: of a mixture; None where none are stated, which may be named otherwise.
    """

    heads: int | None
    key_heads: int | None
    vocabulary: int | None
    features: int | None
    experts: int | None = None
    layers: int | None = None


def read_sizes(source: str, project: Path) -> Sizes | None:
    """Return the sizes of the decoder of a source; None for a hub id, which may not be on this machine.

    Raises:
        SpecError: config.json is not JSON.
    """
    if source in TINY:
        features, experts = (TINY_FEATURES, None) if source == "tiny-qwen3" else (None, TINY_EXPERTS)
        heads, keys, layers = (SIZES[f"num_{name}"] for name in ("attention_heads", "key_value_heads", "hidden_layers"))
        return Sizes(heads, keys, TINY_VOCABULARY, features, experts, layers)
    path = project / source / CONFIG
    if not path.is_file():
        return None
    try:
        config = parse_json(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"read {path}",
            found=f"{type(error).__name__}: {error}",
            rule="the configuration of a checkpoint is JSON",
            fix="save or copy the checkpoint again",
        ) from None
    return sizes_of(config) if isinstance(config, Mapping) else None


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes that a configuration states, or its part for text."""
    config = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config

    def size(names: Iterable[str]) -> int | None:
        return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), None)

    heads = size(["num_attention_heads", "n_head"])
    experts = size(_EXPERTS)
    return Sizes(
        heads,
        size(["num_key_value_heads"]) or heads,
        size(["vocab_size"]),
        None if experts else size(["intermediate_size", "n_inner"]),
        experts,
        size(["num_hidden_layers", "n_layer"]),
    )


def check_layout(
    sizes: Sizes,
    *,
    tp: int,
    dealt: int = 1,
    weight_chunks: int = 1,
    ep: int = 1,
    pp: int = 1,
    stages_per_rank: int = 1,
    stage_layers: Sequence[int] = (),
) -> None:
    """Raise if a layout cannot split a decoder, by the rules that its ranks apply.

    Args:
        sizes: of the decoder.
        tp: tensor-parallel ranks.
        dealt: cp ranks to which attention deals the heads that tp leaves (Ulysses), 1 if none.
        weight_chunks: of the reproducible mode, 1 outside it.
        ep: ranks that share experts.
        pp: pipeline ranks.
        stages_per_rank: pipeline stages of each.
        stage_layers: layers of each stage; (): equal runs.

    Raises:
        ShardingError, SpecError: heads, features, a vocabulary or experts that do not divide; too few layers.
    """
    if sizes.layers is not None and pp > 1:
        divisibility.check_stages(sizes.layers, pp, stages_per_rank, stage_layers)
    if sizes.experts is not None:
        divisibility.check_experts("the model", sizes.experts, ep)
    heads, keys = sizes.heads, sizes.key_heads
    if heads and keys:
        divisibility.check_heads({"query": heads, "key/value": keys}, tp)
        divisibility.check_dealt_heads(heads // tp, keys // tp, dealt, "cp")
    if sizes.features:
        divisibility.check_features("the feed-forward layers", sizes.features, tp)
    if sizes.vocabulary:
        divisibility.check_pieces("vocabulary", sizes.vocabulary, tp)
    if heads and keys and sizes.features and sizes.vocabulary and weight_chunks > 1:
        counts = {"query heads": heads, "features between two layers": sizes.features, "key/value heads": keys}
        divisibility.check_weight_chunks(weight_chunks, counts, sizes.vocabulary, tp)


def check_whole_vocabulary(requested: str, tp: int, known: Iterable[str] = ()) -> None:
    """Raise if log-probabilities are none of ``known``, or need the whole vocabulary on a rank, and tp splits it."""
    names = list(known)
    if (names and requested not in names) or (requested == "reference" and tp > 1):
        raise SpecError(
            f"policy.logprobs = {requested!r} with tp={tp}",
            rule=f"one of auto{''.join(f', {name}' for name in names)}; reference needs the whole vocabulary, tp=1",
            fix="use auto, or vocabulary_parallel",
        )
