"""An ablation: its question and its runs, each with what sets it apart."""

import re

from tests.helpers.trials import HOSTILE
from workbench.launch.ablation import AblationSpec
from workbench.report.rich.ablation import as_html


def make(**more):
    return AblationSpec(
        **{
            "question": "Is it?",
            "base": {"precision": "float64", "steps": 2},
            "reference": "one",
            "configurations": {"one": {}, "cp2": {"layout": {"cp": 2}}},
        }
        | more
    )


def rows(drawn):
    pattern = '<th scope="row"><strong>(.*?)</strong></th><td>(.*?)</td><td class="number">(.*?)</td><td>(.*?)</td>'
    return [tuple(cell.replace("<wbr>", "") for cell in row) for row in re.findall(pattern, drawn)]


def test_a_row_for_each_run_with_what_it_is_held_against():
    assert rows(as_html(make())) == [
        ("one", "reference", "1", "precision: float64, steps: 2"),
        ("cp2", "against one", "2", "layout.cp: 2"),
    ]


def test_truth_and_reference_may_be_one_run():
    assert rows(as_html(make(truth="one")))[0][1] == "reference and truth"


def test_what_cannot_be_unfolded_is_said_in_words():
    drawn = as_html(make(reference="two"))
    assert rows(drawn) == []
    assert "reference" in drawn
    assert "two" in drawn


def test_questions_and_settings_are_quoted():
    drawn = as_html(make(question=HOSTILE, base={"precision": "float64", "model": {"source": HOSTILE}}))
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;") == 2


def test_the_text_twin():
    assert repr(make()) == (
        "AblationSpec('Is it?', 2 runs)\n  one  reference: precision=float64, steps=2\n  cp2  against one: layout.cp=2"
    )
    assert str(make()) == repr(make())
    assert repr(make(reference="two")).startswith("AblationSpec('Is it?'; ")
