"""A record survives its folder, and a run directory becomes one."""

import math

import pytest
import torch

from tests.helpers.hand_records import make_record, norms_alone
from workbench.diagnose import diagnose
from workbench.diagnose.record import Record, RecordedStep, whole
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.rollouts.files import load
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here


def test_a_folder_round_trips(tmp_path):
    record = make_record()
    record.save(tmp_path / "mine")
    back = Record.of(tmp_path / "mine")
    assert (back.name, back.context, len(back.steps)) == ("made", record.context, 1)
    saved, read = record.steps[0], back.steps[0]
    assert (read.loss, read.metrics, read.gradient_norms) == (saved.loss, saved.metrics, saved.gradient_norms)
    assert read.counts == saved.counts
    for kind in ("gradients", "tokens"):
        here, there = getattr(saved, kind), whole(getattr(read, kind))
        assert all(torch.equal(there[name], values) for name, values in here.items())
        assert there.keys() == here.keys()
    assert len(read.gradients) == len(saved.gradients)
    assert float(read.gradients["model.norm.weight"].norm()) == saved.gradient_norms["model.norm.weight"]


def test_missing_parts_stay_missing(tmp_path):
    bare = Record({}, (RecordedStep(3, loss=math.nan),), "bare")
    bare.save(tmp_path / "bare")
    back = Record.load(tmp_path / "bare")
    assert math.isnan(back.steps[0].loss)
    assert (back.steps[0].number, back.parts) == (3, ("loss",))
    assert norms_alone(make_record()).parts == ("loss", "gradient_norms", "counts")


def test_nothing_is_replaced_and_nothing_is_guessed(tmp_path):
    record = make_record()
    record.save(tmp_path / "mine")
    with pytest.raises(RecordError, match="never replaced"):
        record.save(tmp_path / "mine")
    with pytest.raises(RecordError, match=r"neither record\.json nor config\.json"):
        Record.of(tmp_path)


def test_a_run_directory_is_a_record(tmp_path):
    spec = RunSpec.model_validate(
        {
            "data": {"documents_per_step": 6, "micro_batches": 2},
            "layout": {"cp": 2, "order": "zigzag"},
            "loss": {"name": "grpo"},
            "precision": "float64",
            "steps": 2,
        }
    )
    run = RunDirectory.create(tmp_path, "cp2", spec)
    run_here(run, project_root())
    record = Record.of(run)
    assert record.context["cp"] == 2
    assert record.context["temperature"] == 1.0
    assert "faults" not in record.context
    lengths = load(project_root() / spec.data.path).lengths_N
    assert [step.counts["all_tokens"] for step in record.steps] == [int(lengths[:6].sum()), int(lengths[6:12].sum())]
    assert all(step.counts["padded_tokens"] % 4 == 0 for step in record.steps), "zigzag over two ranks"
    assert record.steps[0].counts["padded_tokens"] >= record.steps[0].counts["all_tokens"]
    for step in record.steps:
        tokens, trained = whole(step.tokens), whole(step.tokens)["trained"]
        assert int(trained.sum()) == step.counts["trained_tokens"] > 0
        assert sorted(set(tokens["rows"][trained].tolist())) == [0, 1]
        assert sorted(set(tokens["shards"][trained].tolist())) == [0, 1]
        mean = float(tokens["losses"][trained].sum()) / step.counts["trained_tokens"]
        terms = step.metrics["loss/policy/sum"] + step.metrics.get("loss/kl/sum", 0.0)
        assert spec.loss.denominator in ("document", "token")
        if spec.loss.denominator == "token":
            assert mean == pytest.approx(step.loss, rel=1e-9)
        assert terms == pytest.approx(step.loss, rel=1e-9)
        assert step.gradients["model.norm.weight"].norm() == pytest.approx(step.gradient_norms["model.norm.weight"])
    numbers = [set(whole(step.tokens)["documents"][whole(step.tokens)["trained"]].tolist()) for step in record.steps]
    assert numbers == [set(range(6)), set(range(6, 12))]


def test_a_run_without_steps_is_refused(tmp_path):
    run = RunDirectory.create(tmp_path, "waiting", RunSpec())
    with pytest.raises(RecordError, match="no step; the run is pending"):
        Record.of(run.path)


def test_describes_its_contents():
    assert repr(norms_alone(make_record({"tp": 1}))) == (
        "Record(made: 1 step; dp=3, cp=2, micro_batches=5, precision=float64; loss, gradient_norms, counts)"
    )


ONLINE = {
    "model": {"source": "tiny-qwen3"},
    "precision": "float64",
    "steps": 3,
    "device": "cpu",
    "data": {"documents_per_step": 4, "advantages": {"name": "grpo"}, "micro_batches": 2},
    "online": {"task": "arithmetic", "prompts": 3, "answers": 2, "max_new_tokens": 6, "updates": 2, "temperature": 0.7},
}


def test_an_online_run_is_a_record_of_its_samples(tmp_path):
    run = RunDirectory.create(tmp_path, "online", RunSpec.model_validate(ONLINE))
    run_here(run, project_root())
    record = Record.of(run)
    assert record.context["temperature"] == 0.7
    sampled = [load(run.path / "rollouts" / f"step{number:04d}") for number in (0, 0, 2)]
    for step, batch, chosen in zip(record.steps, sampled, ([0, 1, 2, 3], [4, 5, 0, 1], [0, 1, 2, 3]), strict=True):
        assert step.counts["trained_tokens"] == batch.select(chosen).num_trained_tokens
        assert torch.equal(step.tokens["documents"], batch.document_ids_T)
        assert set(batch.document_ids_T[step.tokens["rows"] >= 0].tolist()) == set(chosen)


def test_an_online_run_without_saved_samples_has_no_counts(tmp_path):
    run = RunDirectory.create(tmp_path, "online", RunSpec.model_validate(ONLINE | {"record": {"tokens": False}}))
    run_here(run, project_root())
    record = Record.of(run)
    assert [step.counts for step in record.steps] == [{}, {}, {}]
    assert record.parts == ("loss", "metrics", "gradient_norms", "gradients")


def test_a_fault_of_an_online_run_is_diagnosed(tmp_path):
    results = []
    for name, changes in (("right", {}), ("wrong", {"faults": ["missing_cp_factor"]})):
        spec = RunSpec.model_validate(ONLINE | {"steps": 1, "layout": {"cp": 2, "order": "zigzag"}} | changes)
        results.append(RunDirectory.create(tmp_path, name, spec))
        run_here(results[-1], project_root())
    assert str(diagnose(*results).causes[0].name) == "over_cp"


def test_sizes_have_other_names_in_other_trainers(tmp_path):
    for number, (given, sizes) in enumerate(
        [
            ({"world_size": 4, "sp_size": 2}, {"dp": 4, "cp": 2}),
            ({"gradient_accumulation_steps": 8, "dp": 2, "dp_size": 3}, {"micro_batches": 8, "dp": 2}),
            ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"tp": 2}),
        ]
    ):
        saved = Record(given, (RecordedStep(0, loss=0.5),), "mine").save(tmp_path / str(number))
        context = Record.load(saved).context
        assert {axis: context[axis] for axis in ("dp", "cp", "tp", "micro_batches") if axis in context} == sizes
