"""Attention sinks of a whole model (gpt-oss) give the oracle's loss and gradients in every layout."""

import pytest

from tests.helpers.batches import nasty_documents
from tests.helpers.mixtures import save_tiny_gpt_oss
from tests.oracles.mixture import mixture_step
from tests.oracles.step import exact
from tests.parity.cases import step_on
from tests.parity.test_oracle import PAPER
from tests.parity.test_routing import BALANCED, check, near, routed
from workbench.policy.decoder import load_decoder
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec

LAYOUTS = {
    "one_rank": {},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag", "attention": "ring"},
    "pp2_ep2_of_cp2_ulysses": {"pp": 2, "cp": 2, "ep": 2, "attention": "ulysses", "checkpointing": True},
}
MORE = {
    "tp2_sequence_parallel": {"tp": 2, "sequence_parallel": True},
    "hybrid": {"cp": 4, "order": "striped", "attention": "hybrid", "ulysses": 2},
    "dp2_ep2": {"dp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """A checkpoint, documents near it, and the oracle's results."""
    folder = save_tiny_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))
    model = exact(load_decoder(folder))
    documents = near(model, nasty_documents(11, count=6))
    return folder, documents, mixture_step(model, documents, **PAPER, balance=0.5, z=0.1)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_sinks_give_the_oracles_gradients(name, truth):
    folder, documents, expected = truth
    layout = (LAYOUTS | MORE)[name]
    spec = routed(layout, BALANCED, {"source": folder})
    steps = simulate(lambda mesh: step_on(mesh, spec, documents), **LayoutSpec(**layout).mesh_sizes)
    for rank, step in enumerate(steps):
        check(step, expected, f"{name}, rank {rank}", {})
        for key, norm in step["norms"].items():
            assert norm == pytest.approx(float(expected[1][key].norm()), rel=1e-9, abs=1e-12), key
        assert all(step["norms"][f"model.layers.{layer}.self_attn.sinks"] > 1e-3 for layer in (0, 1))
