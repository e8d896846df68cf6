"""A user's own loss in every layout: a per-token one agrees, a trainer's shows the factor of its mistake."""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.parity.cases import step_on
from tests.parity.test_oracle import LOSS, documents_near
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec

SOURCE = """
import torch


def clipped(inputs, *, low: float, high: float):
    ratio_T = (inputs.policy_logprobs_T - inputs.old_logprobs_T).exp()
    return -torch.minimum(ratio_T * inputs.advantages_T, ratio_T.clamp(1 - low, 1 + high) * inputs.advantages_T)


def _sum(batch, outputs, low=0.2, high=0.28):
    ratio_T = (outputs.policy_logprobs_T - batch.old_logprobs_T).exp()
    loss_T = -torch.minimum(ratio_T * batch.advantages_T, ratio_T.clamp(1 - low, 1 + high) * batch.advantages_T)
    return torch.where(batch.loss_mask_T, loss_T, 0.0).sum()


def whole(batch, outputs, totals):
    return _sum(batch, outputs) / totals.tokens


def scaled(batch, outputs, totals):
    return _sum(batch, outputs) / totals.tokens * totals.dp * totals.cp


def without_cp(batch, outputs, totals):
    return _sum(batch, outputs) / totals.tokens * totals.dp


def local(batch, outputs, totals):
    return _sum(batch, outputs) / batch.loss_mask_T.sum().clamp(min=1)
"""

CHANGES = {
    "dp2": {"layout": {"dp": 2}},
    "cp2_contiguous": {"layout": {"cp": 2, "order": "contiguous"}},
    "cp2_zigzag": {"layout": {"cp": 2, "order": "zigzag"}},
    "cp2_balanced": {"layout": {"cp": 2, "order": "balanced"}},
    "cp2_ulysses": {"layout": {"cp": 2, "order": "zigzag", "attention": "ulysses"}},
    "tp2": {"layout": {"tp": 2}},
    "dp2_cp2": {"layout": {"dp": 2, "cp": 2, "order": "zigzag"}},
    "micro_batches": {"data": {"micro_batches": 2}},
    "checkpointing": {"layout": {"checkpointing": True}},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "my_losses.py"
    path.write_text(SOURCE, encoding="utf8")
    return path


@pytest.fixture(scope="module")
def documents():
    return documents_near(11)


def step(loss, documents, layout=None, **more):
    layout = layout or {}
    settings = {
        "model": {"source": "tiny-qwen3", "tied": True, "seed": 3},
        "precision": "float64",
        "loss": loss,
        "layout": layout,
    } | more
    sizes = RunSpec.model_validate(settings).layout.mesh_sizes
    return simulate(lambda mesh: step_on(mesh, settings, documents), **sizes)[0]


@pytest.fixture(scope="module")
def plain(documents):
    return step({"name": "grpo", "surrogate": LOSS["surrogate"]}, documents)


def own(file, name, engine=None):
    return {"name": f"{file}:{name}"} | ({"engine": engine} if engine else {"settings": {"low": 0.2, "high": 0.28}})


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("loss", [("clipped",), ("whole", "sum"), ("scaled", "mean")], ids="_".join)
def test_an_own_loss_is_the_preset_of_its_formula_in_every_layout(name, loss, file, documents, plain):
    got = step(own(file, *loss), documents, **CHANGES[name])
    assert got["loss"] == pytest.approx(plain["loss"], rel=1e-12)
    assert_float64_parity(got["gradients"], plain["gradients"], context=f"{loss} {name}")


@pytest.mark.parametrize("engine", ["sum", "mean"])
def test_what_the_engine_does_to_gradients_is_a_setting(engine, file, documents, plain):
    got = step(own(file, "whole", engine), documents, layout={"dp": 2})
    factor = {"sum": 1.0, "mean": 0.5}[engine]
    expected = {name: gradient * factor for name, gradient in plain["gradients"].items()}
    assert_float64_parity(got["gradients"], expected, context=engine)


def test_a_missing_cp_factor_is_a_factor_of_one_half(file, documents, plain):
    got = step(own(file, "without_cp", "mean"), documents, layout={"cp": 2, "order": "zigzag"})
    expected = {name: gradient * 0.5 for name, gradient in plain["gradients"].items()}
    assert_float64_parity(got["gradients"], expected, context="1 / cp")


def test_a_division_by_the_local_count_depends_on_micro_batches(file, documents):
    one, two = (
        step(own(file, "local", "sum"), documents, data={"micro_batches": number})["gradients"] for number in (1, 2)
    )
    name = "model.embed_tokens.weight" if "model.embed_tokens.weight" in one else next(iter(one))
    assert float((one[name] - two[name]).norm() / one[name].norm()) > 1e-3
    assert torch.isfinite(two[name]).all()
