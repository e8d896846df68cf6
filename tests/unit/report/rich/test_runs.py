"""Settings and runs: differences first, everything on request."""

import re

import pytest

from tests.helpers.trials import HOSTILE, make_run, make_sweep, write_steps
from workbench.errors import LaunchError
from workbench.launch.ablation import AblationSpec
from workbench.report.rich.runs import ablation_html, run_html, setting_text, spec_html, sweep_html
from workbench.specs.groups import LayoutSpec
from workbench.specs.run import RunSpec


def rows(drawn):
    return re.findall(r"<code>(.*?)</code></th><td>(.*?)</td><td>(.*?)</td>", drawn.partition("<details>")[0])


def test_only_differences_are_in_the_table():
    spec = RunSpec(layout={"cp": 2, "order": "zigzag"}, loss={"surrogate": {"clip_high": 0.28}}, steps=4)
    assert rows(spec_html(spec)) == [
        ("loss.surrogate.clip_high", "0.28", "0.2"),
        ("layout.cp", "2", "1"),
        ("layout.order", "zigzag", "contiguous"),
        ("steps", "4", "1"),
    ]


def test_defaults_are_described():
    assert rows(spec_html(RunSpec())) == []
    assert "Every setting is as it is by default." in spec_html(RunSpec())


def test_everything_is_there_on_request():
    details = spec_html(RunSpec()).partition("<details>")[2]
    for name in RunSpec.model_fields:
        assert f"&#34;{name}&#34;:" in details


def test_settings_are_quoted():
    assert "<script" not in spec_html(RunSpec(faults=[HOSTILE], model={"source": HOSTILE}))


def test_values_are_shown_as_in_yaml():
    assert [setting_text(value) for value in ("cuda", None, True, 0.5, ["a"])] == [
        "cuda",
        "null",
        "true",
        "0.5",
        '["a"]',
    ]


def test_the_text_version_has_only_differences_and_can_be_parsed():
    spec = RunSpec(layout={"cp": 2}, steps=4)
    assert repr(RunSpec()) == "RunSpec()"
    assert repr(spec) == "RunSpec(layout=LayoutSpec(cp=2), steps=4)"
    assert eval(repr(spec), {"RunSpec": RunSpec, "LayoutSpec": LayoutSpec}) == spec


# ---- An ablation: its question and its runs, each with its distinguishing settings ----


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


def rows_of_ablation(drawn):
    pattern = '<th scope="row"><strong>(.*?)</strong></th><td>(.*?)</td><td class="number">(.*?)</td><td>(.*?)</td>'
    return [tuple(cell.replace("<wbr>", "") for cell in row) for row in re.findall(pattern, drawn)]


def test_each_run_has_a_row_with_its_reference():
    assert rows_of_ablation(ablation_html(make())) == [
        ("one", "reference", "1", "precision: float64, steps: 2"),
        ("cp2", "against one", "2", "layout.cp: 2"),
    ]


def test_truth_and_reference_may_be_one_run():
    assert rows_of_ablation(ablation_html(make(truth="one")))[0][1] == "reference and truth"


def test_an_invalid_ablation_is_shown_with_its_error():
    drawn = ablation_html(make(reference="two"))
    assert rows_of_ablation(drawn) == []
    assert "reference" in drawn
    assert "two" in drawn


def test_questions_and_settings_are_quoted():
    drawn = ablation_html(make(question=HOSTILE, base={"precision": "float64", "model": {"source": HOSTILE}}))
    assert "<script" not in drawn
    assert drawn.count("&lt;script&gt;") == 2


def test_the_text_twin():
    assert repr(make()) == (
        "AblationSpec('Is it?', 2 runs)\n  one  reference: precision=float64, steps=2\n  cp2  against one: layout.cp=2"
    )
    assert str(make()) == repr(make())
    assert repr(make(reference="two")).startswith("AblationSpec('Is it?'; ")


# ---- A run's directory: where it stands, and in full why it failed ----


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "exp", steps=4, cp=2)


def test_state_progress_series_and_settings(run):
    run.set_state("running")
    write_steps(run, [0.5, 0.25])
    drawn = run_html(run)
    for text in ("running", "2/4", 'aria-label="loss: 2 values, last 0.250', "layout.cp"):
        assert text in drawn
    assert "traceback" not in drawn


def test_a_failure_is_shown_in_full(run):
    try:
        raise LaunchError("split 7 tokens", found="an odd row", rule="even rows", fix="pad")
    except LaunchError as error:
        run.write_exit(1, {"cp": 1}, error, waited_in="all_reduce over cp", stack="the stack")
    run.write_exit(0, {"cp": 0}, ConnectionError("connection reset by peer"))
    run.set_state("failed")
    drawn = run_html(run)
    assert "rank 1, in all_reduce over cp: LaunchError" in drawn
    assert "after it ranks 0" in drawn
    for text in ("found: an odd row", "do: pad", "Traceback (most recent call last)", "the stack"):
        assert text in drawn


def test_messages_are_quoted(run):
    run.write_exit(None, {}, ValueError(HOSTILE), stack=HOSTILE)
    run.set_state("failed")
    drawn = run_html(run)
    assert "<script" not in drawn
    assert "before any rank" in drawn


def test_the_text_twin_of_run(run):
    write_steps(run, [0.5])
    assert repr(run) == f"RunDirectory({run.path.name}: pending, 1/4 steps)"


# ---- A sweep: rows with their current state, and instructions to follow it while it runs ----


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path / "exp", "a", "b")


def test_a_row_for_each_run_in_order(sweep):
    drawn = sweep_html(sweep)
    assert 0 < drawn.index("a: pending") < drawn.index("b: pending")


def test_explains_how_to_follow_a_running_sweep(sweep):
    assert "experiment.panel()" in sweep_html(sweep)
    for run in sweep.runs:
        run.set_state("succeeded")
    assert "experiment.panel()" not in sweep_html(sweep)
