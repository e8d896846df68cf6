"""Layers that predict further tokens give the oracle's loss and gradients in every layout.

With adapters, replayed routes, sharded parameters and completions of their own policy, too.
"""

import math
import random
from pathlib import Path

import pytest
import torch

from tests.helpers.adapters import adapter_values, write_peft_folder
from tests.helpers.bars import assert_float64_parity
from tests.helpers.online_runs import BASE as ONLINE_BASE
from tests.helpers.ranks import run_ranks
from tests.oracles.lora import factor_gradients, merge
from tests.oracles.mixture import mixture_step, mixtures
from tests.oracles.prediction import prediction_step
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import as_batch, many_steps, step_on
from tests.parity.test_oracle import LOSS, PAPER, documents_near
from workbench.policy.decoder import load_decoder
from workbench.policy.prediction import add_prediction
from workbench.policy.trunk import decoder_layers
from workbench.sharding.mesh import make_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec
from workbench.specs.reading import merge as merged_settings
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.online import Online

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


def slow(*names):
    """Cases of `make test-all`."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def truth(kind, depths=2, detach="nothing"):
    """Documents, and the oracle's loss, terms and gradients; computed once."""
    key = kind, depths, detach
    if key not in _truths:
        _truths[key] = oracle_of(documents_near(11), kind, depths, detach)
    return _truths[key]


def oracle_of(documents, kind="dense", depths=2, detach="nothing"):
    of = MODELS[kind]
    model = load_decoder(of["source"], tied=of["tied"], seed=of["seed"])
    add_prediction(model, depths, seed=of["seed"], from_checkpoint=False)
    layers = list(exact(model).model.prediction)
    terms, added = prediction_step(model, documents, layers, coefficient=COEFFICIENT, detach=detach)
    loss, gradients, _ = grpo_step(model, documents, **PAPER, denominator="token")
    return documents, loss, terms, {name: gradient + added[name] for name, gradient in gradients.items()}


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


