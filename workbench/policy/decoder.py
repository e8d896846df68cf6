"""Stock decoders of `transformers`: checkpoints, tiny ones, and published sizes with seeded weights.

Tiny models are real architectures in toy sizes: grouped-query attention, query and key norms, rotary positions, gated
feed-forward, in one of them experts and a router. Each can break in its own way under sharding.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import SpecError, listed

if TYPE_CHECKING:
    from transformers import (
        CLIPVisionModel,
        GptOssForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        SiglipVisionModel,
    )


def load_decoder(source: str, *, project: Path | None = None, tied: bool | None = None, seed: int = 0) -> Any:
    """Return the stock `transformers` decoder of a source, unsharded, in float32, on CPU.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `TINY`.
        project: base of relative folders.
        tied: tiny models only: the head is the embedding.
        seed: tiny models only: of their weights.

    Raises:
        SpecError: no such checkpoint, or one whose tensors are not exactly the model's.
    """
    if source in TINY:
        return copied(_tiny(source, tied is not False, seed))
    check_tied(source, tied)
    folder = (project or Path()) / source
    files = sorted((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in folder.glob("*.*"))
    if not files or sum(size for _, _, size in files) > SMALL_BYTES:
        return _load(source, folder)
    if _small.get("files") != files:
        _small.update(files=files, model=_load(source, folder))
    return copied(_small["model"])


@functools.lru_cache(maxsize=8)
def _tiny(source: str, tied: bool, seed: int) -> Any:
    """A tiny decoder, which its settings determine, and of which only copies are handed out."""
    return TINY[source](19, tied=tied, seed=seed)


def copied(model: Any) -> Any:
    """Return a deep copy of a model: its empty containers, a dozen of each module, take half of the time otherwise."""
    empty = {
        id(value): type(value)()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (dict, set, OrderedDict) and not value
    }
    return copy.deepcopy(model, empty)


def check_tied(source: str, tied: bool | None) -> None:
    """Raise if tying is requested of a checkpoint, which defines it."""
    if tied is not None and source not in TINY:
        raise SpecError(
            f"model.tied = {tied} with model.source = {source!r}",
            rule=f"a checkpoint defines whether its head is tied; only the tiny models ({', '.join(TINY)}) take either",
            fix="leave model.tied out",
        )


SMALL_BYTES = 64 << 20
"""Size of the checkpoints of which a process keeps the most recent one: runs of one job load it in 8 ms, not 250 ms."""

_small: dict[str, Any] = {}


def _refuse_incomplete(source: str, folder: Path) -> None:
    """Raise for a folder that is no checkpoint of a whole model, or only changes one."""
    if (folder / "adapter_config.json").is_file():
        raise SpecError(
            f"load model.source = {source!r}",
            found="an adapter (adapter_config.json), such as LoRA's",
            rule="a checkpoint of the whole model; an adapter is the source of lora, and its base that of the model",
            fix=f"model.source: its base (base_model_name_or_path in that file), and lora.source: {source}",
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        raise SpecError(
            f"load model.source = {source!r}",
            found=f"a folder without config.json: {folder.resolve()}",
            rule="a checkpoint folder (config.json, *.safetensors), as save_pretrained writes it",
            fix=f"name the folder of one of its checkpoints: {listed(inside)}" if inside else "check the path",
        )


def decoder_config(source: str, *, project: Path | None = None) -> Any:
    """Return the configuration of the decoder of a source, whose weights are not read.

    Raises:
        SpecError: no such checkpoint.
    """
    if source in TINY:
        return copy.deepcopy(_tiny(source, True, 0).config.get_text_config())
    import transformers

    folder = (project or Path()) / source
    with _named_errors(source, folder):
        config = transformers.AutoConfig.from_pretrained(folder if folder.is_dir() else source)
    return config.get_text_config()


@contextmanager
def _named_errors(source: str, folder: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into one that names the source."""
    from safetensors import SafetensorError

    _refuse_incomplete(source, folder)
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecError(
            f"load model.source = {source!r}",
            found=str(error).splitlines()[0],
            rule="a checkpoint folder (config.json, *.safetensors), a hub id that can be reached, or "
            f"one of {', '.join(TINY)}",
            fix=f"check the path (the folder {source!r} is looked up under the project root)",
        ) from None


