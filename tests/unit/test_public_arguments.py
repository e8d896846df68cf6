"""Names and paths as strings where objects are expected: they work, or are refused by name."""

import pytest

import workbench as wb
from workbench.errors import WorkbenchError
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.report.loss_curves import loss_curves, name_specs
from workbench.train.checkpoint import trained_policy

ROLLOUTS = project_root() / "data" / "arithmetic" / "rollouts"


@pytest.fixture(scope="module")
def batch():
    return wb.load_rollouts(str(ROLLOUTS))


def test_a_dataset_by_a_string(batch):
    assert batch.num_documents == wb.load_rollouts(ROLLOUTS).num_documents


def test_a_preset_by_its_name(batch):
    by_name, by_spec = (wb.token_credit(batch, spec) for spec in ("dapo", wb.LossSpec(name="dapo")))
    assert by_name.credit_T.tolist() == by_spec.credit_T.tolist()


def test_curves_of_presets_by_name():
    specs = {"grpo": wb.LossSpec(name="grpo"), "dapo": wb.LossSpec(name="dapo")}
    assert name_specs("grpo") == {"grpo": specs["grpo"]}
    assert name_specs(["grpo", specs["dapo"]]) == specs
    assert name_specs({"mine": "grpo"}) == {"mine": specs["grpo"]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda _: wb.load_rollouts("no/such"), "no/such/manifest.json(?s:.*)no such folder"),
        (lambda _: wb.load_rollouts(3), r"load rollouts\n  found: a int, 3\n  rule: a str or Path or Mapping"),
        (lambda _: RunDirectory.open("no/such"), "no/such/config.json"),
        (lambda _: RunDirectory.open(None), r"open a run\n  found: a NoneType"),
        (lambda _: trained_policy("no/such"), "no/such/config.json"),
        (lambda _: trained_policy(3), r"open a run\n  found: a int"),
        (lambda _: wb.token_credit("batch", "grpo"), r"token_credit: batch\n  found: a str, 'batch'"),
        (lambda batch: wb.token_credit(batch, 3), r"token_credit: spec\n  found: a int"),
        (lambda batch: wb.token_credit(batch, "grop"), r"no preset 'grop' \(did you mean 'grpo'"),
        (lambda _: loss_curves("grop"), r"no preset 'grop' \(did you mean 'grpo'"),
        (lambda _: loss_curves([3]), r"curves of losses\n  found: a int"),
        (lambda _: wb.prove("grop"), r"no preset 'grop' \(did you mean 'grpo'"),
        (lambda _: wb.prove(3), "a preset's name"),
        (lambda _: wb.diagnose("x", "y"), "read a record from x"),
        (lambda _: wb.diagnose(3, "y"), r"read a record\n  found: a int"),
    ],
)
def test_what_cannot_be_is_refused_by_name(batch, call, words):
    with pytest.raises(WorkbenchError, match=words):
        call(batch)
