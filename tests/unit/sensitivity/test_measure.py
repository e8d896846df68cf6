"""The mutation score of a small ablation: choices, predictions, and what is not measured."""

import pytest

from workbench.errors import SpecError
from workbench.faults import load_fault
from workbench.records.provenance import project_root
from workbench.rollouts.files import load
from workbench.sensitivity.measure import measure, run_clean
from workbench.sensitivity.trials import Plan, Trials
from workbench.specs.run import RunSpec

BASE = {"precision": "float64", "data": {"documents_per_step": 6}, "steps": 1}
FAULTS = ("missing_cp_factor", "tool_mask_ignored", "straggler", "entropy_without_gradient")


def plans():
    return [
        Plan("one", RunSpec.model_validate(BASE)),
        Plan("cp2", RunSpec.model_validate({**BASE, "layout": {"cp": 2}}), "one"),
    ]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated") / "rollouts"
    lines = []
    sensitivity = measure(
        plans(), ablation="small", project=project_root(), faults=FAULTS, dataset=folder, report_progress=lines.append
    )
    return sensitivity, folder, lines


def test_a_fault_is_planted_where_it_is_predicted_to_show(record):
    sensitivity, _, lines = record
    result = sensitivity.result("missing_cp_factor")
    assert (result.configuration, result.killed, result.missing) == ("cp2", True, ())
    assert "missing_cp_factor in cp2: different" in lines
    assert (sensitivity.score, sensitivity.steps, sensitivity.configurations) == (
        0.5,
        1,
        {"one": "reference", "cp2": "equal"},
    )


def test_a_survivor_has_its_reason_and_the_change_that_kills_it(record):
    result = record[0].result("tool_mask_ignored")
    assert (result.killed, result.missing) == (False, ("no hole in a mask",))
    assert result.remedy.change == "a hole in a mask"
    assert record[0].disagreements == ()


def test_the_generated_dataset_kills_what_data_can_show(record):
    sensitivity, folder, _ = record
    rollouts = load(folder)
    assert sensitivity.dataset == {"documents": rollouts.num_documents, "tokens": rollouts.num_tokens}
    assert rollouts.num_tokens < 200
    assert [sensitivity.result(name).generated for name in ("missing_cp_factor", "tool_mask_ignored")] == [True, True]


def test_faults_whose_seam_is_not_called_and_faults_of_no_number_are_not_admissible(record):
    assert record[0].inadmissible == {"entropy_without_gradient": "workbench.losses.build:entropy_bonus"}
    assert list(record[0].uncounted) == ["straggler"]


def test_without_a_choice_runs_in_float64_are_measured():
    lower = Plan("lower", RunSpec.model_validate(BASE | {"precision": "float32"}), "", "one")
    both = [*plans(), lower]
    fault = ["gradient_divided_by_documents_again"]
    settings = {"ablation": "a", "project": project_root(), "faults": fault, "remedies": False}
    assert set(measure(both, **settings).configurations) == {"one", "cp2"}
    assert set(measure(both, **settings, configurations=["lower"]).configurations) == {"lower"}


def test_a_run_that_its_comparison_rejects_is_left_out(tmp_path):
    wrong = Plan("wrong", RunSpec.model_validate(BASE | {"loss": {"kl": {"coefficient": 0.5}}}), "one")
    measured = run_clean(Trials([*plans(), wrong], tmp_path, project_root()), ["one", "wrong"], [])
    assert list(measured.clean) == ["one"]
    assert measured.left_out["wrong"].startswith("without a fault it is different: step 0")


def test_parameters_that_fsdp_shards_are_left_out(tmp_path):
    sharded = Plan("sharded", RunSpec.model_validate(BASE | {"layout": {"dp": 2, "shard_parameters": True}}), "one")
    measured = run_clean(Trials([*plans(), sharded], tmp_path, project_root()), ["one", "sharded"], [])
    assert "simulated ranks" in measured.left_out["sharded"]


def test_online_rollouts_cannot_be_measured():
    online = {"steps": 1, "online": {"task": "arithmetic"}, "data": {"advantages": {"name": "grpo"}}}
    plan = Plan("online", RunSpec.model_validate(online))
    with pytest.raises(SpecError, match="online rollouts"):
        measure([plan], ablation="a", project=project_root(), faults=["missing_cp_factor"])


def test_an_unknown_fault_is_an_error():
    with pytest.raises(SpecError, match="did you mean"):
        measure(plans(), ablation="a", project=project_root(), faults=["missing_cp_facto"])


def test_of_equal_runs_the_one_with_the_settings_of_the_fault_is_chosen(tmp_path):
    dp2 = Plan("dp2", RunSpec.model_validate(BASE | {"layout": {"dp": 2}}), "one")
    fault = load_fault("reduction_in_bfloat16")
    measured = run_clean(Trials([*plans(), dp2], tmp_path, project_root()), ["one", "cp2", "dp2"], [fault.seam])
    assert measured.choose(fault).name == "dp2"
    assert measured.choose(load_fault("entropy_without_gradient")) is None
