"""A user's loss in runs: every layout, both forms, the file in the record and in a run's identity."""

import json

import pytest
import torch

from workbench.errors import SpecError
from workbench.experiment import Experiment
from workbench.launch.resume import identify
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train.own import checked_number
from workbench.train.worker import run_here

LOSSES = """import torch


def clipped(logprobs, old, advantages, clip):
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def grpo(inputs, *, clip=0.2):
    return clipped(inputs.policy_logprobs_T, inputs.old_logprobs_T, inputs.advantages_T, clip)


def right(batch, outputs, totals, *, clip=0.2):
    loss_T = clipped(outputs.policy_logprobs_T, batch.old_logprobs_T, batch.advantages_T, clip)
    return torch.where(batch.loss_mask_T, loss_T, 0).sum() / totals.tokens * totals.dp * totals.cp


def local(batch, outputs, totals, *, clip=0.2):
    loss_T = clipped(outputs.policy_logprobs_T, batch.old_logprobs_T, batch.advantages_T, clip)
    return torch.where(batch.loss_mask_T, loss_T, 0).sum() / batch.loss_mask_T.sum().clamp_min(1)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_losses.py"
    path.write_text(LOSSES)
    return path


def trainer(file, name, **more):
    return {"loss": {"name": f"{file}:{name}", "engine": "mean"}, **more}


def test_an_ablation_compares_own_losses_with_a_preset_in_every_layout(file, tmp_path):
    own = {"loss": {"name": f"{file}:grpo"}}
    configurations = {
        "preset": {},
        "own": own,
        "cp_zigzag": {**own, "layout": {"cp": 2, "order": "zigzag"}},
        "ring_tp": {**own, "layout": {"cp": 2, "tp": 2, "order": "zigzag", "attention": "ring"}},
        "dp_micro_batches": {**own, "layout": {"dp": 2}, "data": {"micro_batches": 3}},
        "fused": {**own, "policy": {"fused_loss": True}, "layout": {"cp": 2}},
        "trainer": trainer(file, "right", layout={"dp": 2, "cp": 2, "order": "striped"}),
        "local": trainer(file, "local", layout={"cp": 2}),
    }
    ablation = {
        "question": "own?",
        "base": {"precision": "float64"},
        "reference": "preset",
        "configurations": configurations,
    }
    comparison = Experiment(ablation, folder=tmp_path / "own").run(where="here")
    verdicts = {configuration.name: configuration.verdict for configuration in comparison.configurations}
    assert (verdicts.pop("preset"), verdicts.pop("local")) == ("reference", "different")
    assert set(verdicts.values()) == {"equal"}, verdicts


def run(file, folder, **settings):
    directory = RunDirectory.create(folder, "own", RunSpec(loss={"name": f"{file}:grpo"}, **settings))
    run_here(directory, project_root())
    return directory


def test_the_record_has_the_file(file, tmp_path):
    path = run(file, tmp_path / "runs").path / "provenance.json"
    record = json.loads(path.read_text())["loss_file"]
    assert record["name"] == f"{file}:grpo"
    assert record["text"] == LOSSES


def test_another_text_is_another_identity(file):
    spec = RunSpec(loss={"name": f"{file}:grpo"})
    before = identify([spec], project_root())
    assert identify([spec], project_root()) == before
    file.write_text(LOSSES + "# edited\n")
    assert identify([spec], project_root()) != before


def test_the_reproducible_mode_takes_terms(file, tmp_path):
    directory = run(file, tmp_path / "runs", reproducible={"block_tokens": 16})
    assert directory.status == "succeeded"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"policy": {"fused_loss": True}}, "policy.fused_loss is for a loss of per-token terms"),
        ({"reproducible": {"block_tokens": 16}}, "reproducible is for a loss of per-token terms"),
        ({"loss": {"kl": {"coefficient": 0.1}}}, "loss.kl would be ignored"),
        ({"loss": {"surrogate": {"coefficient": 2.0}}}, "loss.surrogate.coefficient would be ignored"),
        ({"loss": {"denominator": "document"}}, "loss.denominator would be ignored"),
    ],
)
def test_a_trainers_function_refuses_what_it_would_ignore(file, settings, part):
    loss = {"name": f"{file}:right", "engine": "sum", **settings.pop("loss", {})}
    with pytest.raises(SpecError, match=part):
        RunSpec(loss=loss, **settings)


@pytest.mark.parametrize(
    ("returned", "part"),
    [(torch.ones(3), r"shape \[3\]"), (torch.tensor(1.0), "a constant"), (2.0, "2.0")],
)
def test_a_trainers_number_has_a_gradient(returned, part):
    with pytest.raises(SpecError, match=part):
        checked_number(returned, single_process_mesh())
