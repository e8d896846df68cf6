"""Verdicts on hand-made run directories: every bar from both sides."""

import pytest
import torch

from workbench.compare import align
from workbench.compare.align import Subject, compare_runs
from workbench.errors import RecordError, ShapeError
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


def gradient(scale=1.0, noise=0.0, small=1e-9):
    g = torch.Generator().manual_seed(0)
    base = {
        "big": torch.randn(50, generator=g, dtype=torch.float64),
        "small": small * torch.randn(50, generator=g, dtype=torch.float64),
    }
    return {
        name: scale * (value + noise * torch.randn(50, generator=g, dtype=torch.float64))
        for name, value in base.items()
    }


def run(
    root, name, gradients, *, precision="float64", state="succeeded", flips=False, norm=1.0, others_from=99, **settings
):
    directory = RunDirectory.create(root, name, RunSpec(precision=precision, steps=len(gradients), **settings))
    directory.set_state("running")
    for step, values in enumerate(gradients):
        directory.write_tensors(f"step{step:04d}.gradients", values)
        directory.write_tensors(
            f"step{step:04d}.tokens",
            {
                "clipped": torch.tensor([step == 1, False]),
                "would_clip": torch.tensor([step == 1, flips]),
                "trained": torch.tensor([True, True]),
                "targets": torch.tensor([3, 4 if step < others_from else 5]),
                "policy_logprobs": torch.tensor([-1.0, -2.0]),
                "old_logprobs": torch.tensor([-1.5, -2.0]),
            },
        )
        directory.append_step({"step": step, "loss/total/sum": 0.5, "gradient/norm/global": norm})
    directory.set_state(state)
    return directory


def judged(tmp_path, gradients, *, reference=None, **settings):
    reference = reference or [gradient(), gradient()]
    subjects = [
        Subject("ref", run(tmp_path, "ref", reference)),
        Subject("mine", run(tmp_path, "mine", gradients, **settings), "ref", "ref"),
    ]
    return compare_runs(subjects, experiment="demo", question="?")["mine"]


@pytest.mark.parametrize(("bytes_", "inside"), [(2**26, 1), (0, 2)])
def test_small_gradients_are_compared_in_one_thread_and_large_ones_in_those_of_the_process(
    tmp_path, monkeypatch, bytes_, inside
):
    monkeypatch.setattr(align, "SMALL_BYTES", bytes_)
    seen, measured = [], align.step_differences
    monkeypatch.setattr(
        align, "step_differences", lambda *a, **b: seen.append(torch.get_num_threads()) or measured(*a, **b)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        judged(tmp_path, [gradient(), gradient()])
        assert (seen, torch.get_num_threads()) == ([inside, inside], 2)
    finally:
        torch.set_num_threads(before)


def test_bitwise_is_equal(tmp_path):
    verdict = judged(tmp_path, [gradient(), gradient()])
    assert verdict.verdict == "equal"
    assert "bit for bit" in verdict.why


def test_below_the_bar_is_equal_and_above_it_is_different(tmp_path):
    assert judged(tmp_path / "a", [gradient(), gradient(scale=1 + 9e-13)]).verdict == "equal"
    verdict = judged(tmp_path / "b", [gradient(), gradient(scale=1 + 2e-12)])
    assert (verdict.verdict, verdict.first_step, verdict.first_parameter) == ("different", 1, "big")


def test_a_tiny_gradient_is_judged_by_the_floor_and_listed(tmp_path):
    noisy = gradient()
    noisy["small"] = noisy["small"] + 1e-17
    verdict = judged(tmp_path, [noisy, gradient()])
    assert verdict.verdict == "equal"
    assert {row.parameter: row.judged_by for row in verdict.parameters} == {"big": "gradient", "small": "floor"}
    assert "1 parameter(s) judged by the floor" in verdict.why


@pytest.mark.parametrize(
    ("precision", "scale", "words"),
    [
        ("float64", 1 + 4e-13, "the nearest to its bar is at 0.4 of it"),
        ("float32", 1 + 2e-6, "at most 0.8 of the budget"),
    ],
)
def test_a_step_with_two_zero_gradients_uses_none_of_its_budget(tmp_path, precision, scale, words):
    zero = gradient(0.0)
    subjects = [
        Subject("truth", run(tmp_path, "truth", [zero, gradient()])),
        Subject("plain", run(tmp_path, "plain", [zero, gradient(1 + 1e-6)], precision="float32"), "", "truth"),
        Subject(
            "mine",
            run(tmp_path, "mine", [zero, gradient(scale)], precision=precision),
            "truth" if precision == "float64" else "plain",
            "truth",
        ),
    ]
    configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
    assert words in configuration.why
    assert [row.relative_l2 for row in configuration.parameters if row.step == 0] == [0.0, 0.0]
    assert (configuration.whole_gradient[0]["relative_l2"], configuration.whole_gradient[0]["within"]) == (0.0, True)


def test_a_half_gradient_is_named_after_cp(tmp_path):
    verdict = judged(tmp_path, [gradient(0.5), gradient(0.5)], layout={"cp": 2})
    assert (verdict.verdict, verdict.factor, verdict.factor_meaning) == ("different", pytest.approx(0.5), "1 / cp")


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [(1e-6, "within budget"), (4.9e-6, "within budget"), (5.2e-6, "different"), (8e-6, "different")],
)
def test_float32_budgets_come_from_the_error_of_the_baseline(tmp_path, noise, verdict):
    truth = [gradient(small=1.0)]
    # The float32 baseline is 2e-6 from the ground truth; a run may be 2.5 times that (3.5 for one parameter).
    subjects = [
        Subject("truth", run(tmp_path, "truth", truth)),
        Subject("ref", run(tmp_path, "ref", [gradient(noise=2e-6, small=1.0)], precision="float32"), "", "truth"),
        Subject("mine", run(tmp_path, "mine", [gradient(noise=noise, small=1.0)], precision="float32"), "ref", "truth"),
    ]
    configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
    assert configuration.verdict == verdict


