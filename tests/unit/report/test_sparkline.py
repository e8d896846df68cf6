"""sparkline: scaled to what is finite, honest about what is not, the same bytes for the same values."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.helpers.trials import HOSTILE
from workbench.report.sparkline import HEIGHT, WIDTH, sparkline, sparkline_text, summary

NAN, INF = math.nan, math.inf


def points(drawn):
    """[(x, y), ...] of every line."""
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ElementTree.fromstring(drawn).iter("polyline")
    ]


def test_the_drawing_is_scaled_to_the_finite_values():
    [line] = points(sparkline([1.0, 3.0, 2.0], label="loss"))
    assert [x for x, _ in line] == [2.0, WIDTH / 2, WIDTH - 2]
    assert [y for _, y in line] == [HEIGHT - 2, 2.0, HEIGHT / 2]


@pytest.mark.parametrize("lost", [NAN, INF, -INF, None])
def test_what_is_not_finite_is_a_cross_in_a_gap_and_moves_no_scale(lost):
    drawn = sparkline([1.0, 2.0, lost, 1.0, 2.0], label="loss")
    before, after = points(drawn)
    assert {y for _, y in before} == {y for _, y in after} == {2.0, HEIGHT - 2}
    assert before[-1][0] < WIDTH / 2 < after[0][0]
    [cross] = list(ElementTree.fromstring(drawn).iter("path"))
    assert cross.get("class") == "lost"
    assert cross.get("d").startswith(f"M{WIDTH / 2 - 2:.1f} ")


def test_a_value_alone_between_lost_ones_is_a_dot():
    drawn = ElementTree.fromstring(sparkline([NAN, 5.0, NAN], label="loss"))
    assert [circle.get("cx") for circle in drawn.iter("circle")] == [f"{WIDTH / 2:.1f}"]
    assert not list(drawn.iter("polyline"))


@pytest.mark.parametrize("values", [[], [NAN], [2.0], [2.0, 2.0], [1e308, -1e308], [5e-324, 0.0]])
def test_odd_series_are_drawn_inside_the_box(values):
    drawn = sparkline(values, label="loss")
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in points(drawn) for x, y in line)
    assert "nan" not in re.sub(r"<title>.*?</title>|aria-label=\"[^\"]*\"", "", drawn)


def test_a_long_series_is_thinned_and_keeps_its_spike_and_its_loss():
    values = [1.0] * 50_000
    values[31_234], values[777] = 9.0, NAN
    drawn = sparkline(values, label="loss")
    assert len(drawn) < 5000
    assert min(y for line in points(drawn) for _, y in line) == 2.0
    assert 'class="lost"' in drawn


def test_the_same_values_give_the_same_bytes_and_others_do_not():
    values = [math.sin(step) for step in range(1000)]
    assert sparkline(values, label="loss") == sparkline(tuple(values), label="loss")
    assert sparkline(values, label="loss") != sparkline(values[:-1], label="loss")


def test_it_says_in_words_what_it_draws_and_quotes_safely():
    drawn = ElementTree.fromstring(sparkline([0.5, NAN, 0.25], label=HOSTILE))
    words = f"{HOSTILE}: 3 values, last 0.250, from 0.250 to 0.500, 1 not finite"
    assert drawn.get("role") == "img"
    assert drawn.get("aria-label") == words
    assert drawn.find("title").text == words
    assert not list(drawn.iter("script"))


def test_its_ink_is_that_of_the_text_around_it():
    assert set(re.findall(r'stroke="([^"]*)"', sparkline([1, 2], label="loss"))) == {"currentColor"}


def test_the_text_twin_has_a_letter_a_value_and_shows_the_last_ones():
    assert sparkline_text([1.0, 3.0, NAN, 2.0]) == "▁█×▅"
    assert sparkline_text(range(100), width=8) == "▁▂▃▄▅▆▇█"
    assert (sparkline_text([]), sparkline_text([4.0, 4.0])) == ("", "▅▅")


def test_summaries():
    assert summary([]) == "no values yet"
    assert summary([2.0]) == "1 value, last 2.00"
    assert summary([INF, 1.0, 2.0]) == "3 values, last 2.00, from 1.00 to 2.00, 1 not finite"
