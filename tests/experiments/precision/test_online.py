"""Online runs of presets: the saved record, and one run of few steps."""

from experiments.precision import online
from workbench.atomic import from_json
from workbench.specs.precision import PRESETS


def test_a_preset_trains():
    record = online.measure(names=("fp16_amp",))
    run = record["runs"]["fp16_amp"]
    assert run["reward"][-1] > run["reward"][0] + 0.2
    assert run["loss_scale"][-1] > 0
    assert len(run["reward"]) == record["settings"]["steps"]


def test_every_preset_trains_in_the_saved_record():
    runs = from_json((online.FOLDER / "online.json").read_text())["runs"]
    assert runs.keys() == PRESETS.keys()
    for name, run in runs.items():
        assert run["reward"][-1] > run["reward"][0] + 0.3, name
        assert run["sampler_kl_nats"][-1] < 0.1, name
        assert sum(run.get("skipped", [])) <= 1, name


def test_rewards_are_shares_of_even_ids():
    task = online.EvenTokens()
    assert task.reward("1 2", task.decode([2, 3, 4, 5])) == 0.5
    assert list(task.encode("1 2 3")) == [1, 2, 3]
