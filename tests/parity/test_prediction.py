"""Layers that predict further tokens give the oracle's loss and gradients in every layout."""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.oracles.prediction import prediction_step
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import step_on
from tests.parity.test_oracle import LOSS, PAPER, documents_near
from workbench.policy.decoder import load_decoder
from workbench.policy.prediction import add_prediction
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec

COEFFICIENT = 0.3
CASES = {
    "one_rank": ({}, {}, "dense"),
    "cp2_ring_tp2": ({"cp": 2, "tp": 2, "order": "zigzag", "attention": "ring"}, {}, "dense"),
    "dp2_tp2_sequence_parallel": ({"dp": 2, "tp": 2, "sequence_parallel": True, "checkpointing": True}, {}, "dense"),
    "pp2_cp2_fused": ({"pp": 2, "cp": 2}, {"fused_loss": True, "chunk_tokens": 7}, "dense"),
    "pp2_tied": ({"pp": 2}, {}, "tied"),
    "dp2_ep2": ({"dp": 2, "ep": 2}, {}, "mixture"),
    "pp2_ep2_of_cp2_tp2": ({"pp": 2, "cp": 2, "tp": 2, "ep": 2}, {"logprobs": "chunked"}, "mixture"),
}
MODELS = {
    "dense": {"source": "tiny-qwen3", "tied": False, "seed": 3},
    "tied": {"source": "tiny-qwen3", "tied": True, "seed": 3},
    "mixture": {"source": "tiny-qwen3-moe", "tied": False, "seed": 3},
}
_truths = {}


def truth(kind, depths=2, detach="nothing"):
    """Documents, and the oracle's loss, terms and gradients; computed once."""
    key = kind, depths, detach
    if key not in _truths:
        documents, of = documents_near(11), MODELS[kind]
        model = load_decoder(of["source"], tied=of["tied"], seed=of["seed"])
        add_prediction(model, depths, seed=of["seed"], from_checkpoint=False)
        layers = list(exact(model).model.prediction)
        terms, added = prediction_step(model, documents, layers, coefficient=COEFFICIENT, detach=detach)
        loss, gradients, _ = grpo_step(model, documents, **PAPER, denominator="token")
        gradients = {name: gradient + added[name] for name, gradient in gradients.items()}
        _truths[key] = documents, loss, terms, gradients
    return _truths[key]


def spec_of(kind, layout, policy=None, *, depths=2, detach="nothing", micro_batches=2, **more):
    return {
        "model": MODELS[kind],
        "precision": "float64",
        "policy": policy or {},
        "loss": LOSS,
        "layout": layout,
        "data": {"micro_batches": micro_batches},
        "prediction": {"depths": depths, "coefficient": COEFFICIENT, "detach": detach},
    } | more


def assert_is(step, expected, context):
    _, loss, terms, gradients = expected
    assert step["losses"]["total"] == pytest.approx(loss + sum(terms), rel=1e-12), context
    for number, term in enumerate(terms, 1):
        assert step["losses"][f"prediction_{number}"] == pytest.approx(term, rel=1e-12), context
    assert_float64_parity(step["gradients"], gradients, context=context)
    for name, norm in step["norms"].items():
        assert norm == pytest.approx(float(gradients[name].norm()), rel=1e-9, abs=1e-12), f"{context}, {name}"


@pytest.mark.parametrize("name", CASES)
def test_prediction_gives_the_oracles_gradients(name):
    layout, policy, kind = CASES[name]
    expected, spec = truth(kind), spec_of(kind, layout, policy)
    steps = simulate(lambda mesh: step_on(mesh, spec, expected[0]), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        assert_is(step, expected, f"{name}, rank {rank}")


@pytest.mark.parametrize("detach", ["hidden_states", "policy"])
def test_what_is_detached_gets_no_gradient_of_the_prediction(detach):
    expected = truth("dense", 1, detach)
    (step,) = simulate(lambda mesh: step_on(mesh, spec_of("dense", {}, depths=1, detach=detach), expected[0]))
    assert_is(step, expected, detach)
    own = [name for name in step["gradients"] if ".prediction." in name]
    assert len(own) == 15
    assert all(float(step["gradients"][name].norm()) > 0 for name in own)


def test_documents_without_a_further_token_count_in_no_denominator():
    documents = [d for d in truth("dense")[0] if len(d["tokens"]) <= 2]
    assert documents
    (step,) = simulate(lambda mesh: step_on(mesh, spec_of("dense", {}), documents))
    assert step["losses"]["prediction_1"] == step["losses"]["prediction_2"] == 0
    assert all(not torch.isnan(gradient).any() for gradient in step["gradients"].values())
