"""A mixture of experts gives the oracle's loss and gradients: one rank, and every axis, with the fused head too.

Which experts a token goes to depends on the token alone, so rows may be dealt and cut as ever; over tp each rank has
a slice of every expert's features, over ep some of the experts.
"""

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.helpers.ranks import run_ranks
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import in_shared_processes, many_steps, one_step
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
SHARED = {
    "ep2_of_cp2": {"cp": 2, "ep": 2, "order": "zigzag", "checkpointing": True},
    "ep2_of_dp2_cp2_sharded": {"dp": 2, "cp": 2, "ep": 2, "shard_parameters": True},
}
"""Experts on several ranks of dp x cp."""
MORE = {
    "ep2_of_dp2": {"dp": 2, "ep": 2},
    "ep2_of_dp2_sharded": {"dp": 2, "ep": 2, "shard_parameters": True, "checkpointing": True},
    "ep2_of_dp2_cp2_kept": {
        "dp": 2,
        "cp": 2,
        "ep": 2,
        "shard_parameters": True,
        "reshard_after_forward": False,
        "unit_layers": 2,
    },
    "ep2_of_dp2_cp2": {"dp": 2, "cp": 2, "ep": 2, "attention": "ring"},
    "ep4_of_dp4": {"dp": 4, "ep": 4},
    "ep4_of_dp2_cp2": {"dp": 2, "cp": 2, "ep": 4},
    "ep2_tp2": {"dp": 2, "ep": 2, "tp": 2},
    "ep2_tp2_sequence_parallel": {"cp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "checkpointing": True},
    "ep2_tp2_sharded": {"dp": 2, "ep": 2, "tp": 2, "shard_parameters": True},
    "ep2_of_dp4_cp2": {"dp": 4, "cp": 2, "ep": 2},
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


@pytest.fixture(scope="module")
def on_ranks(truth, tmp_path_factory):
    """Every rank's results of both heads in each layout."""
    asked = {name: heads(layout, truth) for name, layout in (LAYOUTS | SHARED).items()}
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LAYOUTS | SHARED)
def test_layout_gives_the_oracles_gradients(name, truth, on_ranks):
    assert_results((LAYOUTS | SHARED)[name], truth, on_ranks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_experts_on_several_ranks_give_the_oracles_gradients(name, truth, tmp_path):
    assert_parity(MORE[name], truth, tmp_path)


def assert_parity(layout, truth, folder):
    """Loss, gradients and norms of a layout, with a plain and a fused head, are those of the oracle."""
    ranks = layout.get("dp", 1) * layout.get("cp", 1) * layout.get("tp", 1)
    assert_results(layout, truth, run_ranks(many_steps, ranks, folder, heads(layout, truth)))


def heads(layout, truth):
    return [(mixture(layout), truth[True][0]), (mixture(layout, tied=False, **FUSED), truth[False][0])]


def assert_results(layout, truth, per_rank):
    for rank, (plain, fused) in enumerate(per_rank):
        check(plain, truth, True, f"{layout}, rank {rank}")
        check(fused, truth, False, f"{layout}, fused, rank {rank}")
        for name, norm in plain["norms"].items():
            assert norm == pytest.approx(float(truth[True][1][1][name].norm()), rel=1e-9, abs=1e-12), name
