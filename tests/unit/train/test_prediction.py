"""The loss of further tokens: weights of the whole step, and a run with its record and checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.batches import nasty_documents
from tests.helpers.online_runs import done
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import AHEAD, AHEAD_WEIGHTS, shift_targets
from workbench.specs.mixtures import PredictionSpec
from workbench.specs.run import RunSpec
from workbench.train.checkpoint import trained_policy
from workbench.train.prediction import with_predictions
from workbench.train.worker import run_here

SPEC = PredictionSpec(depths=3, coefficient=0.6)


def documents():
    return [
        {
            name: value
            for name, value in document.items()
            if name in ("tokens", "loss_mask", "advantages", "old_logprobs")
        }
        for document in nasty_documents(3)
    ]


@pytest.mark.parametrize(("rows", "multiple"), [(1, 1), (2, 4), (5, 8)])
def test_weights_are_those_of_the_step_in_every_packing(rows, multiple):
    packed = pack(RolloutBatch.from_documents(documents()), rows=rows, multiple_of=multiple)
    found = with_predictions([shift_targets(row) for row in packed], SPEC)
    for depth in range(1, SPEC.depths + 1):
        expected = sorted(
            (tuple(d["tokens"][: t - depth]), token)
            for d in documents()
            for t, token in enumerate(d["tokens"])
            if t > depth and d["loss_mask"][t]
        )
        targets, weights = [], []
        for row in found:
            weights_T = row.extensions[AHEAD_WEIGHTS][:, depth - 1]
            for place in weights_T.nonzero()[:, 0].tolist():
                start = place - int(row.positions_T[place])
                targets.append(
                    (tuple(row.tokens_T[start : place + 1].tolist()), int(row.extensions[AHEAD][place, depth]))
                )
            weights.append(weights_T)
        assert sorted(targets) == expected
        assert len(expected) > 5
        torch.testing.assert_close(torch.cat(weights).unique()[-1].item(), 0.6 / 3 / len(expected), rtol=1e-6, atol=0)


def test_a_run_records_the_loss_of_each_depth_and_saves_its_layers(tmp_path):
    """The checkpoint has the layers; the stock decoder of the run does not."""
    files.save(RolloutBatch.from_documents(documents()), tmp_path / "rollouts", provenance={"made_by": "test"})
    spec = RunSpec.model_validate(
        {
            "model": {"source": "tiny-qwen3"},
            "data": {"path": str(tmp_path / "rollouts")},
            "device": "cpu",
            "optimizer": {"learning_rate": 1e-2},
            "prediction": {"depths": 2, "detach": "policy"},
            "record": {"checkpoint_every": 2},
            "steps": 2,
        }
    )
    run = RunDirectory.create(tmp_path, "run", spec)
    run_here(run, tmp_path)
    assert run.status == "succeeded"
    first, second = run.steps()
    for key in ("loss/prediction_1/sum", "loss/prediction_2/sum"):
        assert 0 < second[key] < first[key]
    [folder] = run.checkpoints().values()
    saved = load_file(folder / "weights.safetensors")
    assert sum(".prediction." in name for name in saved) == 2 * 15
    assert not any(".prediction." in name for name, _ in trained_policy(run).named_parameters())


def test_an_online_run_with_adapters_samples_from_the_decoder_and_saves_the_layers(tmp_path):
    """Layers that are trained whole are in the adapter's folder, and not in the stock decoder of the run."""
    adapters = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["prediction"]}
    run = done(tmp_path, steps=2, prediction={"depths": 1}, lora=adapters, record={"checkpoint_every": 2})
    for step in run.steps():
        assert step["loss/prediction_1/sum"] > 0
        assert step["prediction/tokens_1/sum"] > 0
    saved = load_file(run.checkpoints()[2] / "adapter_model.safetensors")
    assert sum(".prediction." in name for name in saved) == 15
    model = trained_policy(run)
    assert not any(".prediction." in name for name, _ in model.named_parameters())
    model(input_ids=torch.tensor([[1, 2, 3]]))