def test_below_float64_the_distance_is_to_the_truth_and_not_to_the_reference(tmp_path):
    # On the other side of the ground truth: 2.25 times as far from it as the baseline, 3.25 from the baseline.
    subjects = [
        Subject("truth", run(tmp_path, "truth", [gradient(small=1.0)])),
        Subject("ref", run(tmp_path, "ref", [gradient(noise=2e-6, small=1.0)], precision="float32"), "", "truth"),
        Subject(
            "mine", run(tmp_path, "mine", [gradient(noise=-4.5e-6, small=1.0)], precision="float32"), "ref", "truth"
        ),
    ]
    configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
    assert configuration.verdict == "within budget"


def test_one_parameter_may_be_further_from_the_truth_by_its_own_factor_and_no_more(tmp_path):
    truth, reference = gradient(small=0.01), gradient(noise=2e-6, small=0.01)
    for factor, verdict in ((3.4, "within budget"), (3.6, "different")):
        local = {"big": truth["big"], "small": truth["small"] + factor * (reference["small"] - truth["small"])}
        subjects = [
            Subject("truth", run(tmp_path / verdict, "truth", [truth])),
            Subject("ref", run(tmp_path / verdict, "ref", [reference], precision="float32"), "", "truth"),
            Subject("mine", run(tmp_path / verdict, "mine", [local], precision="float32"), "ref", "truth"),
        ]
        configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
        assert [w["distance"] <= w["budget"] for w in configuration.whole_gradient] == [True], (
            "the whole is not what decides"
        )
        assert configuration.verdict == verdict


def test_a_lucky_reference_does_not_set_the_bar(tmp_path):
    truth, lucky = gradient(small=0.01), gradient(noise=2e-6, small=0.01)
    lucky["small"] = truth["small"] * (1 + 1e-9)
    local = gradient(noise=2e-6, small=0.01)
    local["small"] = truth["small"] * (1 + 2e-6)
    subjects = [
        Subject("truth", run(tmp_path, "truth", [truth])),
        Subject("ref", run(tmp_path, "ref", [lucky], precision="float32"), "", "truth"),
        Subject("mine", run(tmp_path, "mine", [local], precision="float32"), "ref", "truth"),
    ]
    configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
    assert configuration.verdict == "within budget"
    assert {row.parameter: row.judged_by for row in configuration.parameters} == {
        "big": "gradient",
        "small": "whole gradient",
    }


