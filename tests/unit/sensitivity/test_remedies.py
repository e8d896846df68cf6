"""The smallest change that kills a survivor, measured."""

import pytest

from workbench.faults import load_fault
from workbench.records.provenance import project_root
from workbench.rollouts.files import load
from workbench.sensitivity.measure import run_clean
from workbench.sensitivity.needs import missing_needs
from workbench.sensitivity.remedies import SHOWS_IN, Remedies, edited
from workbench.sensitivity.trials import Plan, Trials
from workbench.specs.run import RunSpec

BASE = {"precision": "float64", "data": {"documents_per_step": 4}, "steps": 1}


@pytest.fixture(scope="module")
def remedies(tmp_path_factory):
    plans = [
        Plan("one", RunSpec.model_validate(BASE)),
        Plan("cp2", RunSpec.model_validate({**BASE, "layout": {"cp": 2}}), "one"),
    ]
    trials = Trials(plans, tmp_path_factory.mktemp("remedies"), project_root())
    return Remedies(trials, run_clean(trials, ["one", "cp2"], []).facts)


def tried(remedies, fault, name="one"):
    fault = load_fault(fault)
    missing = missing_needs(fault, remedies.facts[name])
    return [(each.change, each.killed) for each in remedies.of(fault, name, missing)]


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("gradient_averaged_over_micro_batches", [("three micro-batches", True)]),
        ("tool_mask_ignored", [("a hole in a mask", True)]),
        ("rows_without_signal_counted", [("a mean over documents and a masked document", True)]),
        ("mean_over_all_rows", [("loss gmpo and three micro-batches", True)]),
        ("extremes_swapped", []),
    ],
)
def test_the_changes_of_all_missing_facts_kill_a_survivor(remedies, fault, changes):
    assert tried(remedies, fault) == changes


def test_a_change_is_measured_in_a_configuration_that_it_suits(remedies):
    assert tried(remedies, "empty_micro_batch_divides_by_zero") == [("one trained document", True)]


def test_without_a_known_change_the_settings_of_the_fault_are_tried(remedies):
    assert tried(remedies, "gathered_tokens_summed_again") == [(f"{SHOWS_IN} and two tp ranks", True)]


def test_a_change_that_the_clean_run_does_not_survive_is_not_measured(remedies):
    (first,) = remedies.of(
        load_fault("overflow_not_skipped"),
        "one",
        missing_needs(load_fault("overflow_not_skipped"), remedies.facts["one"]),
    )
    assert not first.killed
    assert first.verdict


def test_edits_are_applied_one_after_another():
    rollouts = load(project_root() / "data/arithmetic/rollouts")
    masked, both = (
        edited(rollouts, names) for names in (["a masked document"], ["a masked document", "a hole in a mask"])
    )
    assert both.num_trained_tokens == masked.num_trained_tokens - 1 < rollouts.num_trained_tokens - 2
    assert edited(rollouts, []) is rollouts
