"""Weights on their way to the sampler: planted failures are named by layer; a resumed run is as an unbroken one."""

import json

import pytest
import torch

from tests.helpers.mixtures import save_tiny_glm4_moe
from tests.helpers.online_runs import done, online_of, spec_of
from tests.helpers.same_bits import same_bits
from workbench.errors import SpecError
from workbench.rollouts.files import load
from workbench.specs.sync import SyncSpec
from workbench.train.weight_sync import DIFFERING, Schedule

LORA = {"r": 2, "init_lora_weights": "random", "target_modules": ["q_proj"]}
SMALL = {"online": {"prompts": 2, "answers": 2, "max_new_tokens": 3}, "record": {"gradients": "none"}}


@pytest.mark.parametrize(
    ("settings", "updates", "expected"),
    [
        ({}, 1, {(4, 0, 9): 4}),
        ({}, 3, {(4, 0, 0): 12}),
        ({"queue": 2}, 1, {(0, 0, 0): 0, (1, 0, 0): 0, (5, 1, 7): 3}),
        ({"queue": 2}, 3, {(5, 0, 0): 9}),
        ({"queue": 2, "mixed": True}, 1, {(5, 0, 0): 5, (5, 1, 0): 4, (5, 2, 0): 3, (5, 3, 0): 5, (1, 2, 0): 0}),
        ({"queue": 2, "in_flight_tokens": 3}, 1, {(5, 0, 2): 3, (5, 0, 3): 4, (5, 0, 6): 5, (5, 0, 60): 5}),
    ],
)
def test_the_schedule_is_a_function_of_the_settings(settings, updates, expected):
    schedule = Schedule(SyncSpec(**settings), updates)
    assert {key: schedule.version(*key) for key in expected} == expected


def synced(tmp_path, **changes):
    """The file of the last of three samplings, and the step records."""
    settings = {**SMALL, **changes, "sync": {"check": True, **changes.get("sync", {})}}
    run = done(tmp_path, steps=3, **settings)
    return json.loads((run.path / "sync/step0002.json").read_text()), run.steps()


def ways(report, kind="differing"):
    """Each layer with what the sampler has in the place of its tensors, and how many."""
    return {layer: {how: len(names) for how, names in of.items()} for layer, of in report[kind].items()}


@pytest.mark.parametrize(
    ("changes", "expected", "share"),
    [
        ({}, {}, 0.0),
        ({"sync": {"queue": 2, "in_flight_tokens": 1}}, {}, 0.0),
        ({"sync": {"lag": 1, "late": ["layers.1"]}}, {"layer 1": {"version 1, 1 step older": 11}}, 11 / 35),
        ({"sync": {"missing": ["layers.2.mlp"]}}, {"layer 2": {"version 0 (the source), 2 steps older": 3}}, 3 / 35),
        (
            {"sync": {"lag": 1}, "lora": {**LORA, "sampler": "merged_bfloat16"}},
            {f"layer {n}": {"version 1, 1 step older, adapter merged_bfloat16": 1} for n in range(3)},
            3 / 35,
        ),
    ],
)
def test_a_report_names_the_layers_that_differ_and_how(changes, expected, share, tmp_path):
    report, records = synced(tmp_path, **changes)
    assert ways(report) == expected
    assert records[-1][DIFFERING] == pytest.approx(share)
    assert report["meant"] == {}
    assert report["tensors"] == 35


def test_rounding_on_the_way_is_told_from_the_dtype_of_the_sampler(tmp_path):
    cast, records = synced(tmp_path / "cast", sync={"cast": "bfloat16"})
    assert [list(of) for of in ways(cast).values()] == [["rounded to bfloat16"]] * 5
    assert records[-1][DIFFERING] == 1.0
    meant, records = synced(tmp_path / "meant", online={**SMALL["online"], "sampler_precision": "bfloat16"})
    assert ways(meant, "meant") == ways(cast)
    assert meant["differing"] == {}
    assert records[-1][DIFFERING] == 0.0


def test_adapters_that_are_merged_in_bfloat16_are_told_from_exact_ones(tmp_path):
    report, _ = synced(tmp_path, lora={**LORA, "sampler": "merged_bfloat16"})
    assert ways(report, "meant") == {f"layer {n}": {"adapter merged_bfloat16": 1} for n in range(3)}
    assert report["differing"] == {}


def test_a_sampler_that_differs_is_reported_on_standard_error(tmp_path, capfd):
    synced(tmp_path, sync={"lag": 1})
    assert "of the sampler's tensors are not those of the trainer: sync/step0002.json" in capfd.readouterr().err


