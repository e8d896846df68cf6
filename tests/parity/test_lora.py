"""LoRA gives the oracle's gradients of every A and B: one rank, and every axis, fused head too, with one norm.

The adapters are those of a folder in peft's format, so their values do not come from the code under test.
"""

import math

import pytest
import torch

from tests.helpers.adapters import adapter_values, write_peft_folder
from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.helpers.ranks import run_ranks
from tests.oracles.lora import lora_step
from tests.oracles.step import exact
from tests.parity.cases import in_shared_processes, many_steps, one_step
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER
from workbench.policy.decoder import TINY

RANK, ALPHA = 3, 5.0
MODELS = {"dense": "tiny-qwen3", "mixture": "tiny-qwen3-moe"}
LAYOUTS = {
    "dp2_sharded": {"dp": 2, "shard_parameters": True, "checkpointing": True},
    "cp2": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True, "checkpointing": True},
    "pp2": {"pp": 2},
}
MORE = {
    "dp2": {"dp": 2},
    "dp2_cp2_ring": {"dp": 2, "cp": 2, "attention": "ring"},
    "dp2_tp2_sharded": {"dp": 2, "tp": 2, "shard_parameters": True},
    "cp2_tp2_sequence_parallel": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "pp2_tp2": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp2_dp2_sharded": {"pp": 2, "dp": 2, "shard_parameters": True},
}
OF_EXPERTS = {
    "ep2_of_dp2": {"dp": 2, "ep": 2},
    "ep2_of_dp2_sharded": {"dp": 2, "ep": 2, "shard_parameters": True},
    "ep2_tp2": {"dp": 2, "ep": 2, "tp": 2},
    "ep2_tp2_sharded_sequence_parallel": {
        "cp": 2,
        "ep": 2,
        "tp": 2,
        "shard_parameters": True,
        "sequence_parallel": True,
    },
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
}
FUSED = {"policy": {"fused_loss": True, "logprobs": "chunked", "chunk_tokens": 16}}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Of each model, tied and untied: folder of the adapter, documents, and the oracle's results for them."""
    results = {}
    for kind, source in MODELS.items():
        for tied in (True, False):
            folder = tmp_path_factory.mktemp(f"{kind}{tied}")
            model = TINY[source](19, tied=tied, seed=3)
            adapters = adapter_values(model, RANK, seed=7)
            write_peft_folder(folder, adapters, rank=RANK, alpha=ALPHA)

            def oracle(documents, source=source, tied=tied, adapters=adapters):
                model = exact(TINY[source](19, tied=tied, seed=3))
                return lora_step(model, documents, adapters, ALPHA / RANK, **PAPER, denominator="token")

            documents = nasty_documents(11)
            documents = near_policy(documents, oracle(documents)[2], 11, spread=0.25)
            results[kind, tied] = folder, documents, oracle(documents)
    return results


def with_lora(kind, folder, layout, *, tied, **more):
    model = {"model": {"source": MODELS[kind], "tied": tied, "seed": 3}}
    return settings(layout, data={"micro_batches": 2}) | model | {"lora": {"source": str(folder)}} | more


def check(actual, expected, context):
    loss, gradients, _, _ = expected
    factors = {}
    for name, (a, b) in gradients.items():
        module, _, parameter = name.rpartition(".")
        factors |= {f"{module}.lora_A.{parameter}": a, f"{module}.lora_B.{parameter}": b}
    assert abs(actual["loss"] - loss) <= 1e-12 * max(1, abs(loss)), context
    assert_float64_parity(actual["gradients"], factors, context=context)
    for name, norm in actual["norms"].items():
        assert norm == pytest.approx(float(factors[name].norm()), rel=1e-9, abs=1e-12), f"{context}: {name}"
    whole = math.sqrt(sum(norm**2 for norm in actual["norms"].values()))
    assert whole == pytest.approx(math.sqrt(sum(float(g.norm()) ** 2 for g in factors.values())), rel=1e-9), context


@pytest.mark.parametrize("kind", MODELS)
def test_one_rank_gives_the_oracles_gradients(kind, truth):
    for tied, head in ((True, {}), (False, FUSED)):
        folder, documents, expected = truth[kind, tied]
        actual = one_step(with_lora(kind, folder, {}, tied=tied, **head), documents)
        check(actual, expected, f"{kind}, tied={tied}")
        logprobs = torch.tensor([v for document in expected[2] for v in document], dtype=torch.float64)
        where = actual["tokens"]["trained"]
        torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], logprobs[where], rtol=0, atol=1e-12)


def test_every_adapter_has_a_gradient(truth):
    for _, _, (_, gradients, _, _) in truth.values():
        assert all(a.norm() > 1e-6 and b.norm() > 1e-6 for a, b in gradients.values())
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in gradients} >= {"lm_head", "o_proj", "q_proj"}


@pytest.fixture(scope="module")
def on_ranks(truth, tmp_path_factory):
    """Every rank's results of both heads in each layout."""
    asked = {name: heads(layout, "dense", truth) for name, layout in LAYOUTS.items()}
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_oracles_gradients(name, truth, on_ranks):
    assert_results(LAYOUTS[name], "dense", truth, on_ranks[name])


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "shard_parameters": True, "checkpointing": True}], ids=str)
def test_adapters_of_the_head_alone(layout, truth, tmp_path):
    """No parameter of the first stage, and none below the head, is trained; backward passes through all the same."""
    adapters = {n: f for n, f in adapter_values(TINY["tiny-qwen3"](19, seed=3), RANK, seed=7).items() if "head" in n}
    write_peft_folder(tmp_path, adapters, rank=RANK, alpha=ALPHA)
    model, (_, documents, _) = exact(TINY["tiny-qwen3"](19, seed=3)), truth["dense", True]
    expected = lora_step(model, documents, adapters, ALPHA / RANK, **PAPER, denominator="token")
    case = with_lora("dense", tmp_path, layout, tied=True)
    for rank, [actual] in enumerate(run_ranks(many_steps, 2, tmp_path, [(case, documents)])):
        check(actual, expected, f"{layout}, rank {rank}")


@pytest.mark.parametrize("name", ["ep2_of_dp2_sharded", "ep2_tp2"])
def test_experts_on_several_ranks_give_the_oracles_gradients(name, truth, tmp_path):
    assert_parity(OF_EXPERTS[name], "mixture", truth, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS | MORE | OF_EXPERTS)
def test_mixture_in_more_layouts(name, truth, tmp_path):
    assert_parity((LAYOUTS | MORE | OF_EXPERTS)[name], "mixture", truth, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts(name, truth, tmp_path):
    assert_parity(MORE[name], "dense", truth, tmp_path)


def assert_parity(layout, kind, truth, folder):
    """Loss, gradients and norms of a layout, with a plain head that is tied, and a fused one that is not."""
    ranks = math.prod(layout.get(axis, 1) for axis in ("dp", "cp", "tp", "pp"))
    assert_results(layout, kind, truth, run_ranks(many_steps, ranks, folder, heads(layout, kind, truth)))


def heads(layout, kind, truth):
    cases = []
    for tied, head in ((True, {}), (False, FUSED)):
        adapter, documents, _ = truth[kind, tied]
        cases.append((with_lora(kind, adapter, layout, tied=tied, **head), documents))
    return cases


def assert_results(layout, kind, truth, per_rank):
    for rank, results in enumerate(per_rank):
        for tied, actual in zip((True, False), results, strict=True):
            check(actual, truth[kind, tied][2], f"{layout}, tied={tied}, rank {rank}")
