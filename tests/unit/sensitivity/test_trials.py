"""Trials: runs with a planted fault against the clean baseline, on simulated ranks."""

import pytest

from workbench.errors import SpecError
from workbench.faults import Fault, load_fault
from workbench.records.provenance import project_root
from workbench.sensitivity.trials import Plan, Trials, needed_plans, why_not_runnable
from workbench.specs.run import RunSpec

SMALL = {"precision": "float64", "data": {"documents_per_step": 4}, "steps": 2}
CP2 = {**SMALL, "layout": {"cp": 2}}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    one, two = (RunSpec.model_validate(settings) for settings in (SMALL, CP2))
    lower = RunSpec.model_validate({**SMALL, "precision": "float32", "frozen_clip": "one"})
    plans = [Plan("one", one), Plan("cp2", two, "one"), Plan("float32", lower, "", "one")]
    return Trials(plans, tmp_path_factory.mktemp("trials"), project_root())


def test_a_clean_run_agrees_and_names_the_seams_that_it_calls(trials):
    seams = ("step_weights", "workbench.losses.build:squared_logit", "workbench.train.worker:build_optimizer")
    fresh = Trials(trials.plans.values(), trials.folder / "seams", trials.project)
    clean = fresh.clean("cp2", seams)
    assert (clean.verdict, clean.agrees) == ("equal", True)
    assert clean.seams == {"step_weights", "workbench.train.worker:build_optimizer"}


def test_a_fault_that_changes_the_gradient_is_killed(trials):
    trial = trials.trial("cp2", load_fault("missing_cp_factor"))
    assert trial.killed
    assert trial.verdict == "different"
    assert "1 / cp" in trial.why
    assert trial.distances.loss[0].absolute < 1e-9
    assert trial.distances.gradient_norm[0].faulty == pytest.approx(trial.distances.gradient_norm[0].clean / 2)
    assert trial.distances.weights.largest > 0


def test_a_fault_without_effect_survives(trials):
    trial = trials.trial("one", load_fault("missing_cp_factor"))
    assert (trial.killed, trial.verdict) == (False, "equal")
    assert trial.distances.gradient_norm[0].absolute == trial.distances.weights.largest == 0


def test_a_fault_that_ends_the_run_is_killed_and_has_no_distances(trials):
    def raising(correct):
        def wrong(*args, **options):
            raise ZeroDivisionError("of a fault")

        return wrong

    trial = trials.trial("one", Fault("raising", "A", "", "", "", "step_weights", raising))
    assert (trial.killed, trial.verdict, trial.distances) == (True, "failed", None)
    assert "ZeroDivisionError" in trial.why


def test_below_float64_the_budget_is_that_of_the_ground_truth(trials):
    assert trials.clean("float32").agrees
    assert trials.trial("float32", load_fault("gradient_divided_by_documents_again")).killed
    assert not trials.trial("float32", load_fault("missing_cp_factor")).killed


def test_trials_print_nothing(trials, capsys):
    trials.trial("one", load_fault("nan_under_the_mask"))
    assert capsys.readouterr() == ("", "")


def test_a_plan_needs_baseline_truth_and_clip_decisions(trials):
    assert {plan.name for plan in needed_plans(trials.plans, "cp2")} == {"cp2", "one"}
    assert {plan.name for plan in needed_plans(trials.plans, "float32")} == {"float32", "one"}
    assert [plan.name for plan in needed_plans(trials.plans, "one")] == ["one"]


def test_a_reason_is_the_first_part_of_an_error():
    assert why_not_runnable(SpecError("a layout", found="no process group")) == "a layout: no process group"
    assert why_not_runnable(SpecError("a layout")) == "a layout"
