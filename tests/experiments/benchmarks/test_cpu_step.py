"""A CPU step next to a bare loop: the loop trains, the summary follows from the samples, the saved record holds."""

import statistics

import pytest

from experiments.benchmarks import cpu_step
from workbench.atomic import from_json
from workbench.records.provenance import project_root


def test_the_bare_loop_trains_on_every_document_of_the_default_rollouts():
    loop = cpu_step.BareLoop()
    before = [value.detach().clone() for value in loop.model.parameters()]
    assert loop.step() > 0
    assert int(loop.attended_NT.sum()) == loop.tokens
    assert loop.documents == len(loop.ids_NT) == 72
    assert any((old != new).any() for old, new in zip(before, loop.model.parameters(), strict=True))


def test_a_turn_has_the_steps_of_both(monkeypatch):
    monkeypatch.setattr(cpu_step, "run_of_ours", lambda: [30.0, 50.0])
    record = cpu_step.measure(pairs=1)
    assert record["ours_ms"] == [30.0, 50.0]
    assert len(record["bare_ms"]) == cpu_step.STEPS - 2
    [bar] = record["bars"].values()
    assert bar["median"] == pytest.approx(40.0 / statistics.median(record["bare_ms"]))
    assert "72 documents" in cpu_step.format_record(record)


def test_the_saved_record_holds_its_bar():
    [bar] = from_json((project_root() / "experiments/benchmarks/cpu_step.json").read_text())["bars"].values()
    assert bar["holds"] == (bar["median"] <= cpu_step.BAR)
    assert bar["holds"]
