"""rows: every state by symbol and label, every string escaped, and a scoped style sheet."""

import html.parser
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.helpers.trials import HOSTILE
from workbench.records.states import STATES
from workbench.report.markup import style_sheet
from workbench.report.rows import (
    HEIGHT,
    SIGNS,
    WIDTH,
    chip,
    heading,
    row,
    shared_place,
    sparkline,
    sparkline_text,
    summary,
    table_of,
)
from workbench.report.trial import GONE, Trial

TRIAL = Trial("cp2", "cp2-0badcafe", "running", 1, 4, 2, (0.5,), (1.0,), 3.0, note="a note")


class Elements(html.parser.HTMLParser):
    """Parsed elements with attributes, and text."""

    def __init__(self, markup):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(str(markup))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_every_state_has_a_symbol_and_a_label():
    assert set(SIGNS) == {*STATES, GONE}
    assert len(set(SIGNS.values())) == len(SIGNS)
    for state in SIGNS:
        assert Elements(chip(state)).text == f"{SIGNS[state]} {state}"


def test_progress_has_text_for_screen_readers():
    bar = next(attributes for _, attributes in Elements(row(TRIAL)).elements if attributes.get("role") == "progressbar")
    assert (bar["aria-valuenow"], bar["aria-valuemax"], bar["aria-label"]) == ("1", "4", "steps of cp2")
    assert 'style="width:25%"' in row(TRIAL)


def test_a_row_has_name_state_numbers_and_note():
    text = Elements(row(TRIAL)).text
    for message in ("cp2", "2 ranks", "▸ running", "1/4", "0.500", "1.00", "3 s", "a note"):
        assert message in text


def test_nothing_that_is_quoted_becomes_markup():
    hostile = Trial(HOSTILE, HOSTILE, HOSTILE, 1, 4, 1, (0.5,), (), 3.0, note=HOSTILE, place=HOSTILE)
    result = Elements(table_of(HOSTILE, [hostile]))
    assert {tag for tag, _ in result.elements} <= {
        "div",
        "style",
        "span",
        "strong",
        "b",
        "i",
        "small",
        "svg",
        "title",
        "polyline",
        "circle",
        "wbr",
    }
    assert not [key for _, attributes in result.elements for key in attributes if key.startswith("on")]
    assert result.text.count("alert('x')") >= 4


def test_the_heading_counts_states_in_their_order():
    trials = [
        Trial("a", "a", "running", 0, 1, 1),
        Trial("b", "b", "pending", 0, 1, 1),
        Trial("c", "c", "running", 0, 1, 1),
    ]
    assert Elements(heading("exp", trials, 65.0)).text == "exp… pending 1▸ running 21 min 5 s"


def test_common_facts_are_shown_once():
    trials = [Trial(name, name, "running", 0, 1, 1, place="on cpu: no GPU here") for name in "ab"]
    assert shared_place(trials) == "on cpu: no GPU here"
    assert table_of("exp", trials).count("no GPU here") == 1
    other = Trial("c", "c", "running", 0, 1, 1)
    assert shared_place([*trials, other]) == ""
    assert table_of("exp", [*trials, other]).count("no GPU here") == 2


def test_the_style_stays_inside_its_element_and_takes_its_colours_from_the_theme():
    sheet = style_sheet("live.css")
    depth, outside, current = 0, [], ""
    for letter in sheet.partition("*/")[2]:
        if letter == "{":
            outside += [current.strip()] if depth == 0 else []
            depth, current = depth + 1, ""
        elif letter == "}":
            depth, current = depth - 1, ""
        else:
            current += letter
    assert (depth, outside) == (0, [".workbench-live"])
    assert "@import" not in sheet
    assert "url(" not in sheet
    assert "var(--jp-ui-font-color1" in sheet


# ---- sparkline: scaled to finite values, explicit about others, the same bytes for the same val ----


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
def test_a_non_finite_value_is_a_cross_in_a_gap_and_does_not_set_the_scale(lost):
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


def test_has_a_text_description_and_escapes_it():
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
