"""Traps of hooking a Hugging Face decoder under context and tensor parallelism.

Each test shows that the trap exists (the behaviour of stock parts) and that this package avoids it.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import documents_near, oracle
from workbench.errors import ShardingError
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.model import load_policy
from workbench.sharding.attention import AttentionShard, sharded_attention
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
ZIGZAG = ShardPlan.make("zigzag", num_tokens=8, cp=2)


def test_a_zigzag_order_is_not_taken_for_two_documents():
    """Under its own names transformers infers documents from positions: a jump begins a new one."""
    stock = tiny_qwen3(19, seed=1)
    with torch.no_grad():
        expected = stock.model(input_ids=TOKENS[None]).last_hidden_state[0]
        order = ZIGZAG.permutation_T
        guessed = stock.model(input_ids=TOKENS[order][None], position_ids=order[None]).last_hidden_state[0]
        policy = load_policy("tiny-qwen3", seed=1)
        shard = AttentionShard(order[None, None], documents_T=torch.zeros(8, dtype=torch.int64))
        ours = policy.hidden_states(TOKENS[order], order, shard)
    assert (ZIGZAG.merge(guessed) - expected).abs().max() > 0.1, "the trap: stock attention on a zigzag order"
    torch.testing.assert_close(ZIGZAG.merge(ours), expected, rtol=0, atol=1e-5)


def test_a_causal_flag_on_a_subset_of_rows_would_align_top_left():
    """Rank 1 of 2 contiguous has rows 4..7 of 8: `is_causal` would let row 4 see key 0 only."""
    q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 8, 4)
    shard = AttentionShard.make(
        ShardPlan.make("contiguous", num_tokens=8, cp=2), torch.zeros(8, dtype=torch.int64), Axis("cp", 2, 1)
    )
    explicit = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=shard.block().allowed_qk)
    flagged = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert shard.block().allowed_qk.sum(1).tolist() == [5, 6, 7, 8]
    assert (explicit - flagged).abs().max() > 0.01


def test_a_ready_made_mask_is_refused_and_not_dropped():
    """Under a name that the mask registry does not know, a 2-D padding mask would be silently dropped."""
    x = torch.zeros(1, 1, 2, 2)
    shard = AttentionShard(torch.arange(2)[None, None], documents_T=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShardingError, match="attention_mask"):
        sharded_attention(None, x, x, x, torch.ones(1, 2), shard=shard)


def test_no_kv_cache_is_used():
    """A cache would hold shards, and disable the detection of packed documents."""
    policy = load_policy("tiny-qwen3")
    kept = []
    policy.model.model.register_forward_hook(lambda _, __, out: kept.append(out.past_key_values))
    shard = AttentionShard.make(
        ShardPlan.make("contiguous", num_tokens=8, cp=1), torch.zeros(8, dtype=torch.int64), Axis("cp")
    )
    policy.hidden_states(TOKENS, torch.arange(8), shard)
    assert kept == [None]


def test_replicated_norms_are_summed_over_tp_once_per_step(tmp_path):
    """A sum in a hook of every micro-batch would weigh micro-batch i of K by tp ** (K - 1 - i)."""
    documents = documents_near(11)
    _, expected, _ = oracle(documents)
    answers = run_ranks(many_steps, 2, tmp_path, [(settings(LAYOUTS["tp2"], data={"micro_batches": 3}), documents)])
    norms = {name: g for name, g in expected.items() if "q_norm" in name or "k_norm" in name}
    assert len(norms) == 6
    result = answers[0][0]["gradients"]
    assert_float64_parity({name: result[name] for name in norms}, norms, context="three micro-batches under tp=2")
