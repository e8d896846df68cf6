"""Online runs of presets: the saved record, and one run of few steps."""

import pytest

from experiments.precision import online
from workbench.atomic import from_json, to_json
from workbench.specs.precision import PRESETS


def test_a_preset_trains():
    record = online.measure(names=("fp16_amp",))
    run = record["runs"]["fp16_amp"]
    assert run["reward"][-1] > run["reward"][0] + 0.2
    assert run["loss_scale"][-1] > 0
    assert len(run["reward"]) == record["settings"]["steps"]


@pytest.mark.parametrize(("name", "gain"), [("online", 0.3), ("online_gpu", 0.14)])
def test_every_preset_trains_in_the_saved_record(name, gain):
    """At 0.6 B pure bfloat16 gains 0.15, as it loses updates; every other preset gains 0.4 and more."""
    runs = from_json((online.FOLDER / f"{name}.json").read_text())["runs"]
    assert runs.keys() == PRESETS.keys()
    for name, run in runs.items():
        assert run["reward"][-1] > run["reward"][0] + (gain if name == "bfloat16" else max(gain, 0.3)), name
        assert run["sampler_kl_nats"][-1] < 0.1, name
        assert sum(run.get("skipped", [])) <= 1, name


def test_rewards_are_shares_of_even_ids():
    task = online.EvenTokens()
    assert task.reward("1 2", task.decode([2, 3, 4, 5])) == 0.5
    assert list(task.encode("1 2 3")) == [1, 2, 3]


def test_a_named_preset_replaces_its_own_run_alone(tmp_path, monkeypatch):
    def few(*arguments, make=online.settings):
        run = make(*arguments)
        return run | {"steps": 2, "online": run["online"] | {"prompts": 4, "answers": 2, "max_new_tokens": 4}}

    monkeypatch.setattr(online, "FOLDER", tmp_path)
    monkeypatch.setattr(online, "settings", few)
    runs = {"float64": {"left_out": "kept"}, "tf32": {"left_out": "no time"}}
    (tmp_path / "online.json").write_bytes(to_json({"runs": runs}))
    online.main(["1", "tf32"])
    runs = from_json((tmp_path / "online.json").read_text())["runs"]
    assert runs["float64"] == {"left_out": "kept"}
    assert len(runs["tf32"]["reward"]) == 2
