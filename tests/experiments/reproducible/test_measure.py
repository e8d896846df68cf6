"""Both modes are measured on the same weights and documents, and differences are counted and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.reproducible import measure as bench
from experiments.reproducible.measure import Plan
from workbench.atomic import from_json, to_json
from workbench.errors import SpecError
from workbench.records.provenance import project_root
from workbench.report import style
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.groups import LayoutSpec
from workbench.specs.reading import parse_spec, read_yaml
from workbench.train import step as flow
from workbench.train.rows import multiples

FOLDER = project_root() / "experiments/reproducible"
PLANS = {name: parse_spec(Plan, read_yaml(FOLDER / name), where=name) for name in ("reproducible.yaml", "dry_run.yaml")}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_written_rollouts_can_be_measured(plan, tmp_path):
    rank_plan = tmp_path / "plan.yaml"
    rank_plan.write_text(next((FOLDER / name).read_text() for name, other in PLANS.items() if other is plan))
    rank = bench.Rank(tmp_path, torch.device("cpu"), 1)
    for name, workload in plan.workloads.items():
        assert plan.of(name)[0] == "one_rank"
        assert set(workload.simulated) <= set(plan.of(name)) <= set(plan.layouts)
        assert workload.bars is not None or not workload.timed
        for layout in plan.of(name):
            spec = rank.spec(workload, plan.layouts[layout], "reproducible")
            assert workload.row_tokens % multiples(spec.layout, spec.reproducible).row == 0


def test_a_layout_whose_weights_are_stored_in_another_way_has_a_policy_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "plan.yaml").write_text((FOLDER / "dry_run.yaml").read_text())
    rank, loaded = bench.Rank(tmp_path, torch.device("cpu"), 1), []
    monkeypatch.setattr(bench, "load_policy", lambda _, **how: loaded.append(how["reshard_after_forward"]))
    workload = next(iter(rank.plan.workloads.values()))
    for reshard in (True, False, False, True):
        layout = LayoutSpec(shard_parameters=True, reshard_after_forward=reshard)
        rank.policy(rank.spec(workload, layout, "reproducible"), single_process_mesh())
    assert loaded == [True, False, True]


def test_every_layout_cuts_the_step_into_the_same_rows(tmp_path):
    (tmp_path / "plan.yaml").write_text((FOLDER / "reproducible.yaml").read_text())
    rank = bench.Rank(tmp_path, torch.device("cpu"), 1)
    for name, workload in rank.plan.workloads.items():
        batch = rank._draw(workload)
        cuts = set()
        for layout in rank.plan.of(name):
            for mode in bench.MODES:
                rows = flow.pack_step(batch, rank.spec(workload, rank.plan.layouts[layout], mode))
                cuts.add(tuple(sorted(int(row.lengths_N.sum()) for row in rows)))
        assert len(cuts) == 1, name
        assert len(*cuts) == workload.rows, name


@pytest.mark.parametrize(("gpus", "ranks"), [(0, {1, 2}), (1, {1}), (2, {1, 2}), (4, {1, 2, 4})])
def test_a_machine_runs_the_layouts_that_fit_its_gpus(gpus, ranks):
    plan = PLANS["reproducible.yaml"]
    entries = plan.entries(gpus)
    assert set(entries) == ranks
    assert all(
        plan.layouts[entry.split("/")[1]].world_size == count
        for count, some in entries.items()
        for entry in some
        if count > 1
    )
    assert ("float32/cp4_zigzag" in entries[1]) == (gpus < 2)
    assert "hidden_1024/cp4_zigzag" not in entries[1]
    assert ("hidden_1024/cp4_zigzag" in entries.get(4, [])) == (gpus == 4)


def steps(*prints):
    return {mode: [{"certificate": "c", "fingerprints": print_} for print_ in prints] for mode in bench.MODES}


def test_tensors_of_other_bits_are_counted_and_the_first_is_named():
    here, there = {"logprobs": "1", "weight/a": "2"}, {"logprobs": "1", "weight/a": "3"}
    results = {
        "one_rank": {"steps": steps(here, here)},
        "cp2": {"steps": steps(here, there)},
        "dead": {"left_out": "why"},
        "timed": {"timed": {}},
    }
    bench.compare_certificates(results)
    assert results["one_rank"]["same"]["fast"] == {"tensors": 4, "equal": 4, "first": None}
    assert results["cp2"]["same"]["reproducible"] == {"tensors": 4, "equal": 3, "first": "step 1: weight/a"}
    assert results["cp2"]["steps"]["fast"] == [{"certificate": "c"}, {"certificate": "c"}]
    assert "same" not in results["dead"]


def timed(step_ms, peak_gib):
    return {"step_ms": step_ms, "peak_gib": peak_gib}


def test_bars():
    plan = PLANS["reproducible.yaml"]
    same = {"tensors": 4, "equal": 4, "first": None}
    good = {
        "workloads": {
            "hidden_4096": {"one_rank": {"timed": {"fast": timed(100, 10), "reproducible": timed(130, 10.9)}}},
            "hidden_1024": {
                "one_rank": {"timed": {"fast": timed(100, 10), "reproducible": timed(170, 9)}},
                "dp2": {"timed": {"fast": timed(100, 10), "reproducible": timed(179, 10)}},
            },
            "bfloat16": {
                "one_rank": {"same": {"fast": same | {"equal": 0}, "reproducible": same}, "accuracy": {"factor": 1.05}}
            },
        }
    }
    assert all(bar["holds"] for bar in bench.bars(plan, [good]).values())
    bad = {
        "workloads": {
            "bfloat16": {
                "one_rank": {"same": {"reproducible": same | {"equal": 3}}, "accuracy": {"factor": 1.2}},
                "tp2": {"left_out": "why"},
            },
            "hidden_1024": {"dp4": {"timed": {"fast": timed(100, 10), "reproducible": timed(181, 12)}}},
        }
    }
    output = bench.bars(plan, [good, bad])
    assert {name for name, bar in output.items() if not bar["holds"]} == {
        "tensors of other bits than one rank's",
        "error of the gradient, of the fast mode's",
        "left out",
        "hidden_1024, dp4: time, of the fast mode's",
        "hidden_1024, dp4: memory, of the fast mode's",
    }
    assert not any(bar["holds"] for name, bar in bench.bars(plan, []).items() if "hidden" in name)


def test_machines_with_other_numbers_of_gpus_stay_in_the_record(tmp_path, monkeypatch):
    file = tmp_path / "reproducible.json"
    monkeypatch.setattr(bench, "RECORD", file)
    plan = PLANS["dry_run.yaml"]
    machines = [{"gpus": 1, "workloads": {"timed": "a"}}, {"gpus": 4, "workloads": {"timed": "b", "float32": "b"}}]
    file.write_bytes(to_json({"plan": plan.model_dump(mode="json"), "machines": machines}))
    assert bench._earlier(plan, 4, ["timed", "float32"]) == machines[:1]
    assert bench._earlier(plan, 4, ["timed"]) == [machines[0], {"gpus": 4, "workloads": {"float32": "b"}}]
    assert bench._earlier(plan, 2, ["timed", "float32"]) == machines
    assert bench._earlier(plan.model_copy(update={"seed": 7}), 2, []) == []


def test_some_workloads_can_be_chosen():
    plan = PLANS["reproducible.yaml"]
    some = plan.chosen(["hidden_1024"])
    assert (set(some.workloads), set(some.models)) == ({"hidden_1024"}, {"hidden_1024"})
    assert plan.chosen([]) == plan
    with pytest.raises(SpecError, match="hidden_9"):
        plan.chosen(["hidden_9"])


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("add_outer_products", "weight gradients"),
        ("nvjet_tst_128x256", "matrix products"),
        ("multiply", "matrix products"),
        ("flash_bwd<cutlass::bfloat16_t>", "attention"),
        ("normalise_back", "norms"),
        ("ncclDevKernel_AllGather", "between ranks"),
        ("void at::native::elementwise_kernel<>", "elementwise and copies"),
    ],
)
def test_kernels_are_labelled_by_purpose(kernel, group):
    assert bench.group_of(kernel) == group


def test_every_group_has_a_colour():
    assert len(bench.GROUPS) < len(style.SERIES)


def test_one_rank_measures_both_modes_on_the_same_weights(tmp_path):
    (tmp_path / "plan.yaml").write_text((FOLDER / "dry_run.yaml").read_text())
    rank = bench.Rank(tmp_path, torch.device("cpu"), 1)
    rank.prepare()
    rank.measure("float32", "one_rank")
    result = from_json((tmp_path / "float32.one_rank.json").read_text())
    for mode in bench.MODES:
        assert 0 < result["accuracy"][mode] < 1e-5
        assert [step["unlike"] for step in result["steps"][mode]] == [[], []]
    losses = [[step["loss"] for step in result["steps"][mode]] for mode in bench.MODES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][1]
    assert [step["bits"] for step in result["steps"]["reproducible"]] == [32, 32]
    assert result["steps"]["fast"][0]["certificate"] != result["steps"]["reproducible"][0]["certificate"]


@pytest.mark.slow
def test_it_runs_without_gpus(tmp_path):
    record = bench.measure(pairs=1)
    assert all(bar["holds"] for bar in record["bars"].values()), bench.format_record(record)
    same = record["machines"][0]["workloads"]["float32"]["cp2_tp2"]["same"]
    assert same["fast"]["equal"] < same["fast"]["tensors"]
    assert bench.write_page(record, Path(tmp_path)).stat().st_size > 10_000
