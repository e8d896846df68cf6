"""MLflow's own client finds every number at its step and time."""

from __future__ import annotations

import math

import pytest

from tests.helpers.hand_made import BEGAN_NS, make_run
from workbench.report.exporters.tracked import TrackedRun, TrackedStep, tracked


@pytest.fixture
def _offline(monkeypatch):
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "true")


@pytest.fixture
def client(exported, _offline):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(exported("mlflow")[0] / "mlruns").as_uri())


@pytest.fixture
def found(client, runs):
    """The runs there, in the order of ours."""
    experiment = client.get_experiment_by_name("bench/parity")
    by_id = {run.data.tags["workbench.run"]: run for run in client.search_runs([experiment.experiment_id])}
    assert len(by_id) == len(runs)
    return [by_id[run.path.name] for run in runs]


def test_every_number_at_its_step(client, found):
    history = client.get_metric_history(found[0].info.run_id, "loss/total/sum")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.1 + 0.2), (5, -1e300), (6, 2.0)]
    odd = [metric.value for metric in client.get_metric_history(found[0].info.run_id, "odd/one/max")]
    assert (math.isnan(odd[0]), odd[1:]) == (True, [math.inf, -math.inf])
    norms = client.get_metric_history(found[0].info.run_id, "gradient_norms/a.weight")
    assert [(metric.step, metric.value) for metric in norms] == [(0, 1e-300), (5, 2.0)]


def test_at_its_time(client, found):
    [metric] = client.get_metric_history(found[1].info.run_id, "loss/total/sum")
    assert metric.timestamp == BEGAN_NS // 10**6 + 2000
    assert (found[1].info.start_time, found[1].info.end_time) == (BEGAN_NS // 10**6 + 1000, BEGAN_NS // 10**6 + 4000)


def test_settings_state_and_failure(found):
    assert [run.info.status for run in found] == ["FINISHED", "FAILED", "KILLED"]
    assert (found[0].info.run_name, found[0].data.params["layout.cp"], found[0].data.params["faults"]) == (
        "cp2",
        "2",
        '["shift"]',
    )
    assert found[1].data.tags["run.failure"] == "rank 1 ValueError: no <b>good</b>"
    assert found[0].data.tags["run.tags"] == "succeeded fault:shift"


@pytest.fixture
def writer(tmp_path, _offline):
    from workbench.report.exporters.mlflow_files import Mlflow

    return Mlflow(tmp_path, "bench")


def test_an_interrupted_export_is_repeated(writer, tmp_path, monkeypatch):
    run = tracked(make_run(tmp_path / "parity", "a"))
    with monkeypatch.context() as broken:
        broken.setattr(writer.client, "set_terminated", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            writer.write(run)
    assert not writer.has(run)
    writer.write(run)
    assert writer.has(run)
    [result] = writer.client.search_runs([writer.client.get_experiment_by_name("bench/parity").experiment_id])
    assert len(writer.client.get_metric_history(result.info.run_id, "loss/total/sum")) == 4


def test_unsupported_keys_are_renamed_and_reported(writer):
    values = {"a": 1.0, "a/b": 2.0, "sp€cial": 3.0, "../up": 4.0, "x" * 251: 5.0, "a//b": 6.0}
    run = TrackedRun(
        "a-1", "a", "parity", "succeeded", 1.0, 2.0, {"long": "y" * 6001}, {}, [TrackedStep(0, 1.5, values)]
    )
    notes = writer.write(run)
    [result] = writer.client.search_runs([writer.client.get_experiment_by_name("bench/parity").experiment_id])
    assert result.data.metrics == {"a.value": 1.0, "a/b": 2.0, "sp_cial": 3.0, "up": 4.0}
    assert "metric a is called a.value there" in notes
    assert "metric sp€cial is called sp_cial there" in notes
    assert [note for note in notes if "left out" in note] == [
        f"metric {'x' * 251} has no name that MLflow takes: left out",
        "metric a//b has no name that MLflow takes: left out",
    ]  # a/b has it already
    assert "long is cut to 5000 letters" in notes
