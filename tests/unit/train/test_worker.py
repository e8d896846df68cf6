"""One rank, in this process, on the shipped rollout dataset; tests/unit/launch and tests/parity have real ranks."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.same_bits import differing
from workbench.errors import LaunchError, RecordError, SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[3]
LOSS = {"surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.05}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four steps of the default ablation's settings in float32."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "one", RunSpec(steps=4, loss=LOSS))
    run_here(run, PROJECT)
    return run


def test_the_policy_starts_as_the_one_that_sampled_the_rollouts(finished):
    tokens = finished.read_tensors("step0000.tokens")
    ratio = (tokens["policy_logprobs"] - tokens["old_logprobs"])[tokens["trained"]].double().exp()
    assert (ratio - 1).abs().max() < 1e-5
    assert finished.steps()[0]["clip/policy/fraction"] == 0.0


def test_later_steps_move_and_clip_as_real_training_does(finished):
    for record in finished.steps()[1:]:
        assert record["ratio/policy_old/std"] > 0.01
        assert 0.01 < record["clip/policy/fraction"] < 0.5
        assert record["advantage/all/min"] < 0 < record["advantage/all/max"]


def test_no_parameter_is_without_gradient(finished):
    for record in finished.steps():
        assert len(record["gradient_norms"]) == 35
        assert min(record["gradient_norms"].values()) > 0


def test_the_record_is_whole(finished):
    assert finished.status == "succeeded"
    assert [record["step"] for record in finished.steps()] == [0, 1, 2, 3]
    record = finished.steps()[3]
    assert record["loss/total/sum"] == pytest.approx(record["loss/policy/sum"] + record["loss/kl/sum"], rel=1e-6)
    assert record["tokens/trained/sum"] == 861
    assert record["documents/trained/sum"] == 72
    gradients = finished.read_tensors("step0003.gradients")
    norm = torch.cat([g.double().flatten() for g in gradients.values()]).norm()
    assert record["gradient/norm/global"] == pytest.approx(float(norm), rel=1e-6)
    assert finished.exits()[0]["ok"]
    assert finished.failure() is None


def small(root, **settings):
    return RunDirectory.create(root, "small", RunSpec.model_validate({"model": {"source": "tiny-qwen3"}} | settings))


def test_a_reproducible_run_is_the_same_bits_on_several_ranks(tmp_path):
    """As it is recorded: every number but those of time and memory, and every tensor."""
    mode, records = {"block_tokens": 16, "weight_chunks": 1}, []
    for number, layout in enumerate(({}, {"dp": 2, "cp": 2, "order": "zigzag"})):
        data = {"documents_per_step": 24, "micro_batches": 2 // layout.get("dp", 1)}
        run = small(tmp_path / str(number), steps=2, data=data, layout=layout, reproducible=mode)
        run_here(run, PROJECT)
        lines = [
            {key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))}
            for line in run.steps()
        ]
        records.append((lines, [run.read_tensors(f"step0001.{name}") for name in ("gradients", "tokens")]))
        assert json.loads((run.path / "provenance.json").read_text())["reproducible_kernels"] == "plain"
    (lines, tensors), (others, theirs) = records
    assert others == lines
    assert lines[0]["reproducible/bits"] == 32
    assert lines[0]["reproducible/scale"] > 100
    for mine, result in zip(tensors, theirs, strict=True):
        assert differing(result, mine) == []


def test_documents_of_a_step_are_taken_in_order_and_around(tmp_path):
    run = small(tmp_path, steps=3, data={"documents_per_step": 30})
    run_here(run, PROJECT)
    counts = [int(run.read_tensors(f"step{s:04d}.tokens")["trained"].sum()) for s in range(3)]
    assert counts == [int(record["tokens/trained/sum"]) for record in run.steps()]
    first, second, third = (run.read_tensors(f"step{s:04d}.tokens")["trained"] for s in range(3))
    assert not (first & second).any()
    assert (third & first).any(), "30 + 30 + 30 of 72 documents wraps around"


def test_micro_batches_are_taken_until_the_step_has_its_documents(tmp_path):
    """However many a step takes, it has the same documents and the same loss."""
    records = {}
    for tokens in (None, 64, 400):
        run = small(
            tmp_path / str(tokens),
            steps=2,
            precision="float64",
            optimizer={"name": "sgd"},
            data={"documents_per_step": 30, "micro_batch_tokens": tokens},
        )
        run_here(run, PROJECT)
        records[tokens] = run.steps()
    for step in range(2):
        whole = records[None][step]
        assert whole["documents/trained/sum"] == 30
        for cut in (records[64][step], records[400][step]):
            assert cut["documents/trained/sum"] == 30
            assert cut["tokens/trained/sum"] == whole["tokens/trained/sum"]
            assert cut["loss/total/sum"] == pytest.approx(whole["loss/total/sum"], rel=1e-9)
            assert cut["gradient/norm/global"] == pytest.approx(whole["gradient/norm/global"], rel=1e-9)


def test_a_document_longer_than_a_micro_batch_is_refused(tmp_path):
    run = small(tmp_path, data={"micro_batch_tokens": 16})
    with pytest.raises(SpecError, match="micro-batches of 16 tokens"):
        run_here(run, PROJECT)


def test_less_is_recorded_on_request(tmp_path):
    run = small(tmp_path, record={"gradients": "norms", "tokens": False})
    run_here(run, PROJECT)
    assert not run.has_tensors("step0000.gradients")
    assert not run.has_tensors("step0000.tokens")
    assert len(run.steps()[0]["gradient_norms"]) == 35


def test_clip_decisions_of_another_configuration_are_taken_over(tmp_path, finished):
    spec = RunSpec(steps=4, precision="float64", loss=LOSS, frozen_clip="one")
    run = RunDirectory.create(finished.path.parent, "frozen", spec)
    run_here(run, PROJECT)
    for step in range(4):
        mine, theirs = (r.read_tensors(f"step{step:04d}.tokens") for r in (run, finished))
        assert torch.equal(mine["clipped"], theirs["clipped"])
        assert mine["would_clip"].dtype == torch.bool


def test_clip_decisions_that_are_not_there_are_refused(tmp_path):
    run = small(tmp_path, frozen_clip="nobody")
    with pytest.raises(RecordError, match="no such run"):
        run_here(run, PROJECT)


def test_a_failure_is_written_with_rank_coordinates_and_traceback(tmp_path):
    run = small(tmp_path, faults=["no_such_bug"])
    with pytest.raises(SpecError, match="no_such_bug"):
        run_here(run, PROJECT)
    assert run.status == "failed"
    failure = run.failure()
    assert (failure["rank"], failure["exception"]) == (0, "SpecError")
    assert failure["coordinates"] == {"dp": 0, "cp": 0, "tp": 0}
    assert "load_fault" in failure["traceback"]


def test_several_ranks_are_simulated_here_and_the_first_one_writes(tmp_path):
    one = small(tmp_path / "one", precision="float64", data={"documents_per_step": 6})
    several = small(
        tmp_path / "several", precision="float64", layout={"cp": 2, "tp": 2}, data={"documents_per_step": 6}
    )
    for run in (one, several):
        run_here(run, PROJECT)
    assert list(several.exits()) == [0, 1, 2, 3]
    assert several.status == "succeeded"
    assert len(several.steps()) == 1
    assert several.steps()[0]["loss/total/sum"] == pytest.approx(one.steps()[0]["loss/total/sum"], rel=1e-12)
    gradients = several.read_tensors("step0000.gradients")
    for name, gradient in one.read_tensors("step0000.gradients").items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


def test_a_simulated_rank_that_fails_is_the_failure_of_the_run(tmp_path):
    run = small(tmp_path / "bug", layout={"cp": 2}, faults=["no_such_bug"])
    with pytest.raises(SpecError, match="no_such_bug"):
        run_here(run, PROJECT)
    assert (run.status, run.failure()["exception"]) == ("failed", "SpecError")
    run = small(
        tmp_path / "skipped", layout={"cp": 2}, faults=["skipped_collective"], steps=2, data={"documents_per_step": 6}
    )
    with pytest.raises(LaunchError, match="simulated ranks"):
        run_here(run, PROJECT)
    assert (run.status, run.failure()["exception"]) == ("failed", "LaunchError")
    assert len(run.steps()) == 1, "the first step was recorded"


def test_which_run_gives_the_clip_decisions_is_never_guessed(tmp_path):
    for seed in (0, 1):
        run_here(small(tmp_path, seed=seed), PROJECT)
    spec = RunSpec(model={"source": "tiny-qwen3"}, frozen_clip="small")
    with pytest.raises(RecordError, match="one finished run of that configuration"):
        run_here(RunDirectory.create(tmp_path, "after", spec), PROJECT)
    run = RunDirectory.create(tmp_path, "after", spec)
    run.note(frozen_clip_run=RunDirectory.find(tmp_path, "small")[0].path.name)
    run_here(run, PROJECT)
    assert run.status == "succeeded"


def test_a_job_around_this_process_does_not_matter_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    run = small(tmp_path)
    run_here(run, PROJECT)
    assert run.status == "succeeded"
    assert list(run.exits()) == [0]


def run_here_inside_a_job(root):
    import torch.distributed as dist

    run = small(Path(root) / str(dist.get_rank()))
    run_here(run, PROJECT)
    return run.status, dist.is_initialized()


def test_a_job_that_this_process_has_joined_is_neither_used_nor_left(tmp_path):
    assert run_ranks(run_here_inside_a_job, 2, tmp_path / "ranks", str(tmp_path)) == [("succeeded", True)] * 2


def test_rollouts_of_another_vocabulary_are_refused(tmp_path):
    tiny_qwen3(11).save_pretrained(tmp_path / "small_vocabulary")
    run = small(tmp_path / "runs", model={"source": str(tmp_path / "small_vocabulary")})
    with pytest.raises(SpecError, match="a vocabulary of 11"):
        run_here(run, PROJECT)


def test_a_step_takes_no_document_twice(tmp_path):
    run = small(tmp_path, data={"documents_per_step": 73})
    with pytest.raises(SpecError, match="found: 72 documents"):
        run_here(run, PROJECT)


def test_advantages_that_were_not_recorded_are_not_taken_for_recorded_ones(tmp_path):
    documents = [{"tokens": [3, 4], "loss_mask": [0, 1], "advantages": 0.0, "old_logprobs": [0, -3.0], "group_id": 0}]
    batch = RolloutBatch.from_documents([each | {"reward": reward} for each in documents for reward in (0, 1)])
    data = {"path": str(batch.save(tmp_path / "mine"))}
    with pytest.raises(SpecError, match=r"no recorded advantages(?s:.)*set data\.advantages"):
        run_here(small(tmp_path / "recorded", data=data), PROJECT)
    run_here(run := small(tmp_path / "computed", data=data | {"advantages": {"name": "grpo"}}), PROJECT)
    assert run.status == "succeeded"
