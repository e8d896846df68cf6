"""Distances of a faulty run from a clean one."""

import math

import torch

from workbench.atomic import write_tensors
from workbench.records.directory import RunDirectory
from workbench.sensitivity.distances import Change, measure_distances
from workbench.specs.run import RunSpec


def finished(folder, name, loss, norm, logprobs, trained, weights):
    run = RunDirectory.create(folder, name, RunSpec())
    run.append_step({"step": 0, "loss/total/sum": loss, "gradient/norm/global": norm})
    tokens = {"trained": torch.tensor(trained), "policy_logprobs": torch.tensor(logprobs, dtype=torch.float64)}
    run.write_tensors("step0000.tokens", tokens)
    if weights is not None:
        path = run.path / "checkpoints/step0001/weights.safetensors"
        path.parent.mkdir(parents=True)
        write_tensors(path, {"b": torch.tensor(weights[1:]), "a": torch.tensor(weights[:1])})
    return run


def test_loss_norm_logprobs_and_weights_are_compared(tmp_path):
    clean = finished(tmp_path, "clean", 1.0, 2.0, [0.0, -1.0, -2.0], [False, True, True], [3.0, 4.0])
    faulty = finished(tmp_path, "faulty", 1.5, 2.0, [9.0, -1.5, -2.0], [True, True, True], [3.0, 4.5])
    apart = measure_distances(faulty, clean)
    assert apart.loss == (Change(1.0, 1.5),)
    assert apart.gradient_norm[0].absolute == 0
    (logprobs,) = apart.logprobs
    assert (logprobs.largest, logprobs.mean, logprobs.largest_clean) == (0.5, 0.25, 2.0)  # tokens that both train
    assert (apart.weights.norm, apart.weights.clean_norm) == (0.5, 5.0)


def test_what_is_not_finite_is_infinitely_far(tmp_path):
    clean = finished(tmp_path, "clean", 1.0, 2.0, [-1.0], [True], [3.0, 4.0])
    faulty = finished(tmp_path, "faulty", math.inf, math.nan, [math.nan], [True], None)
    apart = measure_distances(faulty, clean)
    assert apart.loss[0].absolute == apart.gradient_norm[0].absolute == apart.logprobs[0].largest == math.inf
    assert apart.weights is None


def test_runs_without_a_common_trained_token_have_no_distance_of_logprobs(tmp_path):
    clean = finished(tmp_path, "clean", 1.0, 2.0, [-1.0, -2.0], [True, False], None)
    faulty = finished(tmp_path, "faulty", 1.0, 2.0, [-1.0, -2.0], [False, True], None)
    assert measure_distances(faulty, clean).logprobs[0].largest == 0