QUEUED = {
    **SMALL,
    "sync": {"queue": 2, "in_flight_tokens": 1, "lag": 1, "late": ["q_proj"], "check": True},
    "online": {**SMALL["online"], "old_logprobs": "behaviour"},
    "record": {"gradients": "full", "checkpoint_every": 2},
}


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"lora": {**LORA, "sampler": "merged_bfloat16"}}, marks=pytest.mark.slow)],
    ids=["weights", "adapters"],
)
def test_a_resumed_run_samples_and_trains_as_one_that_never_stopped(more, tmp_path):
    """It needs weights, and hashes of weights, from before its checkpoint."""
    settings = {**QUEUED, **more}
    whole = done(tmp_path, "whole", steps=5, **settings)
    first = done(tmp_path, "first", steps=4, **settings)
    rest = done(tmp_path, "rest", continues=first.path.name, steps=5, **settings)
    times = ("time/", "memory/", "continues")
    kept = [{k: v for k, v in run.steps()[4].items() if not k.startswith(times)} for run in (whole, rest)]
    assert kept[0].keys() - kept[1].keys() == set()
    assert all(kept[0][key] == kept[1][key] for key in kept[0])
    gradients = [run.read_tensors("step0004.gradients") for run in (whole, rest)]
    assert all(same_bits(gradients[0][name], gradients[1][name]) for name in gradients[0])
    batches = [load(run.path / "rollouts/step0004") for run in (whole, rest)]
    assert torch.equal(batches[0].extensions["version"].values, batches[1].extensions["version"].values)
    files = [(run.path / "sync/step0004.json").read_text() for run in (whole, rest)]
    assert files[0] == files[1]
    assert "version" in files[0]
    assert sorted(path.name for path in (rest.path / "sync").iterdir()) == [f"step{n:04d}.json" for n in range(5)]


@pytest.mark.parametrize("sync", [{"missing": ["layers.9"]}, {"lag": 1, "late": ["q"]}])
def test_names_of_no_tensor_are_refused(sync):
    setting = next(name for name in sync if name != "lag")
    with pytest.raises(SpecError, match=rf"sync.{setting}: '(.|\n)*whole components"):
        online_of(spec_of(sync=sync))


def test_samplings_out_of_order_are_refused():
    with pytest.raises(SpecError, match=r"weights of version 3\n  found: those of versions 5\n"):
        online_of(spec_of(sync={"queue": 2})).sample(5)


def test_a_policy_takes_the_weights_of_a_version_and_gives_them_back():
    """Also if nothing afterwards has the newest version."""
    online = online_of(spec_of(sync={"queue": 1}))
    versions, parameters = [], dict(online.policy.model.named_parameters())
    for number in range(2):
        online.sync.note(number)
        versions.append({name: value.detach().clone() for name, value in parameters.items()})
        with torch.no_grad():
            for value in parameters.values():
                value.mul_(1 + (1 - number) / 8)
    with online.sync.policy_at(0):
        assert all(torch.equal(parameters[name], value) for name, value in versions[0].items())
    assert all(torch.equal(parameters[name], value) for name, value in versions[1].items())
    assert not torch.equal(versions[0]["model.norm.weight"], versions[1]["model.norm.weight"])


def test_a_buffer_that_training_moves_reaches_the_sampler_or_is_missed(tmp_path):
    """Biases of routers are buffers: a sync of parameters alone leaves those of the source."""
    source = save_tiny_glm4_moe(tmp_path / "model")
    moved = {"model": {"source": source}, "routing": {"bias_step": 0.5}, "precision": "float32"}
    arrived, _ = synced(tmp_path / "arrived", **moved)
    assert arrived["differing"] == {}
    missed, _ = synced(tmp_path / "missed", **moved, sync={"missing": ["e_score_correction_bias"]})
    assert ways(missed) == {f"layer {n}": {"version 0 (the source), 2 steps older": 1} for n in (1, 2)}
    names = [name for of in missed["differing"].values() for of_way in of.values() for name in of_way]
    assert names == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]


@pytest.mark.parametrize("cache", ["kept", "recomputed"])
def test_updates_in_flight_do_not_depend_on_the_batch(cache, tmp_path):
    """Prompts of unequal lengths are padded, and fed again with their padding."""
    batches = []
    for at_once in (1, 8):
        settings = {
            "sync": {"queue": 1, "in_flight_tokens": 2, "cache": cache},
            "online": {"prompts": 4, "answers": 2, "max_new_tokens": 5, "prompts_at_once": at_once},
            "optimizer": {"name": "sgd", "learning_rate": 3.0},
            "record": {"gradients": "none"},
        }
        run = done(tmp_path / f"{at_once}", steps=3, **settings)
        batches.append(load(run.path / "rollouts/step0002"))
    assert len(set(batches[0].lengths_N.tolist())) > 1
    assert torch.equal(batches[0].tokens_T, batches[1].tokens_T)
    torch.testing.assert_close(batches[0].sampler_logprobs_T, batches[1].sampler_logprobs_T, rtol=0, atol=1e-12)


def test_keys_and_values_of_older_weights_are_kept_or_not(tmp_path):
    sampled = {}
    for cache in ("kept", "recomputed"):
        sync = {"queue": 1, "in_flight_tokens": 1, "cache": cache}
        run = done(
            tmp_path / cache, steps=2, optimizer={"name": "sgd", "learning_rate": 3.0}, **{**SMALL, "sync": sync}
        )
        sampled[cache] = load(run.path / "rollouts/step0001").sampler_logprobs_T
    assert not torch.equal(sampled["kept"], sampled["recomputed"])
