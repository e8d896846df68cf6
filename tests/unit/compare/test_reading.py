"""Records that were damaged after they were written are named, and never judged."""

import json
import math

import pytest
import torch

from tests.unit.compare.test_soundness import of, record
from workbench.compare.align import Subject, compare_runs
from workbench.compare.reading import RunReader
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


def damaged(tmp_path, change):
    """The verdict on three runs of which one was changed after it was written: the change stops no other verdict."""
    runs = {name: record(tmp_path, name, [of(), of()]) for name in ("base", "run", "whole")}
    change(runs["run"])
    subjects = [Subject(name, run, "" if name == "base" else "base", "") for name, run in runs.items()]
    found = compare_runs(subjects, experiment="demo", question="?")
    assert found["whole"].verdict == "equal"
    return found["run"]


def test_one_flipped_bit_of_an_exponent_is_named(tmp_path):
    def flip(run):
        tensors = run.read_tensors("step0001.gradients")
        tensors["w"].view(torch.int64)[7] ^= 1 << 53
        run.write_tensors("step0001.gradients", tensors)

    found = damaged(tmp_path, flip)
    assert (found.verdict, "step0001.gradients" in found.why, "w" in found.why) == ("failed", True, True)


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_file_with_other_parameters_than_its_record_is_named(tmp_path, change):
    def replace(run):
        tensors = {"w": run.read_tensors("step0001.gradients")["w"], "extra": torch.ones(2, dtype=torch.float64)}
        run.write_tensors("step0001.gradients", tensors if change == "more" else {"extra": tensors["extra"]})

    found = damaged(tmp_path, replace)
    assert found.verdict == "failed"
    assert "extra" in found.why


@pytest.mark.parametrize("keep", [0, 1])
def test_a_record_that_was_cut_is_named(tmp_path, keep):
    def cut(run):
        path = run.path / "metrics.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))

    found = damaged(tmp_path, cut)
    assert found.verdict == "failed"
    assert "metrics.jsonl" in found.why
    assert f"{keep} whole records" in found.why


def test_ratios_that_are_not_finite_are_left_out_of_the_histogram(tmp_path):
    run = record(tmp_path, "run", [of()])
    run.write_tensors(
        "step0000.tokens",
        {
            "policy_logprobs": torch.tensor([-1.0, math.nan, -math.inf, -2.0]),
            "old_logprobs": torch.full((4,), -1.0),
            "trained": torch.ones(4, dtype=torch.bool),
            "targets": torch.arange(4),
            "clipped": torch.zeros(4, dtype=torch.bool),
            "would_clip": torch.zeros(4, dtype=torch.bool),
        },
    )
    histogram = compare_runs([Subject("run", run)], experiment="demo", question="?")["run"].ratios["0"]
    assert sum(histogram["counts"]) == 3, "the ratio that is no number has no place in it"
    assert all(map(math.isfinite, histogram["edges"]))


def test_edges_of_a_histogram_are_numbers_however_far_a_policy_moved(tmp_path):
    run = record(tmp_path, "run", [of()])
    run.write_tensors(
        "step0000.tokens",
        {
            "policy_logprobs": torch.tensor([-5000.0, -1.0]),
            "old_logprobs": torch.tensor([-1.0, -9000.0]),
            "trained": torch.ones(2, dtype=torch.bool),
            "targets": torch.arange(2),
            "clipped": torch.zeros(2, dtype=torch.bool),
            "would_clip": torch.zeros(2, dtype=torch.bool),
        },
    )
    histogram = compare_runs([Subject("run", run)], experiment="demo", question="?")["run"].ratios["0"]
    assert all(math.isfinite(edge) and edge > 0 for edge in histogram["edges"])
    assert (histogram["counts"][0], histogram["counts"][-1]) == (1, 1)


def test_steps_are_read_once(tmp_path):
    run = record(tmp_path, "run", [of(), of()])
    reader = RunReader(run)
    assert [reader.loss(0), reader.loss(1)] == [0.5, 0.5]
    (run.path / "metrics.jsonl").unlink()
    assert reader.norm(1) == pytest.approx(float(of()["w"].norm()))


def test_a_gradient_that_was_not_recorded_says_what_to_record(tmp_path):
    run = RunDirectory.create(tmp_path, "run", RunSpec(precision="float64", record={"gradients": "norms"}))
    run.append_step({"step": 0, "loss/total/sum": 0.5, "gradient/norm/global": 1.0})
    with pytest.raises(RecordError, match="gradients: full"):
        RunReader(run).gradients(0)


def test_counts_are_json(tmp_path):
    counts = {
        "evidence/trained_tokens/sum": 10.0,
        "evidence/gradient_tokens/sum": 10.0,
        "evidence/documents/sum": 5.0,
        "evidence/gradient_documents/sum": 5.0,
    }
    reader = RunReader(record(tmp_path, "run", [of()], counts=counts))
    assert json.loads(json.dumps(reader.evidence.as_json()))["policy_token_share"] is None
