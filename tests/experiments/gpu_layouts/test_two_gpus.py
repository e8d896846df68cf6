"""The plan for two GPUs, and its record: every layout was measured, and is as near to the truth as one rank."""

from __future__ import annotations

from experiments.gpu_layouts.measure import Plan
from experiments.gpu_layouts.two_gpus import PLAN, RECORD
from workbench.atomic import from_json
from workbench.specs.reading import parse_spec, read_yaml


def test_layouts_are_those_of_two_gpus():
    plan = parse_spec(Plan, read_yaml(RECORD.with_name(PLAN)), where=PLAN)
    assert {name: layout.world_size for name, layout in plan.layouts.items()} == {
        name: 1 if name == "one_rank" else 2 for name in plan.layouts
    }
    assert {"dp", "cp", "tp", "pp"} <= {name[:2] for name in plan.layouts}


def test_every_layout_was_measured_and_is_as_near_to_the_truth_as_one_rank():
    record = from_json(RECORD.read_text())
    measured = record["workloads"]["bfloat16_32k"]
    assert list(measured) == list(record["plan"]["layouts"])
    assert all(entry["parity"]["within"] for entry in measured.values())
