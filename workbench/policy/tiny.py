"""The tiny Qwen3 that everything here runs on when no checkpoint is named: real architecture, toy sizes.

Grouped-query attention (4 query heads on 2 key-value heads), query and key norms, rotary positions, gated
feed-forward: each of them has its own way to go wrong under sharding, so none is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


def tiny_qwen3(vocab_size: int, *, tied: bool = True, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 of about 150 000 float32 weights drawn from a seed, on CPU, in evaluation mode.

    Args:
        vocab_size: rows of the embedding; any number, also one that no rank count divides.
        tied: the output head is the embedding.
        seed: of the weights. The global random state is left as it was.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=192, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=tied, attention_dropout=0.0, use_sliding_window=False,
        # 0.02, the usual value, leaves a model this narrow with logits near zero and hardly any gradient.
        initializer_range=0.08, dtype="float32",
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()
