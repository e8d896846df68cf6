"""Published architectures with seeded weights, for measurements at real sizes without a download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""Name -> the sizes that differ between checkpoints, from their published config.json."""


def published_qwen3(name: str = "qwen3-0.6b", *, layers: int | None = None, seed: int = 0) -> Qwen3ForCausalLM:
    """A published Qwen3 with float32 weights drawn from a seed, on CPU, in evaluation mode.

    Args:
        name: one of `QWEN3`.
        layers: number of layers; None: all.
        seed: of the weights. The global random state is preserved.

    Source: Qwen/Qwen3-0.6B and Qwen/Qwen3-8B, config.json.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = QWEN3[name] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen3Config(
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()
