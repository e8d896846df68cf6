"""The record of two modules: layouts against one rank, and the result of each check for each bug."""

import pytest

from experiments.encoder_bridge import measure as encoder_bridge
from experiments.encoder_bridge.measure import BRIDGE_FAULTS, SETTINGS, Setting


def test_layouts_and_faults_become_a_record(monkeypatch):
    name = "encoder_averaged_over_dp"
    monkeypatch.setattr(encoder_bridge, "SETTINGS", {"small": Setting({"dp": 2}, {"cp": 2})})
    monkeypatch.setattr(encoder_bridge, "BRIDGE_FAULTS", {name: BRIDGE_FAULTS[name]})
    record = encoder_bridge.measure()
    assert record["layouts"]["small"]["distance"] <= 1e-12
    assert (record["layouts"]["small"]["path"], record["layouts"]["small"]["parameters"]) == ("general", 78)
    fault = record["faults"][name]
    assert [fault[part] for part in ("loss", "encoder", "policy")] == pytest.approx([1, 0.25, 1])
    assert fault["distance"] == pytest.approx(0.75)
    assert (fault["scales_encoder"], fault["passes_adam"], fault["diagnosis"]) == (True, True, "module_scaled")
    assert all(bar["holds"] for bar in record["bars"].values())
    text = encoder_bridge.format_record(record)
    assert "small: general, 78 parameters within" in text
    assert "after one step of Adam passes" in text


@pytest.mark.slow
def test_every_layout_passes_and_every_fault_is_detected():
    record = encoder_bridge.measure()
    assert record["layouts"].keys() == SETTINGS.keys()
    assert [entry["path"] for entry in record["layouts"].values()][:4] == ["fan-in", "fan-out", "equal", "general"]
    assert all(bar["holds"] for bar in record["bars"].values())
    assert sum(entry["scales_encoder"] for entry in record["faults"].values()) == 3
    assert all(entry["passes_adam"] for entry in record["faults"].values()), "2e-4 is below 1e-3, whatever the bug"
