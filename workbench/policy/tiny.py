"""Tiny models, the default when no checkpoint is named: real architectures, toy sizes.

Grouped-query attention (4 query heads on 2 key-value heads), query and key norms, rotary positions, gated
feed-forward, in one of them experts and a router: each can break in its own way under sharding, so all are included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import CLIPVisionModel, Qwen3ForCausalLM, Qwen3MoeForCausalLM, SiglipVisionModel

SIZES = {
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

    Args:
        vocab_size: rows of the embedding; any number, also one that no rank count divides.
        tied: the output head is the embedding.
        seed: of the weights. The global random state is preserved.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=vocab_size, intermediate_size=192, tie_word_embeddings=tied, **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def tiny_qwen3_moe(vocab_size: int, *, tied: bool = True, seed: int = 0) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of about 220 000 float32 weights: two layers of 4 experts, 2 for each token, around a dense one.

    Args:
        vocab_size: rows of the embedding; any number, also one that no rank count divides.
        tied: the output head is the embedding.
        seed: of the weights. The global random state is preserved.
    """
    import torch
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).eval()


TINY = {"tiny-qwen3": tiny_qwen3, "tiny-qwen3-moe": tiny_qwen3_moe}
"""Tiny decoders that `load_policy` builds by name."""

VISION_SIZES = {
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
    """A SigLIP vision encoder of about 20 000 weights drawn from a seed: 8 x 8 pixels, 4 patches, no pooling head.

    Args:
        seed: of the weights. The global random state is preserved.
    """
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return _tiny_vision(SiglipVisionModel, SiglipVisionConfig(vision_use_head=False, **VISION_SIZES), seed)


def tiny_clip(*, seed: int = 0) -> CLIPVisionModel:
    """A CLIP vision encoder of the same size: a class token before the patches, another activation.

    Args:
        seed: of the weights. The global random state is preserved.
    """
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return _tiny_vision(CLIPVisionModel, CLIPVisionConfig(**VISION_SIZES), seed)


def _tiny_vision(kind: Any, config: Any, seed: int) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        for parameter in model.parameters():  # initialisation leaves biases and other parameters at or near zero
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


TINY_VISION = {"tiny-siglip": tiny_siglip, "tiny-clip": tiny_clip}
"""Vision encoders of toy size, by name."""
