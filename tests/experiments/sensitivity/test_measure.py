"""The benchmark of sensitivity: its record, its gates, and what they reject."""

import pytest
import yaml

from experiments.sensitivity import measure as module
from experiments.sensitivity.gates import GATES
from workbench.records.provenance import project_root
from workbench.sensitivity.distances import Apart, Change, Distances

SAME = Apart(0.0, 0.0, 0.0, 1.0, 1.0)


def apart(loss=(1.0, 1.0), norm=(1.0, 1.0)):
    return Distances((Change(*loss),) * 2, (Change(*norm),) * 2, (SAME,) * 2, SAME)


def rejecting(**numbers):
    return [gate.name.partition(",")[0] for gate in GATES if not gate.accepts(apart(**numbers))]


@pytest.mark.parametrize(
    ("numbers", "names"),
    [
        ({}, []),
        ({"norm": (1.0, 1.000_01)}, []),
        ({"norm": (1.0, 1.000_1)}, ["NeMo-RL"]),
        ({"norm": (1.0, 1.02)}, ["slime", "NeMo-RL"]),
        ({"norm": (1.0, 1.04)}, ["miles", "slime", "verl", "NeMo-RL"]),
        ({"norm": (0.02, 0.04)}, ["slime", "verl", "NeMo-RL"]),  # miles: isclose, so 0.03 is enough alone
        ({"loss": (1.0, 1.000_01)}, ["torchtitan"]),
        ({"loss": (1.0, 1.001)}, ["NeMo-RL", "torchtitan"]),
        ({"loss": (1.0, 1.004)}, ["NeMo-RL", "Automodel", "torchtitan"]),
        ({"loss": (1.0, 1.03)}, ["verl", "NeMo-RL", "Automodel", "torchtitan"]),
    ],
)
def test_each_gate_rejects_what_its_source_rejects(numbers, names):
    assert rejecting(**numbers) == names


def test_every_gate_names_its_source_at_a_commit():
    assert len(GATES) >= 5
    for gate in GATES:
        repository, commit = gate.source.split(", ")[0].split(" ")
        assert "/" in repository
        assert len(commit) == 8
        assert int(commit, 16)
        assert ".py" in gate.source


STEPS = 1
LAYOUTS = {"one_rank": {}, "cp2": {"layout": {"cp": 2, "order": "zigzag"}}}
"""One pair of layouts and one step, in which one of the two faults shows; the benchmark measures the whole."""


def test_the_record_has_both_precisions_the_gates_and_bars(tmp_path, monkeypatch):
    whole = yaml.safe_load((project_root() / module.ABLATION).read_text())
    less = {"base": whole["base"] | {"steps": STEPS}, "configurations": LAYOUTS, "extra": {}}
    (tmp_path / "ablation.yaml").write_text(yaml.safe_dump(whole | less))
    monkeypatch.setattr(module, "ABLATION", tmp_path / "ablation.yaml")
    lines = []
    record = module.measure(faults=["missing_cp_factor", "tool_mask_ignored"], report_progress=lines.append)
    for precision in ("float64", "float32"):
        own = record[precision]
        assert (own["killed"], own["admissible"], own["disagreements"]) == (1, 2, [])
    assert all(bar["holds"] for bar in record["bars"].values())
    rates = {gate["name"]: gate["float64"]["killed"] for gate in record["gates"]}
    assert rates["miles, CI of parallel layouts"] == 1
    assert rates["verl, SFT engines"] == 1
    assert record["gates"][0]["bounds"] == {"gradient_norm": "0.03 relative or 0.03"}
    assert record["gates"][-1]["bounds"] == {"loss": "equal"}
    text = module.format_record(record)
    assert "float32: the comparison rejects 1 of 2 faults" in text
    assert any("missing_cp_factor in cp2" in line for line in lines)
