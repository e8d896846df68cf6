"""Plans for several GPUs, and their records: every layout was measured, and is as near to the truth as one rank."""

from __future__ import annotations

import pytest

from experiments.gpu_layouts.measure import Plan
from experiments.gpu_layouts.plans import FOLDER, PLANS
from workbench.atomic import from_json
from workbench.specs.reading import parse_spec, read_yaml


@pytest.mark.parametrize("name", PLANS)
def test_layouts_are_those_of_so_many_gpus(name):
    plan = parse_spec(Plan, read_yaml(FOLDER / f"{name}.yaml"), where=name)
    assert {layout: spec.world_size for layout, spec in plan.layouts.items()} == {
        layout: 1 if layout == "one_rank" else PLANS[name] for layout in plan.layouts
    }
    assert set(plan.micro_batches) <= set(plan.layouts)


@pytest.mark.parametrize("name", PLANS)
def test_every_layout_was_measured_and_is_as_near_to_the_truth_as_one_rank(name):
    record = from_json((FOLDER / f"{name}.json").read_text())
    plan = parse_spec(Plan, record["plan"], where=name)
    for workload, measured in record["workloads"].items():
        assert list(measured) == list(plan.of(workload))
        assert all(entry["parity"]["within"] for entry in measured.values())
