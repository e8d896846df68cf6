"""Every page of a comparison has its mutation score, or says how to measure it."""

from dataclasses import replace

from tests.unit.report.test_arms import run
from workbench.compare.comparison import Comparison
from workbench.report.page import page, write_report
from workbench.report.score import COMMAND, FILE
from workbench.sensitivity.record import FaultResult, Sensitivity


def compared():
    return Comparison("x", "?", [run("a", 0, 1.0), replace(run("b", 0, 1.0, layout={"cp": 2}), against="a-0")])


def result(fault, killed):
    missing = () if killed else ("one micro-batch",)
    verdict = "different" if killed else "equal"
    return FaultResult(fault, "A", "", True, "b-0", missing, verdict, "", killed, None)


def score():
    results = (result("missing_cp_factor", True), result("gradients_of_last_micro_batch", False))
    return Sensitivity("x", {"b-0": "equal"}, {}, results, {}, {}, 1.0, 1, {})


def test_a_page_without_a_score_says_how_to_get_one():
    assert COMMAND in page(compared())
    assert COMMAND not in page(Comparison("x", "?", [run("a", 0, 1.0)])), "nothing is compared"


def test_the_score_next_to_a_page_is_on_it(tmp_path):
    score().save(tmp_path / FILE)
    text = write_report(compared(), tmp_path / "report.html").read_text()
    assert "of 2 known bugs that make a gradient wrong and act in these runs, the comparison rejects 1." in text
    assert "It cannot see 1, for lack of: one micro-batch." in text
    assert COMMAND not in text
