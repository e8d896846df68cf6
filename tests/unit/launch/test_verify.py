"""Verdicts on weights that were made up; the jobs, once, on CPU."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import LaunchError, SpecError
from workbench.launch import verify

TRUTH = {"a": torch.zeros(4, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}


def write(folder, name, far, *, allocated=(), **more):
    """A run whose weights have a given distance to the ground truth, in each parameter."""
    weights = {key: value + far.get(key, 0.0) / value.numel() ** 0.5 for key, value in TRUTH.items()}
    save_file(weights, folder / f"{name}.safetensors")
    if name != "start":
        text = {
            "losses": [1.0, 0.5],
            "step_ms": 2.0,
            "allocated_bytes": list(allocated),
            "reserved_bytes": list(allocated),
        }
        (folder / f"{name}.json").write_text(json.dumps(text | more))


@pytest.fixture
def runs(tmp_path):
    """One rank is 1 and 2 and 9 away, two ranks 3; no bar is missed."""
    for name, far in {
        "truth": {},
        "start": {"a": 5000.0},
        "one_rank0": {"a": 1.0, "b": 1.0},
        "one_rank1": {"a": 2.0, "b": 1.0},
        "one_rank2": {"a": 9.0, "b": 1.0},
        "off_by_ranks": {"a": 4000.0},
    }.items():
        write(tmp_path, name, far)
    write(tmp_path, "torch_sum", {"a": 3.0, "b": 0.5}, same_on_all_ranks=True)
    (tmp_path / "task.json").write_text("{}")
    return tmp_path


def test_distances_are_over_those_of_one_rank(runs):
    record = verify.compared(runs, 2)
    own = 5**0.5
    assert record["one_rank_distance"] == pytest.approx(own)
    assert record["moved"] == pytest.approx(5000.0)
    entry = record["runs"]["torch_sum"]
    assert entry["over_one_rank"] == pytest.approx((9.25 / 5) ** 0.5)
    assert (entry["worst_parameter"], entry["worst_over_one_rank"]) == ("a", pytest.approx(1.5))
    assert record["bars"]["sight"]["found"] == pytest.approx(4000 / (2 * own))
    assert all(bar["holds"] for bar in record["bars"].values())
    assert "growth" not in record["bars"]
    assert record["bars"]["moved"]["found"] == pytest.approx(5000 / own)
    assert (record["verdict"], record["why"]) == ("equal", "")


@pytest.mark.parametrize(
    ("bar", "name", "far", "more"),
    [
        ("distance", "ours_mean", {"a": 4.5}, {}),
        ("parameter", "ours_mean", {"b": 4.1}, {}),
        ("sight", "off_by_ranks", {"a": 400.0}, {}),
        ("same", "ours_mean", {}, {"same_on_all_ranks": False}),
        ("growth", "ours_mean", {}, {"allocated": [7, 9, 9, 9, 8, 9, 8]}),
    ],
)
def test_each_bar_can_be_missed(runs, bar, name, far, more):
    write(runs, name, far, **({} if name == "off_by_ranks" else {"same_on_all_ranks": True}) | more)
    record = verify.compared(runs, 2)
    assert [key for key, result in record["bars"].items() if not result["holds"]] == [bar]
    assert record["verdict"] == ("unsound baseline" if bar == "sight" else "different")


def alone(folder, **changes):
    """Every run of one rank again, with other numbers in its file."""
    for name in ("truth", "one_rank0", "one_rank1", "one_rank2"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def in_words(record):
    return verify.format_record(
        {"task": {"model": "m", "steps": 7, "rows": 2, "tokens": 64}, "device": "thing", "seconds": 3.0} | record
    ).splitlines()[-1]


class TestVerdicts:
    """Equal weights prove something only if they were trained, and if one rank and the ground truth are finite."""

    def test_weights_that_did_not_move_are_vacuous(self, runs):
        for name in ("start", "one_rank0", "one_rank1", "one_rank2", "off_by_ranks"):
            write(runs, name, {})
        write(runs, "torch_sum", {}, same_on_all_ranks=True)
        record = verify.compared(runs, 2)
        assert (record["verdict"], record["why"]) == ("vacuous", "training did not move the weights")
        assert not record["bars"]["moved"]["holds"]
        assert in_words(record).startswith("vacuous: training did not move the weights; 2 ranks")

    @pytest.mark.parametrize("norms", [[0.5, 0.0], [float("nan"), 0.5]])
    def test_steps_without_a_gradient_are_vacuous(self, runs, norms):
        alone(runs, gradient_norms=norms)
        record = verify.compared(runs, 2)
        assert (record["verdict"], record["bars"]["trained"]["found"]) == ("vacuous", 0.5)
        alone(runs, gradient_norms=[0.5, 0.4])
        assert verify.compared(runs, 2)["verdict"] == "equal"

    @pytest.mark.parametrize("name", ["truth", "one_rank1"])
    @pytest.mark.parametrize("what", ["weights", "losses"])
    def test_a_baseline_that_is_not_finite_is_unsound(self, runs, name, what):
        if what == "weights":
            write(runs, name, {"b": float("nan")})
        else:
            (runs / f"{name}.json").write_text(
                json.dumps(json.loads((runs / f"{name}.json").read_text()) | {"losses": [1.0, float("nan")]})
            )
        record = verify.compared(runs, 2)
        assert record["verdict"] == "unsound baseline"
        assert record["why"].startswith("not finite: ")
        assert name.rstrip("1") in record["why"]
        assert "cannot be compared" in in_words(record)

    def test_a_training_too_short_to_be_seen_is_an_unsound_baseline(self, runs):
        write(runs, "start", {"a": 50.0})
        record = verify.compared(runs, 2)
        assert [key for key, result in record["bars"].items() if not result["holds"]] == ["moved"]
        assert record["verdict"] == "unsound baseline"

    def test_the_record_that_is_published_has_a_verdict_too(self):
        record = json.loads((verify.project_root() / "experiments" / "benchmarks" / "verify.json").read_text())
        assert "verdict" not in record
        assert verify.verdict_of(record) == "equal"
        assert verify.format_record(record).endswith("2 ranks and one rank train the same weights")


@pytest.mark.parametrize("name", ["ours_mean", "torch_sum"])
def test_weights_that_are_no_numbers_miss_the_bars_whichever_run_has_them(runs, name):
    write(runs, "ours_mean", {}, same_on_all_ranks=True)
    write(runs, name, {"a": 3.0, "b": float("nan")}, same_on_all_ranks=True)
    record = verify.compared(runs, 2)
    assert [key for key, result in record["bars"].items() if not result["holds"]] == ["distance", "parameter"]
    assert record["runs"][name]["worst_parameter"] == "b"


def test_memory_is_flat_if_it_is_after_the_fifth_step(runs):
    write(runs, "ours_sum", {}, allocated=[1, 5, 9, 7, 8, 8, 8], same_on_all_ranks=True)
    assert verify.compared(runs, 2)["bars"]["growth"] == {"bar": 0, "found": 0, "holds": True}


def test_the_record_is_formatted(runs):
    record = {"task": {"model": "m", "steps": 7, "rows": 2, "tokens": 64}, "device": "thing", "seconds": 3.0}
    record |= verify.compared(runs, 2)
    text = verify.format_record(record)
    assert "torch_sum: 1.36 times that" in text
    assert text.endswith("2 ranks and one rank train the same weights")
    record["bars"]["same"]["holds"] = False
    record["verdict"] = "different"
    assert "do NOT agree" in verify.format_record(record)
    assert "same: True, bar True: MISSED" in verify.format_record(record)


def test_an_invalid_request_is_refused(monkeypatch):
    for wrong in ({"gpus": 1}, {"gpus": 0, "ranks": 1}, {"gpus": 0, "model": "huge"}, {"gpus": 0, "steps": 0}):
        with pytest.raises(SpecError, match="at least two ranks"):
            verify.measure(**wrong)
    monkeypatch.setattr(verify, "visible_gpus", lambda: ["0"])
    with pytest.raises(LaunchError, match="verify on 2 GPUs"):
        verify.measure(gpus=2)


def test_failing_ranks_report_the_reason(tmp_path, monkeypatch):
    text = "print('starting'); raise OSError('no cable')"
    monkeypatch.setattr(verify, "_command", lambda ranks, folder: [verify.sys.executable, "-c", text])
    with pytest.raises(LaunchError, match="found: OSError: no cable"):
        verify._job(1, tmp_path, 60.0)


def test_one_rank_needs_no_rendezvous(tmp_path):
    assert verify._command(1, tmp_path)[1:] == ["-m", "workbench.launch.verify_rank", str(tmp_path)]
    assert "--nproc-per-node=3" in verify._command(3, tmp_path)


def test_a_job_that_does_not_end_is_ended(tmp_path, monkeypatch):
    sleeps = [verify.sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(verify, "_command", lambda ranks, folder: sleeps)
    with pytest.raises(LaunchError, match="no end after 0 s; no output"):
        verify._job(1, tmp_path, 0.3)


def test_stages_and_experts_are_trained_too():
    """Adapters are trained under context parallelism alone."""
    assert verify.Task(ranks=3).layouts() == {"ours_pp": {"pp": 3}}
    assert verify.Task(model=verify.MIXTURE).layouts() == {"ours_pp": {"pp": 2}, "ours_ep": {"dp": 2, "ep": 2}}
    assert verify.Task(lora_r=4).layouts() == {}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-qwen3", verify.MIXTURE])
def test_it_runs_without_gpus(model):
    record = verify.measure(gpus=0, steps=6, tokens=64, model=model)
    layouts = set(verify.Task(model=model).layouts())
    assert {name for name in record["runs"] if name.startswith("ours")} == {"ours_sum", "ours_mean"} | layouts
    assert record["bars"]["trained"]["found"] == 1.0
    assert record["verdict"] == "equal"
    assert all(bar["holds"] for bar in record["bars"].values()), verify.format_record(record)
