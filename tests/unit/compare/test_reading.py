"""Records that were damaged after they were written are named, and never judged."""

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench import atomic
from workbench.cli.experiment import print_verdicts
from workbench.compare import reading
from workbench.compare.align import Subject, compare_runs
from workbench.compare.comparison import Comparison
from workbench.compare.reading import RunReader
from workbench.errors import RecordError, VerdictError
from workbench.metrics.evidence import Evidence
from workbench.records import directory
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import save
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here


def damaged(tmp_path, change):
    """The verdict on three runs of which one was changed after it was written: the change stops no other verdict."""
    runs = {name: record(tmp_path, name, [of(), of()]) for name in ("base", "run", "whole")}
    change(runs["run"])
    subjects = [Subject(name, run, "" if name == "base" else "base", "") for name, run in runs.items()]
    comparison = compare_runs(subjects, experiment="demo", question="?")
    assert comparison["whole"].verdict == "equal"
    return comparison["run"]


def test_one_flipped_bit_of_an_exponent_is_named(tmp_path):
    def flip(run):
        tensors = run.read_tensors("step0001.gradients")
        tensors["w"].view(torch.int64)[7] ^= 1 << 53
        run.write_tensors("step0001.gradients", tensors)

    result = damaged(tmp_path, flip)
    assert (result.verdict, "step0001.gradients" in result.why, "w" in result.why) == ("failed", True, True)


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_file_with_other_parameters_than_its_record_is_named(tmp_path, change):
    def replace(run):
        tensors = {"w": run.read_tensors("step0001.gradients")["w"], "extra": torch.ones(2, dtype=torch.float64)}
        run.write_tensors("step0001.gradients", tensors if change == "more" else {"extra": tensors["extra"]})

    result = damaged(tmp_path, replace)
    assert result.verdict == "failed"
    assert "extra" in result.why


@pytest.mark.parametrize("keep", [0, 1])
def test_a_record_that_was_cut_is_named(tmp_path, keep):
    def cut(run):
        path = run.path / "metrics.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))

    result = damaged(tmp_path, cut)
    assert result.verdict == "failed"
    assert "metrics.jsonl" in result.why
    assert f"{keep} whole records" in result.why


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


def test_steps_are_read_only_once(tmp_path):
    run = record(tmp_path, "run", [of(), of()])
    reader = RunReader(run)
    assert [reader.loss(0), reader.loss(1)] == [0.5, 0.5]
    (run.path / "metrics.jsonl").unlink()
    assert reader.norm(1) == pytest.approx(float(of()["w"].norm()))


def test_a_baseline_is_read_once_for_all_that_are_compared_with_it(tmp_path, monkeypatch):
    runs = {name: record(tmp_path, name, [of(), of()]) for name in ("base", "first", "second")}
    reads, read = [], atomic.read_tensors
    noted = stand_in(atomic, read_tensors=lambda path, **named: reads.append(path) or read(path, **named))
    monkeypatch.setattr(directory, "atomic", noted)
    subjects = [Subject(name, run, "" if name == "base" else "base") for name, run in runs.items()]
    comparison = compare_runs(subjects, experiment="demo", question="?")
    assert comparison["second"].verdict == "equal"
    assert sorted(reads) == sorted(path for run in runs.values() for path in (run.path / "tensors").iterdir())


def test_a_reader_keeps_few_tensors_and_reads_the_others_again(tmp_path, monkeypatch):
    run = record(tmp_path, "run", [of(), of()])
    reader = RunReader(run)
    assert reader.gradients(0) is reader.gradients(0)
    size = (run.path / "tensors/step0000.gradients.safetensors").stat().st_size
    monkeypatch.setattr(reading, "KEPT_BYTES", size)
    first = reader.gradients(0)
    assert reader.gradients(1) is reader.gradients(1)
    assert reader.gradients(0) is not first
    assert torch.equal(reader.gradients(0)["w"], first["w"])


