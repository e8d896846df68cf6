"""Routers: losses that balance them, replayed routes, biases and shared experts give the oracle's numbers everywhere.

A load-balancing loss of each rank's own tokens, which is the usual mistake, has the right value on one rank alone.
"""

import random

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.helpers.mixtures import save_tiny_glm4_moe
from tests.helpers.ranks import run_ranks
from tests.oracles.mixture import balanced_biases, mixture_step, mixtures
from tests.oracles.step import document_logprobs, exact
from tests.parity.cases import many_steps, step_on
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER
from workbench.policy.decoder import load_decoder, tiny_qwen3_moe
from workbench.policy.model import load_policy
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec
from workbench.train.routes import balance_biases

BALANCED = {"balance": 0.5, "z": 0.1}
QWEN = {"source": "tiny-qwen3-moe", "tied": True, "seed": 3}
ONE = ({}, {})
FUSED = {"policy": {"logprobs": "chunked", "chunk_tokens": 16, "fused_loss": True}}
SIMULATED = {
    "one_rank": ONE,
    "dp2_micro_batches": ({"dp": 2}, {"data": {"micro_batches": 3}}),
    "cp2_zigzag_checkpointing_padding": (
        {"cp": 2, "order": "zigzag", "checkpointing": True},
        {"data": {"multiple_of": 28}},
    ),
    "tp2_sequence_parallel": ({"tp": 2, "sequence_parallel": True, "checkpointing": True}, FUSED),
    "pp2_ep2_of_dp2": ({"pp": 2, "dp": 2, "ep": 2, "checkpointing": True}, {"data": {"micro_batches": 2}}),
}
MORE = {
    "tp2": ({"tp": 2}, {}),
    "fused": ({"dp": 2}, FUSED),
    "idle_rank": ({"dp": 4}, {"data": {"micro_batches": 3}}),
    "rows_of_different_lengths": ({"pp": 3, "pipeline_schedule": "gpipe"}, {"data": {"micro_batch_tokens": 64}}),
    "interleaved": (
        {"pp": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2, "cp": 2},
        {"data": {"micro_batches": 4}},
    ),
    "ep2_tp2_sequence_parallel": ({"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}, {}),
    "ep4_of_dp2_cp2": ({"dp": 2, "cp": 2, "ep": 4, "order": "striped", "attention": "ring"}, {}),
}
SHARDED = {"dp": 2, "cp": 2, "ep": 2, "shard_parameters": True, "checkpointing": True}


def near(model, documents):
    """Documents near the policy of an exact model."""
    with torch.no_grad():
        logprobs = [[float("nan"), *map(float, of[1:])] for of in document_logprobs(model, documents)]
    return near_policy(documents, logprobs, 11, spread=0.25)


@pytest.fixture(scope="module")
def qwen():
    """Documents, with and without routes, and the oracle's results."""
    model = exact(tiny_qwen3_moe(19, tied=True, seed=3))
    documents, draw = near(model, nasty_documents(11)), random.Random(5)
    routes = [[[draw.sample(range(4), 2) for _ in range(2)] for _ in document["tokens"]] for document in documents]
    for document in routes[::2]:
        document[-1] = None
    nothing = [[-1, -1], [-1, -1]]
    given = [
        document | {"routes": [token or nothing for token in of_tokens]}
        for document, of_tokens in zip(documents, routes, strict=True)
    ]
    chosen = mixture_step(model, documents, **PAPER, balance=0.5, z=0.1)
    replayed = mixture_step(model, given, **PAPER, balance=0.5, z=0.1, routes=routes)
    return {"none": (documents, chosen), "recorded": (given, replayed)}


def routed(layout, routing, model=QWEN, **more):
    return settings(layout, model=model, routing=routing, **more)


def check(found, expected, context, routing):
    losses, gradients, loads, taken = expected
    assert_float64_parity(found["gradients"], gradients, context=context)
    for name in ("router_balance", "router_z", "total"):
        assert abs(found["losses"][name] - losses[name]) <= 1e-12 * max(1, abs(losses[name])), f"{context}: {name}"
    assert found["loads"].tolist() == loads, context
    if routing.get("record"):
        rows = [[sorted(experts) for experts in token] for document in taken for token in document]
        assert found["routes"].sort(dim=-1).values.tolist() == rows, context


@pytest.mark.parametrize("replay", ["none", "recorded"])
@pytest.mark.parametrize("name", [*SIMULATED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_losses_and_routes_are_those_of_the_oracle(name, replay, qwen):
    layout, more = (SIMULATED | MORE)[name]
    documents, expected = qwen[replay]
    routing = BALANCED | {"replay": replay, "record": True}
    spec = routed(layout, routing, **more)
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        check(step, expected, f"{name}, rank {rank}", routing)
        for parameter, norm in step["norms"].items():
            assert norm == pytest.approx(float(expected[1][parameter].norm()), rel=1e-9, abs=1e-12), parameter


def test_experts_and_parameters_sharded_in_processes(qwen, tmp_path):
    cases = [(routed(SHARDED, BALANCED | {"replay": replay}), qwen[replay][0]) for replay in qwen]
    for rank, steps in enumerate(run_ranks(many_steps, 4, tmp_path, cases)):
        for replay, step in zip(qwen, steps, strict=True):
            check(step, qwen[replay][1], f"{replay}, rank {rank}", {})


def test_share_of_routes_that_disagree(qwen):
    """Counted by hand: own choices of the router on the hidden states that replayed routes gave."""
    documents, (_, _, _, taken) = qwen["recorded"]
    model = exact(tiny_qwen3_moe(19, tied=True, seed=3))
    differing = total = at = 0
    for document, of_tokens in zip(documents, taken, strict=True):
        for layer, number in zip(mixtures(model), range(2), strict=True):
            layer.seen, layer.given = [], [token[number] for token in of_tokens]
        document_logprobs(model, [document])
        for number, layer in enumerate(mixtures(model)):
            for token, (_, scores, _) in enumerate(layer.seen):
                if document["routes"][token][number] == [-1, -1]:
                    continue
                own = set(scores.topk(2).indices.tolist())
                differing, total = differing + (own != set(of_tokens[token][number])), total + 1
        at += len(of_tokens)
    layout = {"dp": 2, "tp": 2, "sequence_parallel": True}
    spec = routed(layout, {"replay": "recorded"})
    for step in simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes):
        assert step["metrics"]["router/disagreement/share"] == pytest.approx(differing / total, rel=1e-12)
    assert 0.5 < differing / total < 1, "drawn routes mostly differ"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A checkpoint with shared experts and biases, documents near it, and the oracle's results."""
    folder = save_tiny_glm4_moe(tmp_path_factory.mktemp("glm"))
    model = exact(load_decoder(folder))
    documents = near(model, nasty_documents(11, count=6))
    return folder, documents, mixture_step(model, documents, **PAPER, balance=0.5, z=0.1)


GLM = {
    "one_rank": {},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "pp2_ep2_of_cp2": {"pp": 2, "cp": 2, "ep": 2, "checkpointing": True},
}


@pytest.mark.parametrize("name", GLM)
def test_shared_experts_and_biases_are_those_of_the_oracle(name, glm):
    folder, documents, expected = glm
    layout = GLM[name]
    spec = routed(layout, BALANCED | {"bias_step": 0.01, "record": True}, {"source": folder})
    for rank, step in enumerate(
        simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    ):
        check(step, expected, f"{name}, rank {rank}", spec["routing"])
        shared = [key for key in step["gradients"] if "shared_experts" in key]
        assert shared
        assert all(step["gradients"][key].norm() > 0 for key in shared)


def test_biases_move_towards_even_loads(glm):
    folder, _, (_, _, loads, _) = glm
    policy = load_policy(folder, precision="float64", routing=True)
    before = [bias.tolist() for bias in policy.routers.biases(policy.model).values()]
    balance_biases(policy, torch.tensor(loads, dtype=torch.float64), 0.01)
    after = [bias.tolist() for bias in policy.routers.biases(policy.model).values()]
    assert after == balanced_biases(before, loads, 0.01) != before
    assert not any("bias" in name for name, _ in policy.model.named_parameters() if "gate" in name), "no gradient"
