"""Pipeline stages give the oracle's loss, gradients and norms, with every other axis and option.

On simulated ranks all combinations that need no processes; in gloo processes those whose transfers and collectives
overlap, and FSDP2. The tiny model has three layers: two stages are uneven, of four the last has the head alone.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity import test_moe
from tests.parity.cases import in_shared_processes, many_steps, step_on
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near, oracle
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec

FOUR, FILLED = {"data": {"micro_batches": 4}}, {"data": {"micro_batch_tokens": 64}}
FUSED = {"policy": {"logprobs": "chunked", "chunk_tokens": 16, "fused_loss": True}}
UNTIED = {"tied": False}
TWICE = {"pp": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2}
GPIPE = {"pp": 2, "pipeline_schedule": "gpipe"}

SIMULATED = {
    "one_row": ({"pp": 2}, {}),
    "rows_of_different_lengths": ({"pp": 2}, FILLED),
    "gpipe_fused": (GPIPE, FILLED | FUSED),
    "interleaved": (TWICE, FOUR),
    "interleaved_uneven_rounds": (TWICE, {"data": {"micro_batches": 5}}),
    "interleaved_untied": (TWICE, FOUR | UNTIED),
    "three_ranks_of_one_layer": ({"pp": 3}, FOUR | UNTIED),
    "four_ranks_with_the_head_alone": ({"pp": 4}, FOUR),
    "cp_ring_checkpointing": (
        {"pp": 2, "cp": 2, "order": "zigzag", "attention": "ring", "checkpointing": True},
        FILLED,
    ),
    "cp_ulysses_striped": (GPIPE | {"cp": 2, "order": "striped", "attention": "ulysses"}, FOUR),
    "cp_hybrid": ({"pp": 2, "cp": 4, "order": "zigzag", "attention": "hybrid", "ulysses": 2}, FOUR),
    "tp": ({"pp": 2, "tp": 2}, FOUR | UNTIED),
    "tp_sequence_parallel": (TWICE | {"tp": 2, "sequence_parallel": True, "checkpointing": True}, FOUR),
    "dp_with_an_idle_rank": ({"pp": 2, "dp": 3}, {"data": {"micro_batches": 3}}),
    "every_axis": ({"pp": 2, "dp": 2, "cp": 2, "tp": 2, "order": "document_zigzag"}, FILLED | FUSED),
}
PROCESSES = {
    "pp4": [({"pp": 4}, FOUR), ({"pp": 4, "pipeline_schedule": "gpipe"}, FILLED | UNTIED)],
    "interleaved": [(TWICE | {"dp": 2}, FOUR | UNTIED), (TWICE | {"cp": 2, "order": "zigzag"}, FILLED)],
    "with_cp_and_tp": [
        ({"pp": 2, "cp": 2, "order": "zigzag", "attention": "ring", "checkpointing": True}, FILLED),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, FOUR | FUSED | UNTIED),
    ],
    "sharded": [
        ({"pp": 2, "dp": 2, "shard_parameters": True}, FOUR),
        (GPIPE | {"cp": 2, "order": "zigzag", "shard_parameters": True}, FILLED | FUSED),
        (GPIPE | {"dp": 2, "shard_parameters": True}, FOUR | UNTIED),
        (TWICE | {"dp": 2, "shard_parameters": True, "checkpointing": True}, FOUR | UNTIED),
    ],
}
MIXTURES = {
    "pp2": {"pp": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
    "pp3_ep2_of_cp2": {"pp": 3, "cp": 2, "ep": 2, "order": "zigzag", "checkpointing": True},
}
"""Stages of a mixture, whose second layer has no experts: of three stages one has none."""


@pytest.fixture(scope="module")
def truth():
    """Documents near the tied and the untied policy, and the oracle's results for them."""
    both = {tied: documents_near(11, tied=tied) for tied in (True, False)}
    return {tied: (documents, oracle(documents, tied=tied)) for tied, documents in both.items()}


def check(actual, expected, context):
    loss, gradients, logprobs = expected
    assert abs(actual["loss"] - loss) <= 1e-12 * max(1, abs(loss)), context
    assert_float64_parity(actual["gradients"], gradients, context=context)
    flat = torch.tensor([value for document in logprobs for value in document], dtype=torch.float64)
    where = actual["tokens"]["trained"]
    torch.testing.assert_close(actual["tokens"]["policy_logprobs"][where], flat[where], rtol=0, atol=1e-12)
    assert actual["norms"].keys() == gradients.keys(), context
    for name, norm in actual["norms"].items():
        assert norm == pytest.approx(float(gradients[name].norm()), rel=1e-9, abs=1e-12), f"{context}: {name}"


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_stages_give_the_oracles_gradients(name, truth):
    layout, more = SIMULATED[name]
    documents, expected = truth[more.get("tied", True)]
    spec = settings(layout, **more)
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        check(step, expected, f"{name}, rank {rank}")


@pytest.fixture(scope="module")
def in_processes(truth, tmp_path_factory):
    """Every rank's results of the cases of each name."""
    asked = {
        name: [(settings(layout, **more), truth[more.get("tied", True)][0]) for layout, more in cases]
        for name, cases in PROCESSES.items()
    }
    return in_shared_processes(asked, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", PROCESSES)
def test_stages_in_processes_give_the_oracles_gradients(name, truth, in_processes):
    for rank, steps in enumerate(in_processes[name]):
        for (layout, more), step in zip(PROCESSES[name], steps, strict=True):
            check(step, truth[more.get("tied", True)][1], f"{layout}, rank {rank}")


@pytest.fixture(scope="module")
def mixture_truth():
    """As those of `test_moe`, for the tied mixture."""
    documents = test_moe.nasty_documents(11)
    documents = test_moe.near_policy(documents, test_moe.oracle(documents)[2], 11, spread=0.25)
    return documents, test_moe.oracle(documents)


@pytest.mark.parametrize("name", MIXTURES)
def test_stages_of_a_mixture_give_the_oracles_gradients(name, mixture_truth):
    documents, expected = mixture_truth
    layout = MIXTURES[name]
    spec = test_moe.mixture(layout)
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        check(step, expected, f"{name}, rank {rank}")


def test_experts_of_stages_are_sharded_in_processes(mixture_truth, tmp_path):
    """A stage without experts takes part in the groups that are made for those of the others."""
    documents, expected = mixture_truth
    layout = {"pp": 3, "dp": 2, "ep": 2, "shard_parameters": True}
    for rank, [step] in enumerate(run_ranks(many_steps, 6, tmp_path, [(test_moe.mixture(layout), documents)])):
        check(step, expected, f"rank {rank}")