def test_tokens_that_do_not_train_have_no_ratio(tmp_path):
    reference, local = (run(tmp_path, name, [gradient()]) for name in ("ref", "mine"))
    tokens = local.read_tensors("step0000.tokens") | {"trained": torch.tensor([True, False])}
    local.write_tensors("step0000.tokens", tokens)
    comparison = compare_runs(
        [Subject("ref", reference), Subject("mine", local, "ref", "ref")], experiment="demo", question="?"
    )
    assert {c.name: sum(c.ratios["0"]["counts"]) for c in comparison.configurations} == {"ref": 2, "mine": 1}


def test_the_first_step_that_differs_gives_the_factor(tmp_path):
    verdict = judged(tmp_path, [gradient(0.5), gradient(0.25)], layout={"cp": 2})
    assert (verdict.first_step, verdict.factor, verdict.factor_meaning) == (0, pytest.approx(0.5), "1 / cp")
    assert verdict.why.startswith("step 0: ")


def test_clip_decisions_that_would_flip_are_counted(tmp_path):
    verdict = judged(tmp_path, [gradient(scale=1 + 1e-13), gradient()], flips=True)
    assert [w["flipped_clips"] for w in verdict.whole_gradient] == [1, 1]
    assert "2 clip decision(s) would flip" in verdict.why


def test_a_difference_has_its_place_size_and_direction(tmp_path):
    turned = gradient()
    turned["big"] = -2 * turned["big"]
    turned["small"] = turned["small"] - 1e-24 * turned["big"]  # the median of the two cosines is 0, but for rounding
    assert judged(tmp_path, [turned, gradient()]).why == (
        "step 0: 1 of 2 parameters over budget, first big; gradient norms 2 times the reference's, cosine 0.0000"
    )


def test_a_failed_run_is_reported_with_rank_and_traceback(tmp_path):
    broken = run(tmp_path, "broken", [gradient()], state="failed")
    broken.write_exit(1, {"dp": 0, "cp": 1, "tp": 0}, ShapeError("planned", found="an odd row", fix="pad"))
    subjects = [Subject("ref", run(tmp_path, "ref", [gradient()])), Subject("broken", broken, "ref", "ref")]
    configuration = compare_runs(subjects, experiment="demo", question="?")["broken"]
    assert (configuration.verdict, configuration.why) == ("failed", "rank 1 ShapeError: planned; found: an odd row")
    assert configuration.failure["rank"] == 1
    assert "ShapeError: planned" in configuration.failure["traceback"]


def test_without_a_baseline_nothing_is_equal(tmp_path):
    subjects = [
        Subject("ref", run(tmp_path, "ref", [gradient()], state="failed")),
        Subject("mine", run(tmp_path, "mine", [gradient()]), "ref", "ref"),
    ]
    assert compare_runs(subjects, experiment="demo", question="?")["mine"].verdict == "failed"


def test_a_reference_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(RecordError, match="no such configuration"):
        compare_runs([Subject("mine", None, "nobody")], experiment="demo", question="?")


def test_ratios_are_counted_from_trained_tokens(tmp_path):
    histogram = judged(tmp_path, [gradient(), gradient()]).ratios["0"]
    assert sum(histogram["counts"]) == 2
    assert histogram["edges"][0] < 1 < histogram["edges"][-1]
    assert histogram["edges"][-1] == pytest.approx(torch.tensor(0.5).exp().item(), rel=1e-6)


def pair(tmp_path, mine, reference, *, truth="", **settings):
    subjects = [
        Subject("ref", run(tmp_path, "ref", reference[0], **reference[1])),
        Subject("mine", run(tmp_path, "mine", mine, **settings), "ref", truth),
    ]
    return compare_runs(subjects, experiment="demo", question="?")["mine"]


def test_below_float64_nothing_is_judged_without_a_truth(tmp_path):
    result = pair(tmp_path, [gradient()], ([gradient()], {"precision": "float32"}), precision="float32")
    assert result.verdict == "failed"
    assert "mine has none" in result.why


