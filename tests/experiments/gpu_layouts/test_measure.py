"""Layouts are timed on the same documents and compared with one ground truth; a dead layout stops no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.entries import result_of
from experiments.gpu_layouts import measure as layouts
from experiments.gpu_layouts.measure import OldPolicy, Plan, draw_rollouts, perturb, perturbed
from workbench.atomic import from_json
from workbench.policy.decoder import tiny_qwen3
from workbench.records.provenance import project_root
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.groups import LayoutSpec
from workbench.specs.reading import parse_spec, read_yaml
from workbench.specs.run import RunSpec
from workbench.train import step as flow

PLANS = [
    parse_spec(Plan, read_yaml(project_root() / "experiments/gpu_layouts" / name), where=name)
    for name in ("layouts.yaml", "dry_run.yaml")
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.model)
def test_written_rollouts_can_be_measured(plan):
    for name, workload in plan.workloads.items():
        assert plan.of(name)[0] == "one_rank"
        assert set(plan.of(name)) <= set(plan.layouts)
        assert workload.truth.row_tokens >= workload.document_tokens[1]
    everything = {entry for ranks in (1, 2, 4) for entry in plan.entries(ranks)}
    assert everything == {f"{name}/{layout}" for name in plan.workloads for layout in plan.of(name)}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.model)
def test_every_layout_cuts_the_step_into_the_same_rows(plan):
    for name, workload in plan.workloads.items():
        batch = draw_rollouts(workload, plan)
        assert batch.num_tokens > 0.85 * workload.rows * workload.row_tokens
        assert int(batch.lengths_N.max()) <= workload.document_tokens[1]
        cuts = set()
        for layout in plan.of(name):
            spec = RunSpec(layout=plan.layouts[layout].model_dump(), data={"micro_batch_tokens": workload.row_tokens})
            rows = flow.pack_step(batch, spec)
            assert len(rows) == workload.rows
            cuts.add(tuple(sorted(int(row.lengths_N.sum()) for row in rows)))
        assert len(cuts) == 1


def test_the_old_policy_is_a_stated_copy():
    plain, moved, again = tiny_qwen3(19), tiny_qwen3(19), tiny_qwen3(19)
    perturb(moved, OldPolicy(relative=0.1, seed=1))
    perturb(again, OldPolicy(relative=0.1, seed=1))
    for (name, p), q, r in zip(plain.named_parameters(), moved.parameters(), again.parameters(), strict=True):
        assert torch.equal(q, r), name
        spread = p.detach().std()
        if spread:
            assert float((q - p).detach().std() / spread) == pytest.approx(0.1, rel=0.15), name


def test_weights_are_restored_after_the_old_policy():
    model, plain = tiny_qwen3(19), tiny_qwen3(19)
    with perturbed(model, OldPolicy(relative=0.1, seed=1)):
        assert not torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def result(step_ms, ranks, distances):
    norms = {"a": 3.0, "b": 4.0}
    return {
        "step_ms": step_ms,
        "ranks": ranks,
        "parity": {
            "distance": sum(d * d for d in distances.values()) ** 0.5,
            "norm": 5.0,
            "of_parameters": distances,
            "norms": norms,
        },
    }


def test_a_layout_is_judged_by_one_ranks_own_distance():
    results = {
        "one_rank": result(8.0, 1, {"a": 0.03, "b": 0.0}),
        "near": result(4.0, 2, {"a": 0.04, "b": 0.01}),
        "far": result(4.0, 4, {"a": 0.03, "b": 0.05}),
        "dead": {"left_out": "why"},
    }
    layouts._judge(results)
    assert results["near"]["efficiency"] == 1.0
    assert results["far"]["efficiency"] == 0.5
    near, far = results["near"]["parity"], results["far"]["parity"]
    assert near["distance_in_one_ranks"] == pytest.approx(17**0.5 / 3)
    assert (near["worst_parameter"], near["worst_in_one_ranks"]) == ("a", pytest.approx(4 / 3))
    # b: one rank was right by chance, and counts with its relative distance of the whole, 0.03 / 5 of 4
    assert (far["worst_parameter"], far["worst_in_one_ranks"]) == ("b", pytest.approx(0.05 / 0.024))
    assert (near["within"], far["within"]) == (True, False)
    assert "of_parameters" not in near
    bars = layouts._bars({"w": results})
    assert bars["parity: worst layout in its budget"]["holds"] is False
    assert bars["layouts left out"] == {"bar": 0.0, "median": 1.0, "holds": False}


def test_without_the_one_rank_baseline_nothing_is_compared():
    results = {"one_rank": {"left_out": "not reached"}, "near": result(4.0, 2, {"a": 0.04, "b": 0.01})}
    layouts._judge(results)
    assert results["near"] == {"left_out": "no baseline; one_rank: not reached"}
    bars = layouts._bars({"w": results})
    assert bars["layouts left out"]["holds"] is False


def test_one_rank_prepares_measures_and_agrees_with_itself(tmp_path):
    source = project_root() / "experiments/gpu_layouts/dry_run.yaml"
    (tmp_path / "plan.yaml").write_text(source.read_text())
    rank = layouts.Rank(tmp_path, torch.device("cpu"), 1)
    rank.prepare()
    text = from_json((tmp_path / "float32_tiny.json").read_text())
    assert 0.02 < text["clipped"] < 0.5
    assert 0.05 < text["old_policy_apart_nats"] < 0.5
    rank.measure("float32_tiny", "one_rank")
    result = result_of(tmp_path, "float32_tiny/one_rank")
    assert result["ranks"] == 1
    assert len(result["samples_ms"]) == 1
    assert result["attention_max_over_mean"] == 1
    assert 0 < result["parity"]["distance"] < 1e-5 * result["parity"]["norm"]
    assert result["parity"]["loss"] == pytest.approx(text["loss"], rel=1e-5)


def test_a_refused_layout_states_the_reason(tmp_path):
    (tmp_path / "plan.yaml").write_text((project_root() / "experiments/gpu_layouts/dry_run.yaml").read_text())
    rank = layouts.Rank(tmp_path, torch.device("cpu"), 1)
    layouts.save_model(rank.plan, tmp_path / "model")
    kernel = rank.plan.layouts["one_rank"].model_copy(update={"kernel": "flash"})
    rank.plan = rank.plan.model_copy(update={"layouts": {"one_rank": kernel}})
    workload = rank.plan.workloads["float32_tiny"]
    batch = draw_rollouts(workload, rank.plan)
    layouts.save(replace(batch, old_logprobs_T=batch.old_logprobs_T - 1), tmp_path / "float32_tiny")
    layouts.save_file(
        {"clipped": torch.zeros(batch.num_tokens, dtype=torch.bool)}, tmp_path / "float32_tiny.tokens.safetensors"
    )
    rank.measure("float32_tiny", "one_rank")
    assert "flash" in result_of(tmp_path, "float32_tiny/one_rank")["left_out"]


def test_a_layout_whose_weights_are_stored_in_another_way_has_a_policy_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "plan.yaml").write_text((project_root() / "experiments/gpu_layouts/dry_run.yaml").read_text())
    rank, loaded = layouts.Rank(tmp_path, torch.device("cpu"), 1), []
    monkeypatch.setattr(layouts, "load_policy", lambda _, **how: loaded.append(how["reshard_after_forward"]))
    monkeypatch.setattr(layouts, "build_optimizer", lambda policy, spec: None)
    for reshard in (True, False, False, True):
        layout = LayoutSpec(shard_parameters=True, reshard_after_forward=reshard)
        rank.policy(rank.spec(rank.plan.workloads["float32_tiny"], layout), single_process_mesh())
    assert loaded == [True, False, True]


@pytest.mark.slow
def test_it_runs_without_gpus(tmp_path):
    record = layouts.measure(pairs=1)
    assert record["bars"]["layouts left out"]["holds"], layouts.format_record(record)
    assert record["bars"]["parity: worst layout in its budget"]["holds"], layouts.format_record(record)
    assert layouts.write_page(record, Path(tmp_path)).stat().st_size > 10_000
