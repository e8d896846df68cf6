"""Single ranks of a plan take turns in one process; what they find is time and memory, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from experiments import alone
from experiments.alone import BENCHMARK, VALUES, format_record, main, measure, one_rank_of, record_file
from experiments.gpu_layouts.page import page as page_of_layouts
from experiments.reproducible.page import page as page_of_modes
from workbench.atomic import from_json
from workbench.errors import RecordError, SpecError
from workbench.sharding.collectives import (
    all_sum,
    exchange,
    gather_equal,
    scatter_sum,
    start_rotation,
    start_scatter_sum,
)
from workbench.sharding.mesh import make_mesh
from workbench.sharding.wire import overlaps

LAYOUTS = """
question: Does it run?
model: tiny-qwen3
seed: 0
old_policy: {relative: 0.1, seed: 1}
workloads:
  tiny:
    precision: float32
    rows: 1
    row_tokens: 128
    document_tokens: [24, 128]
    truth: {precision: float64, row_tokens: 128}
layouts:
  one_rank: {}
  cp2_contiguous: {cp: 2, order: contiguous}
  tp2: {tp: 2}
"""
MODES = """
question: Does it run?
seed: 0
models:
  tiny: {name: tiny-qwen3, layers: 3}
workloads:
  certified:
    model: tiny
    precision: float32
    rows: 1
    row_tokens: 128
    document_tokens: [24, 64]
    reproducible: {block_tokens: 32}
    steps: 1
  timed:
    model: tiny
    precision: float32
    rows: 1
    row_tokens: 128
    document_tokens: [24, 64]
    reproducible: {block_tokens: 32}
    timed: true
layouts:
  one_rank: {}
  cp2_zigzag: {cp: 2, order: zigzag}
"""


@pytest.fixture(autouse=True)
def _plans(tmp_path, monkeypatch):
    for name, text in (("gpu_layouts/tiny", LAYOUTS), ("reproducible/tiny", MODES)):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text)
    monkeypatch.setattr(alone, "EXPERIMENTS", tmp_path)


def test_ranks_of_layouts_are_measured_one_after_the_other(tmp_path, capsys):
    main(["gpu_layouts/tiny", "--samples", "1"])
    record = from_json((tmp_path / "gpu_layouts/tiny.alone.json").read_text())
    entries = record["entries"]
    assert list(entries) == ["tiny/one_rank", "tiny/cp2_contiguous", "tiny/tp2"]
    # the second half of a document has more query-key pairs
    assert [list(entry["alone"]) for entry in entries.values()] == [["0"], ["0", "1"], ["0"]]
    for entry in list(entries.values())[:2]:
        for measured in entry["alone"].values():
            assert set(measured) == {"fast"}
            assert len(measured["fast"]["samples_ms"]) == 1
            assert measured["fast"]["peak_gib"] > 0
    slowest = entries["tiny/cp2_contiguous"]["slowest"]["fast"]
    both = [one["fast"]["step_ms"] for one in entries["tiny/cp2_contiguous"]["alone"].values()]
    assert slowest["step_ms"] == max(both)
    whole = entries["tiny/one_rank"]["alone"]["0"]["fast"]["step_ms"]
    assert slowest["efficiency_bound"] == pytest.approx(whole / (2 * max(both)))
    assert "those of tp, pp and ep do not" in entries["tiny/tp2"]["alone"]["0"]["left_out"]
    assert entries["tiny/tp2"]["slowest"] == {}
    assert VALUES in capsys.readouterr().out
    assert not dist.is_initialized()


@pytest.mark.parametrize("costs", [(1.0, 0.0), (0.0, 1.0)])
def test_the_rank_with_most_work_is_that_of_attention_or_of_the_head(costs, tmp_path, monkeypatch):
    """A document of 128 tokens, trained from the 33rd on: more pairs and more targets in its second half."""
    (tmp_path / "plan.yaml").write_text(LAYOUTS)
    subject = alone.Layouts(tmp_path, torch.device("cpu"), 1)
    subject.prepare()
    assert alone._multiplications(str(tmp_path / "model")) == (7 * 64 * 3, 3 * 19 * 64)
    monkeypatch.setattr(alone, "_multiplications", lambda model: costs)
    assert alone._extremes(tmp_path, "tiny/cp2_contiguous", subject) == [0, 1]
    assert alone._extremes(tmp_path, "tiny/one_rank", subject) == [0]
    monkeypatch.setattr(alone, "_multiplications", lambda model: (-costs[0], -costs[1]))
    assert alone._extremes(tmp_path, "tiny/cp2_contiguous", subject) == [0]


def test_both_modes_of_timed_workloads_are_measured():
    record = measure("reproducible/tiny", ["timed/cp2_zigzag"], ranks=[1, 7], samples=1)
    (entry,) = record["entries"].values()
    (rank,) = entry["alone"]
    measured = entry["alone"][rank]
    assert (rank, list(measured)) == ("1", ["fast", "reproducible"])
    assert measured["reproducible"]["retries"] == 0
    assert entry["time"] == measured["reproducible"]["step_ms"] / measured["fast"]["step_ms"]
    assert entry["memory"] == measured["reproducible"]["peak_gib"] / measured["fast"]["peak_gib"]
    assert "certified" not in record["plan"]["workloads"]


@pytest.mark.parametrize("page", [page_of_layouts, page_of_modes])
def test_the_record_is_never_that_of_a_run(page, tmp_path):
    """Its file has another name, it says what it is, has no result that a comparison reads, and no page shows it."""
    record = measure("gpu_layouts/tiny", ["tiny/one_rank"], samples=1, minutes=0)
    assert record["benchmark"] == BENCHMARK
    assert "nothing but time and memory is" in record["values"]
    assert record["entries"]["tiny/one_rank"]["alone"] == {"0": {"left_out": "not reached"}}
    assert record["provenance"]["git"] is not None
    assert not {"workloads", "machines", "bars", "rollouts"} & set(record)
    assert record_file("gpu_layouts/tiny") == tmp_path / "gpu_layouts/tiny.alone.json"
    assert VALUES in format_record(record)
    with pytest.raises(RecordError, match=BENCHMARK):
        page(record)


def test_a_process_is_the_rank_that_it_stands_for():
    for rank in (0, 3):
        with one_rank_of(4, rank):
            mesh = make_mesh(dp=2, cp=2)
            assert mesh.coordinates == {"dp": rank // 2, "cp": rank % 2, "tp": 0}
            axis, values = mesh["dp_cp"], torch.arange(4)
            assert overlaps(axis.group)  # as NCCL's do
            assert all_sum(values, axis).tolist() == [0, 1, 2, 3]
            assert scatter_sum(values.clone(), axis) == rank
            assert start_scatter_sum(values.clone(), axis)() == rank
            assert gather_equal(values, axis).tolist() == [[0, 1, 2, 3]] * 4
            assert exchange(values, axis).tolist() == [0, 1, 2, 3]
            assert start_rotation(values, axis)().tolist() == [0, 1, 2, 3]
    with one_rank_of(1, 0):
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("plan", "entries", "words"),
    [
        ("gpu_layouts/none", [], "no such plan"),
        ("head/tiny", [], "no such plan"),
        ("gpu_layouts/tiny", ["tiny/dp9"], "no entry of that name"),
    ],
)
def test_what_is_not_there_is_refused(plan, entries, words):
    with pytest.raises(SpecError, match=words):
        measure(plan, entries)


def test_a_rank_of_a_job_is_refused():
    with one_rank_of(2, 0), pytest.raises(SpecError, match="joined a job"):
        measure("gpu_layouts/tiny")