def test_of_large_files_one_tensor_a_run_is_in_memory(tmp_path, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    whole = {f"w{i}": torch.randn(40 + i, generator=draw, dtype=torch.float64) for i in (2, 0, 1, 3, 4, 5)}
    near = {name: value + 1e-7 * torch.randn(value.shape, generator=draw) for name, value in whole.items()}
    far = {name: value + 3e-7 * torch.randn(value.shape, generator=draw) for name, value in whole.items()}
    usual = against(tmp_path / "usual", [whole], [near], [far])
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, read = [], atomic.StoredTensors.__getitem__

    def noted(self, name):
        tensor = read(self, name)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(atomic.StoredTensors, "__getitem__", noted)
    monkeypatch.setattr(reading, "KEPT_BYTES", 1)
    streamed = against(tmp_path / "streamed", [whole], [near], [far])
    assert [vars(a) for a in streamed.configurations] == [vars(a) for a in usual.configurations]
    assert [row.parameter for row in streamed["run"].parameters] == [*whole], "in the order of the model"
    assert len(most) > 6 * 3
    assert max(most) <= 5, "of six parameters, each of three runs has at most one and the next"


def test_an_unrecorded_gradient_names_the_setting(tmp_path):
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


# ---- Two runs of nothing agree, and a bad baseline makes a generous budget: neither is ever cal ----


LENGTHS = (7, 9, 12, 8, 10, 6, 11, 9)


def batch(advantages, *, mask=True, lengths=LENGTHS, rewards=None, groups=None):
    """Eight documents of a prompt of two tokens each, with the advantages, rewards and groups that a test is about."""
    draw = torch.Generator().manual_seed(5)
    ids_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    return RolloutBatch(
        tokens_T=torch.randint(0, 19, (len(ids_T),), generator=draw),
        positions_T=positions_T,
        document_ids_T=ids_T,
        loss_mask_T=(positions_T >= 2) & mask,
        advantages_T=torch.tensor(advantages, dtype=torch.float64)[ids_T],
        old_logprobs_T=-4 + 0.1 * torch.randn(len(ids_T), generator=draw, dtype=torch.float64),
        rewards_N=None if rewards is None else torch.tensor(rewards, dtype=torch.float64),
        group_ids_N=None if groups is None else torch.tensor(groups),
        temperature=1.0,
    )


SIGNS = [1.0, -1.0] * 4
EMPTY = {
    "all advantages are 0": ({}, batch([0.0] * 8)),
    "the loss mask is empty": ({}, batch(SIGNS, mask=False)),
    "every document is one token": ({}, batch(SIGNS, lengths=(1,) * 8)),
    "grpo on groups of one": (
        {"data": {"advantages": {"name": "grpo"}}},
        batch(SIGNS, rewards=SIGNS, groups=list(range(8))),
    ),
    "equal rewards": ({"data": {"advantages": {"name": "rloo"}}}, batch(SIGNS, rewards=[1.0] * 8, groups=[0, 1] * 4)),
}


def compared(tmp_path, rollouts, settings) -> Comparison:
    """One rank, and two known faults of two cp ranks, in float64."""
    save(rollouts, tmp_path / "rollouts", provenance={"made_by": "a test"})
    base = RunSpec(model={"source": "tiny-qwen3"}, precision="float64", data={"path": str(tmp_path / "rollouts")})
    subjects = []
    for name, more in {
        "one_rank": {},
        **{
            fault: {"layout": {"cp": 2, "order": "zigzag"}, "faults": [fault]}
            for fault in ("missing_cp_factor", "local_denominator")
        },
    }.items():
        run = RunDirectory.create(tmp_path / "runs", name, base.merged(settings).merged(more))
        run_here(run, Path.cwd())
        subjects.append(Subject(name, run, "one_rank" if more else "", "one_rank"))
    return compare_runs(subjects, experiment="demo", question="?")


@pytest.mark.parametrize("why", EMPTY)
def test_faults_in_a_step_that_trains_nothing_are_vacuous_and_not_equal(tmp_path, why):
    settings, rollouts = EMPTY[why]
    comparison = compared(tmp_path, rollouts, settings)
    assert {c.name: c.verdict for c in comparison.configurations} == dict.fromkeys(
        ("one_rank", "missing_cp_factor", "local_denominator"), "vacuous"
    )
    assert print_verdicts(comparison) == 1
    with pytest.raises(VerdictError, match="vacuous"):
        comparison.check()
    assert "gradient on 0 of 8 documents" in str(comparison)


def test_the_same_faults_differ_where_something_is_trained(tmp_path):
    comparison = compared(tmp_path, batch(SIGNS), {})
    assert [comparison[name].verdict for name in ("missing_cp_factor", "local_denominator")] == ["different"] * 2
    assert comparison["missing_cp_factor"].factor == pytest.approx(0.5)
    assert comparison["one_rank"].evidence["gradient_documents"] >= 6, "of eight; a short one may be clipped whole"
    assert print_verdicts(comparison) == 0, "the faults are planted"


def test_documents_without_a_gradient_weaken_the_evidence(tmp_path):
    comparison = compared(tmp_path, batch([1.0, 0, 0, 0, 0, 0, 0, -1.0]), {})
    evidence = comparison["missing_cp_factor"].evidence
    assert (evidence["gradient_documents"], evidence["documents"]) == (2, 8)
    assert any(note.startswith("weak evidence: only 2 of 8 documents") for note in comparison["one_rank"].notes)


def test_a_loss_with_only_an_active_kl_term_is_reported(tmp_path):
    rollouts = batch([0.0] * 8)
    rollouts = replace(rollouts, ref_logprobs_T=rollouts.old_logprobs_T - 0.3)
    comparison = compared(tmp_path, rollouts, {"loss": {"name": "grpo", "kl": {"coefficient": 0.1}}})
    assert comparison["missing_cp_factor"].verdict == "different"
    assert any("the policy term gives no token a gradient" in note for note in comparison["one_rank"].notes)


# ---- records made in the test ------------------------------------------------------------------------------


def record(root, name, gradients, *, precision="float64", loss=0.5, counts=None):
    run = RunDirectory.create(root, name, RunSpec(precision=precision, steps=len(gradients)))
    run.set_state("running")
    for step, values in enumerate(gradients):
        run.write_tensors(f"step{step:04d}.gradients", values)
        norms = {name: float(value.norm()) for name, value in values.items()}
        run.append_step(
            {
                "step": step,
                "loss/total/sum": loss,
                "gradient/norm/global": math.hypot(*norms.values()),
                "gradient_norms": norms,
            }
            | (counts or {})
        )
    run.set_state("succeeded")
    return run


def of(scale=1.0, noise=0.0):
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(50, generator=draw, dtype=torch.float64)
    return {"w": scale * value + noise * torch.randn(50, generator=draw, dtype=torch.float64)}


def against(tmp_path, truth, baseline, run, precision="float32"):
    subjects = [
        Subject("truth", record(tmp_path, "truth", truth)),
        Subject("base", record(tmp_path, "base", baseline, precision=precision), "", "truth"),
        Subject("run", record(tmp_path, "run", run, precision=precision), "base", "truth"),
    ]
    return compare_runs(subjects, experiment="demo", question="?")


NAN = {"w": torch.full((50,), math.nan, dtype=torch.float64)}


@pytest.mark.parametrize(("truth", "baseline"), [(of(), NAN), (NAN, of())], ids=["baseline", "truth"])
def test_a_baseline_or_a_truth_of_nan_is_no_measure(tmp_path, truth, baseline):
    result = against(tmp_path, [truth], [baseline], [of()])["run"]
    assert result.verdict == "unsound baseline"
    assert ("baseline base" if baseline is NAN else "float64 ground truth truth") in result.why
    assert result.why.endswith("is nan in step 0")


def test_bits_of_nan_are_not_equal(tmp_path):
    result = against(tmp_path, [NAN], [NAN], [NAN], precision="float64")
    assert {c.verdict for c in result.configurations} == {"unsound baseline"}


@pytest.mark.parametrize(
    ("precision", "error", "verdict"),
    [
        ("float32", 1e-4, "within budget"),
        ("float32", 1e-3, "unsound baseline"),
        ("bfloat16", 5e-2, "within budget"),
        ("bfloat16", 0.5, "unsound baseline"),
    ],
)
def test_a_baseline_further_from_the_truth_than_its_precision_explains_is_unsound(tmp_path, precision, error, verdict):
    result = against(tmp_path, [of()], [of(1 + error)], [of(1 + 0.9 * error)], precision)
    assert result["run"].verdict == verdict
    assert result["base"].verdict == ("reference" if verdict == "within budget" else verdict)
    if verdict == "unsound baseline":
        assert f"rounding in {precision} explains at most" in result["run"].why


def test_a_difference_before_the_baseline_became_unsound_is_a_difference(tmp_path):
    result = against(tmp_path, [of(), of()], [of(1 + 1e-7), NAN], [of(0.5), of(0.5)])["run"]
    assert (result.verdict, result.first_step) == ("different", 0)
    result = against(tmp_path / "b", [of(), of()], [of(1 + 1e-7), NAN], [of(1 + 1e-7), of(1 + 1e-7)])["run"]
    assert (result.verdict, result.first_step) == ("unsound baseline", 1)


def test_a_run_that_diverges_from_a_finite_baseline_has_its_step(tmp_path):
    result = against(tmp_path, [of()] * 3, [of()] * 3, [of(), NAN, NAN], precision="float64")["run"]
    assert (result.verdict, result.first_step, result.diverged_step) == ("different", 1, 1)
    assert "diverged: not finite from step 1 on" in result.notes


def test_a_gradient_of_zero_against_one_that_is_not_is_a_difference(tmp_path):
    for name, pair in {"a": (of(0.0), of()), "b": (of(), of(0.0))}.items():
        result = against(tmp_path / name, [pair[0]], [pair[0]], [pair[1]], precision="float64")["run"]
        assert result.verdict == "different"


def test_records_without_counts_are_vacuous_where_every_gradient_is_zero(tmp_path):
    result = against(tmp_path, [of(0.0)] * 2, [of(0.0)] * 2, [of(0.0)] * 2, precision="float64")["run"]
    assert (result.verdict, result.why) == ("vacuous", "nothing was compared: every gradient is zero in every step")
    result = against(tmp_path / "b", [of(0.0), of()], [of(0.0), of()], [of(0.0), of()], precision="float64")["run"]
    assert result.verdict == "equal"


def test_a_comparison_keeps_its_evidence_on_disk(tmp_path):
    counts = {
        "evidence/trained_tokens/sum": 10.0,
        "evidence/gradient_tokens/sum": 4.0,
        "evidence/documents/sum": 5.0,
        "evidence/gradient_documents/sum": 4.0,
        "evidence/clipped_tokens/sum": 6.0,
    }
    subjects = [Subject("one", record(tmp_path, "one", [of()], counts=counts))]
    compare_runs(subjects, experiment="demo", question="?").save(tmp_path / "comparison.json")
    loaded = Comparison.load(tmp_path / "comparison.json")["one"]
    assert loaded.evidence == Evidence(1, 5, 4, 10, 4, None, 6).as_json()
    assert loaded.notes == (
        "could have seen: gradient on 4 of 5 documents (80.0%), 4 of 10 trained tokens (40.0%); clipped 60.0%",
        "weak evidence: 60.0% of the trained tokens are clipped",
        "weak evidence: only 40.0% of the trained tokens have a gradient",
    )


def test_a_gradient_whose_squares_underflow_is_not_zero(tmp_path):
    result = against(tmp_path, [of(1e-200)], [of(1e-200)], [of(0.5e-200)], precision="float64")["run"]
    assert result.verdict == "unsound baseline"
    assert "too small to measure" in result.why


def test_a_difference_as_small_as_amplified_rounding_is_doubted(tmp_path):
    result = against(tmp_path, [of()], [of()], [of(1 + 1e-9)], precision="float64")["run"]
    assert result.verdict == "different"
    assert any("rounding alone does that where the gradient cancels" in note for note in result.notes)
    result = against(tmp_path / "b", [of()], [of()], [of(1 + 1e-5)], precision="float64")["run"]
    assert not any("rounding alone" in note for note in result.notes)


def test_a_step_of_which_autograd_returns_no_gradient_counts_none():
    import torch

    from workbench.metrics.evidence import GradientTokens

    class Row:
        loss_mask_T = torch.ones(2, dtype=torch.bool)

    class Inputs:
        policy_logprobs_T = torch.zeros(2, requires_grad=True)
        entropy_T = logsumexp_T = mean_squared_logit_T = mean_logit_T = None

    reached = GradientTokens(Row, Inputs)
    reached._record(None)
    assert not reached.mask_T.any()