REPLAYED = {
    "one_rank": {},
    "cp2_tp2_sequence_parallel": {"cp": 2, "tp": 2, "sequence_parallel": True, "checkpointing": True},
    "pp2_ep2_of_dp2": {"pp": 2, "dp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def replayed():
    """Documents with drawn routes, and the oracle's loss, terms and gradients; the added router chooses by itself."""
    documents, of, draw = truth("mixture")[0], MODELS["mixture"], random.Random(7)
    routes = [[[draw.sample(range(4), 2) for _ in range(2)] for _ in document["tokens"]] for document in documents]
    own = exact(load_decoder(of["source"], tied=of["tied"], seed=of["seed"]))
    losses, gradients, _, _ = mixture_step(own, documents, **PAPER, balance=0.5, z=0.1, routes=routes)
    model = load_decoder(of["source"], tied=of["tied"], seed=of["seed"])
    add_prediction(model, 2, seed=of["seed"], from_checkpoint=False)
    model = exact(model)
    for number, mixture in enumerate(mixtures(model.model.layers)):
        mixture.given = [token[number] for document in routes for token in document]
    terms, added = prediction_step(model, documents, list(model.model.prediction), coefficient=COEFFICIENT)
    gradients = {name: gradients.get(name, 0.0) + gradient for name, gradient in added.items()}
    given = [document | {"routes": of_tokens} for document, of_tokens in zip(documents, routes, strict=True)]
    return given, losses["total"], terms, gradients


@pytest.mark.parametrize("name", ["one_rank", *slow("cp2_tp2_sequence_parallel", "pp2_ep2_of_dp2")])
def test_replayed_routes_are_those_of_the_decoder_alone(name, replayed):
    routing = {"replay": "recorded", "balance": 0.5, "z": 0.1}
    spec = spec_of("mixture", REPLAYED[name], routing=routing)
    steps = simulate(lambda mesh: step_on(mesh, spec, replayed[0]), **LayoutSpec(**REPLAYED[name]).mesh_sizes)
    for rank, step in enumerate(steps):
        assert_is(step, replayed, f"{name}, rank {rank}")


SHARDED = {
    "dp2": ({"dp": 2}, "dense"),
    "ep2_of_cp2": ({"cp": 2, "ep": 2, "checkpointing": True}, "mixture"),
    "pp2_dp2": ({"pp": 2, "dp": 2}, "dense"),
    "dp2_tp2_sequence_parallel": ({"dp": 2, "tp": 2, "sequence_parallel": True}, "dense"),
}


@pytest.mark.parametrize("name", ["dp2", *slow("ep2_of_cp2", "pp2_dp2", "dp2_tp2_sequence_parallel")])
def test_sharded_parameters_give_the_oracles_gradients(name, tmp_path):
    """FSDP2 shards the added layers, too; its ranks are processes."""
    layout, kind = SHARDED[name]
    ranks = math.prod(layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    case = spec_of(kind, layout | {"shard_parameters": True}), truth(kind)[0]
    for rank, [step] in enumerate(run_ranks(many_steps, ranks, tmp_path, [case])):
        assert_is(step, truth(kind), f"{name}, rank {rank}")


def after_a_look(given, documents):
    """Gradients of a step with doubled weights; before these, the decoder is passed without its further layers or not.

    Then the layers that are units of FSDP2 together.
    """
    gradients, spec = [], RunSpec.model_validate(given)
    for looks in (False, True):
        mesh = make_mesh(**spec.layout.mesh_sizes)
        policy = build_policy(spec, mesh, Path(), temperature=1.0)
        rows, totals = flow.prepare_rows(as_batch(documents), spec, mesh)
        trained = list(policy.model.parameters())  # held as by an optimizer
        if looks:
            with torch.no_grad():
                rows[0].hidden_states(policy, None)
            policy.reshard()
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(2.0)
        step = flow.run_step(
            policy, flow.build_loss(spec.loss), rows, totals, keep_gradients=True, prediction=spec.prediction
        )
        gradients.append(dict(step.gradients))
    return gradients, [len(module._get_fsdp_state()._modules) for module in decoder_layers(policy.model)]


@pytest.mark.parametrize("unit_layers", [1, 2])
def test_no_added_layer_is_gathered_for_a_forward_that_leaves_it_out(unit_layers, tmp_path):
    """Its weights would be those of before the next step of the optimizer; and it is in no unit with another layer."""
    given = spec_of("dense", {"dp": 2, "shard_parameters": True, "unit_layers": unit_layers})
    for (plain, looked), together in run_ranks(after_a_look, 2, tmp_path, given, truth("dense")[0]):
        assert plain.keys() == looked.keys()
        assert [name for name, gradient in plain.items() if not torch.equal(looked[name], gradient)] == []
        assert together == {1: [1, 1, 1, 1, 1], 2: [2, 2, 1, 1, 1]}[unit_layers]


RANK, ALPHA = 3, 5.0
ADAPTED = {
    "one_rank": ({}, {}, "dense"),
    "cp2_tp2": ({"cp": 2, "tp": 2}, {}, "dense"),
    "pp2_fused": ({"pp": 2}, {"fused_loss": True, "chunk_tokens": 7}, "dense"),
    "dp2_ep2": ({"dp": 2, "ep": 2}, {}, "mixture"),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Of each kind: folder of an adapter of the decoder, and the loss, terms and gradients of the oracle with it."""
    results = {}
    for kind in ("dense", "mixture"):
        of, documents, folder = MODELS[kind], truth(kind)[0], tmp_path_factory.mktemp(kind)
        adapters = adapter_values(load_decoder(of["source"], tied=of["tied"], seed=of["seed"]), RANK, seed=7)
        write_peft_folder(folder, adapters, rank=RANK, alpha=ALPHA)
        model = load_decoder(of["source"], tied=of["tied"], seed=of["seed"])
        add_prediction(model, 2, seed=of["seed"], from_checkpoint=False)
        model = merge(exact(model), adapters, ALPHA / RANK)
        terms, added = prediction_step(model, documents, list(model.model.prediction), coefficient=COEFFICIENT)
        loss, gradients, _ = grpo_step(model, documents, **PAPER, denominator="token")
        gradients = {name: gradient + added[name] for name, gradient in gradients.items()}
        factors = {}
        for name, (a, b) in factor_gradients(gradients, adapters, ALPHA / RANK).items():
            module, _, parameter = name.rpartition(".")
            factors |= {f"{module}.lora_A.{parameter}": a, f"{module}.lora_B.{parameter}": b}
        own = {name: gradient for name, gradient in gradients.items() if ".prediction." in name}
        results[kind] = folder, documents, loss, terms, factors, own
    return results


@pytest.mark.parametrize("name", ["cp2_tp2", "dp2_ep2", *slow("one_rank", "pp2_fused")])
def test_the_prediction_trains_the_decoders_adapters(name, adapted):
    layout, policy, kind = ADAPTED[name]
    folder, documents, loss, terms, factors, _ = adapted[kind]
    spec = spec_of(kind, layout, policy, lora={"source": str(folder)})
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        assert_is(step, (documents, loss, terms, factors), f"{name}, rank {rank}")


def test_added_layers_are_trained_whole_if_they_are_saved(adapted):
    documents, own = adapted["dense"][1], adapted["dense"][5]
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["lm_head"], "modules_to_save": ["prediction"]}
    (step,) = simulate(lambda mesh: step_on(mesh, spec_of("dense", {}, lora=settings), documents))
    assert {name for name in step["gradients"] if "lora" not in name} == set(own)
    assert all(float(step["gradients"][name].norm()) > 0 for name in own)


def test_a_detached_prediction_leaves_the_adapter_of_the_head():
    """With ``detach: policy`` the head's adapter is part of the policy: only the layers trained whole learn from it."""
    documents = truth("dense")[0]
    adapters = {"r": RANK, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["prediction"]}
    adapters["init_lora_weights"] = "random"  # a B of zeros leaves A without a gradient, whatever is detached

    def step(coefficient):
        prediction = {"prediction": {"depths": 1, "coefficient": coefficient, "detach": "policy"}}
        spec = spec_of("dense", {}, lora=adapters) | prediction
        return simulate(lambda mesh: step_on(mesh, spec, documents))[0]["gradients"]

    small, large = step(0.1), step(1.0)
    for name, gradient in small.items():
        assert torch.equal(gradient, large[name]) == ("lora" in name), name


ONLINE = {
    "one_rank": {},
    "dp2_cp2": {"dp": 2, "cp": 2},
    "cp2_tp2_sequence_parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", ["dp2_cp2", *slow("one_rank", "cp2_tp2_sequence_parallel")])
def test_an_online_step_gives_the_oracles_gradients(name, tmp_path):
    """The sampler is the decoder without the added layers; the step on its completions is that of a dataset."""
    layout = ONLINE[name]
    spec = RunSpec.model_validate(
        merged_settings(ONLINE_BASE, {"model": MODELS["dense"], "loss": LOSS, "layout": layout})
        | {"prediction": {"depths": 2, "coefficient": COEFFICIENT}}
    )

    def rank(mesh):
        policy = build_policy(spec, mesh, tmp_path, temperature=1.0)
        batch, _ = Online(spec, policy, tmp_path).sample(0)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        how = {"num_source": batch.num_tokens, "keep_gradients": True, "loss_spec": spec.loss}
        return batch, flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, prediction=spec.prediction, **how)

    results = simulate(rank, **LayoutSpec(**layout).mesh_sizes)
    documents = documents_of(results[0][0])
    expected = oracle_of(documents)
    for number, (_, step) in enumerate(results):
        found = {"losses": {key: float(value) for key, value in step.loss.items()}}
        assert_is(found | {"gradients": step.gradients, "norms": step.norms}, expected, f"{name}, rank {number}")
        assert float(step.metrics["ratio/policy_old/max"]) == 1.0


def documents_of(batch):
    """Dicts of a sampled batch, with leave-one-out advantages from its rewards."""
    documents, groups, rewards = [], batch.group_ids_N.tolist(), batch.rewards_N.tolist()
    for number in range(batch.num_documents):
        here = batch.document_ids_T == number
        others = [r for n, r in enumerate(rewards) if groups[n] == groups[number] and n != number]
        advantage = rewards[number] - sum(others) / len(others)
        of_tokens = {
            "tokens": batch.tokens_T,
            "loss_mask": batch.loss_mask_T.int(),
            "old_logprobs": batch.old_logprobs_T,
            "ref_logprobs": batch.ref_logprobs_T,
        }
        documents.append({key: values[here].tolist() for key, values in of_tokens.items()})
        documents[-1]["advantages"] = [advantage] * int(here.sum())
    return documents
