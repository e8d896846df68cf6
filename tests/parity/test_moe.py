"""A mixture of experts gives the oracle's loss and gradients: one rank, and every axis, with the fused head too.

Which experts a token goes to depends on the token alone, so rows may be dealt and cut as ever; over tp each rank has
a slice of every expert's features.
"""

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.helpers.ranks import run_ranks
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER
from workbench.policy.decoder import tiny_qwen3_moe

FUSED = {"policy": {"fused_loss": True}}
LAYOUTS = {
    "dp2": {"dp": 2, "shard_parameters": True},
    "cp2": {"cp": 2, "order": "zigzag", "checkpointing": True},
    "tp2": {"tp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True, "checkpointing": True},
}


def oracle(documents, *, tied=True):
    return grpo_step(exact(tiny_qwen3_moe(19, tied=tied, seed=3)), documents, **PAPER, denominator="token")


def mixture(layout, *, tied=True, **more):
    model = {"model": {"source": "tiny-qwen3-moe", "tied": tied, "seed": 3}}
    return settings(layout, data={"micro_batches": 2}) | model | more


@pytest.fixture(scope="module")
def truth():
    """Documents near the policy and the oracle's results for them, tied and untied."""
    answers = {}
    for tied in (True, False):
        documents = nasty_documents(11)
        documents = near_policy(documents, oracle(documents, tied=tied)[2], 11, spread=0.25)
        answers[tied] = documents, oracle(documents, tied=tied)
    return answers


def check(found, truth, tied, context):
    expected_loss, expected, _ = truth[tied][1]
    assert abs(found["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
    assert_float64_parity(found["gradients"], expected, context=context)


@pytest.mark.parametrize("tied", [True, False])
def test_one_rank_gives_the_oracles_gradients(tied, truth):
    check(one_step(mixture({}, tied=tied), truth[tied][0]), truth, tied, "one rank")


def test_every_expert_is_trained(truth):
    _, gradients, _ = truth[True][1]
    for layer in (0, 2):
        assert (gradients[f"model.layers.{layer}.mlp.experts.down_proj"].flatten(1).norm(dim=1) > 0).all()
        assert gradients[f"model.layers.{layer}.mlp.gate.weight"].norm() > 0
    assert "model.layers.1.mlp.gate_proj.weight" in gradients, "one layer is dense"


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_oracles_gradients(name, truth, tmp_path):
    cases = [(mixture(LAYOUTS[name]), truth[True][0]), (mixture(LAYOUTS[name], tied=False, **FUSED), truth[False][0])]
    for rank, (plain, fused) in enumerate(run_ranks(many_steps, 2, tmp_path, cases)):
        check(plain, truth, True, f"{name}, rank {rank}")
        check(fused, truth, False, f"{name}, fused, rank {rank}")
