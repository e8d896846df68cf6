"""Tiny mixtures of experts: one with experts that every token has and a bias of the choice, one with sinks."""

from __future__ import annotations

from pathlib import Path

import torch


def save_tiny_glm4_moe(folder: Path, *, layers: int = 3, dense: int = 1, seed: int = 3) -> str:
    """Write a checkpoint of a GLM-4-MoE with seeded weights and biases; return its folder.

    Three layers, of which the first is dense; four experts, two of them a token's, and one shared expert; or more.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        num_mtp_layers=0,
        first_k_dense_replace=dense,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        max_position_embeddings=512,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Glm4MoeForCausalLM(config).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.05, 0.05)
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return str(folder)


def save_tiny_gpt_oss(folder: Path, *, seed: int = 3) -> str:
    """Write a checkpoint of a gpt-oss with seeded weights, biases and attention sinks; return its folder.

    Two layers, the first with a sliding window of six tokens; four experts, two of them a token's.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=19,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        max_position_embeddings=512,
        initial_context_length=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GptOssForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    return str(folder)