def _load(source: str, folder: Path) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # safetensors only, so that no pickle is loaded (DECISIONS.md, 18)
    with _named_errors(source, folder):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(  # annotated without the loading info
            folder if folder.is_dir() else source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        model, info = loaded
    mismatches = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(str, info[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if mismatches:
        raise SpecError(
            f"load model.source = {source!r}",
            found="; ".join(mismatches),
            rule="the checkpoint holds exactly the tensors of the model: none initialized at random, none ignored",
            fix="save the whole model again, or fix config.json",
        )
    return model


def head_of(model: Any) -> dict[str, Any]:
    """Weight, bias, scale and cap of a decoder's output head, by the names of `transformers` configurations."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return {
        "weight_VD": head.weight,
        "bias_V": getattr(head, "bias", None),
        "logit_scale": scale,
        "soft_cap": getattr(config, "final_logit_softcapping", None) or None,
    }


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "dtype": "float32",
    # 0.02, the usual value, leaves a model this narrow with logits near zero and hardly any gradient.
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_qwen3(vocab_size: int, *, tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 of about 150 000 float32 weights drawn from a seed, on CPU, in evaluation mode.

    The vocabulary may have any size, also one that no rank count divides. The global random state is preserved.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=vocab_size, intermediate_size=192, tie_word_embeddings=tied, **SIZES)
    return _seeded(Qwen3ForCausalLM, config, seed)


def tiny_qwen3_moe(vocab_size: int, *, tied: bool = True, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of about 220 000 weights, as `tiny_qwen3`: two layers of 4 experts, 2 a token, around a dense one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        intermediate_size=192,
        tie_word_embeddings=tied,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **SIZES,
    )
    return _seeded(Qwen3MoeForCausalLM, config, seed)


def tiny_gpt_oss(vocab_size: int, *, tied: bool = True, seed: int = 0) -> GptOssForCausalLM:
    """A gpt-oss of about 280 000 weights, as `tiny_qwen3`: attention sinks, biases, 4 experts in each layer, 2 a token.

    The first layer has a sliding window of six tokens.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=vocab_size,
        intermediate_size=96,
        tie_word_embeddings=tied,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", *["full_attention"] * (SIZES["num_hidden_layers"] - 1)],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **{name: size for name, size in SIZES.items() if name != "use_sliding_window"},
    )
    return _seeded(GptOssForCausalLM, config, seed, noise=0.1)


# torch is imported in functions: the launcher reads these names and must not wait for it
TINY = {"tiny-qwen3": tiny_qwen3, "tiny-qwen3-moe": tiny_qwen3_moe, "tiny-gpt-oss": tiny_gpt_oss}
"""Tiny decoders that `load_policy` builds by name."""

VISION_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 4,
    "attention_dropout": 0.0,
    "dtype": "float32",
}


def tiny_siglip(*, seed: int = 0) -> SiglipVisionModel:
    """A SigLIP vision encoder of about 20 000 weights drawn from a seed: 8 x 8 pixels, 4 patches, no pooling head."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return _seeded(SiglipVisionModel, SiglipVisionConfig(vision_use_head=False, **VISION_SIZES), seed, noise=0.1)


def tiny_clip(*, seed: int = 0) -> CLIPVisionModel:
    """A CLIP vision encoder of the same size: a class token before the patches, another activation."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return _seeded(CLIPVisionModel, CLIPVisionConfig(**VISION_SIZES), seed, noise=0.1)


TINY_VISION = {"tiny-siglip": tiny_siglip, "tiny-clip": tiny_clip}
"""Vision encoders of toy size, by name."""

QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""Name -> the sizes that differ between checkpoints, from their published config.json."""


def published_qwen3(
    name: str = "qwen3-0.6b", *, layers: int | None = None, seed: int = 0
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """One of `QWEN3`, with so many layers (None: all), float32 weights drawn from a seed, on CPU, in evaluation mode.

    Source: Qwen/Qwen3-0.6B, Qwen/Qwen3-8B and Qwen/Qwen3-30B-A3B, config.json.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_key_value_heads": 8, "head_dim": 128} | QWEN3[name]
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    of_experts = "num_experts" in sizes
    config = (Qwen3MoeConfig if of_experts else Qwen3Config)(
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    return _seeded(Qwen3MoeForCausalLM if of_experts else Qwen3ForCausalLM, config, seed)


def _seeded(kind: Any, config: Any, seed: int, noise: float = 0.0) -> Any:
    """Return a model with float32 weights drawn from a seed, noise added; the global random state is preserved."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        for parameter in model.parameters() if noise else ():  # initialisation leaves biases and others near zero
            parameter.data.add_(torch.randn_like(parameter), alpha=noise)
    return model
