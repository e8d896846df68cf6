"""`workbench compare`: the saved verdicts, printed; and two runs by their certificates."""

from __future__ import annotations

import pytest

from workbench.cli import compare as verb
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.records.certificate import Certificate, write_certificate
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec

SETTINGS = RunSpec().model_dump(mode="json")


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    ("verdict", "code"),
    [("equal", 0), ("within budget", 0), ("different", 1), ("vacuous", 1), ("unsound baseline", 1), ("failed", 1)],
)
def test_prints_verdicts_and_exits_1_where_a_configuration_without_a_fault_does_not_agree(
    tmp_path, capsys, verdict, code, fault
):
    settings = SETTINGS | {"faults": ["missing_cp_factor"] if fault else []}
    two = Configuration(
        "two",
        settings,
        against="one",
        verdict=verdict,
        why="because",
        whole_gradient=[{"relative_l2": 0.009, "distance": 9e-3, "budget": 1e-12}],
        evidence={"summary": "all", "warnings": ["few"]},
    )
    Comparison("x", "Same?", [Configuration("one", SETTINGS), two]).save(tmp_path / "comparison.json")
    assert verb.main([str(tmp_path)]) == (0 if fault else code)
    changed = "  [faults=['missing_cp_factor']]" if fault else ""
    assert capsys.readouterr().out.splitlines() == [
        "Same?",
        f"one  {'reference':<16}",
        f"two  {verdict:<16}  relative error 0.009, 9e+09 times budget{changed}  because",
        "could have seen: all (two)",
        "weak evidence: few (two)",
    ]


def test_what_a_loss_declares_to_break_stands_next_to_its_difference(tmp_path, capsys):
    settings = RunSpec(loss={"name": "bnpo"}, data={"micro_batches": 2}).model_dump(mode="json")
    base = RunSpec().model_dump(mode="json") | {"loss": RunSpec(loss={"name": "grpo"}).model_dump(mode="json")["loss"]}
    two = Configuration("two", settings, against="one", verdict="different", why="because")
    Comparison("x", "", [Configuration("one", base), two]).save(tmp_path / "comparison.json")
    assert verb.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "bnpo declares that it depends on micro-batches, packing order and data-parallel ranks (two)"
    )


def test_a_damaged_comparison_is_refused(tmp_path):
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(RecordError, match=r"comparison\.json"):
        verb.main([str(tmp_path)])


@pytest.fixture
def ran(tmp_path):
    def run(name, said):
        directory = RunDirectory.create(tmp_path / "runs", name, RunSpec())
        certificate = Certificate({"logprobs": said})
        write_certificate(directory, 0, certificate)
        directory.append_step({"step": 0, "certificate": certificate.hash})
        return str(directory.path)

    return run


def test_two_runs_are_held_by_their_certificates(ran, capsys):
    one, two, three = ran("one", "float32 00"), ran("two", "float32 00"), ran("three", "float32 01")
    assert verb.main([two, one]) == 0
    assert capsys.readouterr().out.startswith("two against one: the certificate of the step is the reference's")
    assert verb.main([three, one]) == 1
    assert capsys.readouterr().out == ("three against one: step 0: certificates part at logprobs, alone of 1 tensors\n")


def test_runs_without_certificates_are_refused(ran, tmp_path):
    plain = RunDirectory.create(tmp_path / "runs", "plain", RunSpec())
    with pytest.raises(RecordError, match="no certificates in one of them"):
        verb.main([str(plain.path), ran("one", "float32 00")])
