"""The page of an attribution, and the figure over training steps."""

from dataclasses import replace

import pytest

from tests.helpers.gaps import records
from workbench.mismatch import attribute
from workbench.mismatch.verdict import SEEDED
from workbench.report.mismatch import gap_parts, over_steps, page, write_page
from workbench.report.style import svg_text


@pytest.fixture(scope="module")
def result():
    return attribute("tiny-qwen3", records(temperature=0.7), draws=2)


def test_the_page_has_causes_floor_and_what_does_not_transfer(result, tmp_path):
    text = write_page(result, tmp_path / "gap.html", title="a <case>").read_text()
    for words in (
        "temperature 0.7",
        SEEDED,
        "safe up to, nats",
        "stale weights: no older checkpoint",
        "a &lt;case&gt;",
    ):
        assert words in text
    assert text == page(result, title="a <case>")
    assert "No floor was measured" in page(replace(result, alarm=None))


def test_a_part_of_zero_is_written_and_the_floor_is_a_line(result):
    drawn = gap_parts(result)
    [axes] = drawn.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["temperature", "interactions", "rest"]
    assert any(text.get_text() == "0" for text in axes.texts)
    assert svg_text(drawn)


def test_steps_with_an_alarm_are_marked(result):
    history = {0: result, 5: replace(result, alarms={"mean": 2.0})}
    [axes] = over_steps(history).axes
    labels = {line.get_label(): line for line in axes.lines}
    assert set(labels) == {"gap", "temperature", "rest", "alarm"}
    assert list(labels["alarm"].get_xdata()) == [5]
    assert list(labels["gap"].get_xdata()) == [0, 5]
    assert not over_steps({}).axes