def test_a_truth_that_is_not_float64_is_refused(tmp_path):
    result = pair(tmp_path, [gradient()], ([gradient()], {"precision": "float32"}), precision="float32", truth="ref")
    assert (result.verdict, result.why) == ("failed", "ref is the truth of mine: precision float32")
    result = pair(tmp_path / "b", [gradient()], ([gradient()], {"precision": "float32"}))
    assert result.why == "ref is the reference of mine: precision float32"


def test_runs_of_other_lengths_are_not_compared(tmp_path):
    result = pair(tmp_path, [gradient()], ([gradient()] * 2, {}))
    assert (result.verdict, result.why) == ("failed", "compare mine with ref: 1 steps against 2")


def test_a_parameter_that_only_one_has_is_a_difference(tmp_path):
    more = gradient() | {"head": torch.ones(2)}
    result = pair(tmp_path, [more], ([gradient()], {}))
    assert (result.verdict, result.first_parameter) == ("different", "head")
    assert result.why == "another model than the reference's: head is only in this one"
    result = pair(tmp_path / "b", [gradient() | {"big": torch.ones(3)}], ([gradient()], {}))
    assert "big is (3,), not (50,)" in result.why


def test_norms_alone_are_not_judged(tmp_path):
    result = pair(tmp_path, [gradient()], ([gradient()], {}), record={"gradients": "norms"})
    assert (result.verdict, result.why) == ("failed", "compare mine: record.gradients = norms")


def test_numbers_that_stopped_being_numbers_are_named(tmp_path):
    subjects = [Subject("ref", run(tmp_path, "ref", [gradient()], norm=float("inf")))]
    configuration = compare_runs(subjects, experiment="demo", question="?")["ref"]
    assert (configuration.verdict, configuration.diverged_step) == ("unsound baseline", 0)
    assert configuration.why == "from step 0 on its loss or gradient is not finite"


def test_a_truth_of_another_model_stops_no_other_verdict(tmp_path):
    other = {"big": torch.ones(50, dtype=torch.float64)}
    subjects = [
        Subject("truth", run(tmp_path, "truth", [other])),
        Subject("ref", run(tmp_path, "ref", [gradient()], precision="float32"), "", "truth"),
        Subject("mine", run(tmp_path, "mine", [gradient()], precision="float32"), "ref", "truth"),
        Subject("again", run(tmp_path, "again", [other]), "truth", "truth"),
    ]
    comparison = compare_runs(subjects, experiment="demo", question="?")
    assert (comparison["mine"].verdict, comparison["again"].verdict) == ("failed", "equal")
    assert "small is only in this one" in comparison["mine"].why


class TestRunsThatSampled:
    """Runs that sample their own rollouts: from some step on they may train on other tokens."""

    def test_a_step_on_other_tokens_is_named_and_not_measured(self, tmp_path):
        verdict = judged(
            tmp_path, [gradient(), gradient(), gradient(scale=3.0)], others_from=2, reference=[gradient()] * 3
        )
        assert (verdict.verdict, verdict.first_step, verdict.factor) == ("different", 2, None)
        assert verdict.why == "step 2: it trains on other tokens than the reference, and agrees in the 2 before"
        assert [w["step"] for w in verdict.whole_gradient] == [0, 1]

    def test_from_the_first_step_on_nothing_is_measured(self, tmp_path):
        verdict = judged(tmp_path, [gradient()] * 2, others_from=0)
        assert (verdict.verdict, verdict.why) == ("different", "step 0: it trains on other tokens than the reference")

    def test_a_gradient_that_differs_before_is_the_cause(self, tmp_path):
        verdict = judged(tmp_path, [gradient(0.5), gradient()], others_from=1, layout={"cp": 2})
        assert (verdict.first_step, verdict.factor_meaning) == (0, "1 / cp")

    def test_a_truth_on_other_tokens_measures_nothing(self, tmp_path):
        subjects = [
            Subject("truth", run(tmp_path, "truth", [gradient()] * 2, others_from=1)),
            Subject("ref", run(tmp_path, "ref", [gradient()] * 2, precision="float32"), "", "truth"),
            Subject("mine", run(tmp_path, "mine", [gradient()] * 2, precision="float32"), "ref", "truth"),
        ]
        configuration = compare_runs(subjects, experiment="demo", question="?")["mine"]
        assert configuration.why == "step 1: it trains on other tokens than the truth, and agrees in the 1 before"
