"""rows: every state by sign and word, every string quoted, and a style that stays where it belongs."""

import html.parser

from tests.helpers.trials import HOSTILE
from workbench.records.directory import STATES
from workbench.report.rows import SIGNS, chip, heading, live_style, row, shared_place, table_of
from workbench.report.trial import GONE, Trial

TRIAL = Trial("cp2", "cp2-0badcafe", "running", 1, 4, 2, (0.5,), (1.0,), 3.0, note="a note")


class Elements(html.parser.HTMLParser):
    """What a browser would make of it: elements with attributes, and text."""

    def __init__(self, markup):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(markup)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_every_state_has_a_sign_and_its_word():
    assert set(SIGNS) == {*STATES, GONE}
    assert len(set(SIGNS.values())) == len(SIGNS)
    for state in SIGNS:
        assert Elements(chip(state)).text == f"{SIGNS[state]} {state}"


def test_progress_is_said_to_screen_readers():
    bar = next(attributes for _, attributes in Elements(row(TRIAL)).elements if attributes.get("role") == "progressbar")
    assert (bar["aria-valuenow"], bar["aria-valuemax"], bar["aria-label"]) == ("1", "4", "steps of cp2")
    assert 'style="width:25%"' in row(TRIAL)


def test_a_row_says_name_state_numbers_and_note():
    text = Elements(row(TRIAL)).text
    for said in ("cp2", "2 ranks", "▸ running", "1/4", "0.500", "1.00", "3 s", "a note"):
        assert said in text


def test_nothing_that_is_quoted_becomes_markup():
    hostile = Trial(HOSTILE, HOSTILE, HOSTILE, 1, 4, 1, (0.5,), (), 3.0, note=HOSTILE, place=HOSTILE)
    found = Elements(table_of(HOSTILE, [hostile]))
    assert {tag for tag, _ in found.elements} <= {
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
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    assert found.text.count("alert('x')") >= 4


def test_the_heading_counts_states_in_their_order():
    trials = [
        Trial("a", "a", "running", 0, 1, 1),
        Trial("b", "b", "pending", 0, 1, 1),
        Trial("c", "c", "running", 0, 1, 1),
    ]
    assert Elements(heading("exp", trials, 65.0)).text == "exp… pending 1▸ running 21 min 5 s"


def test_what_is_so_for_all_is_said_once():
    trials = [Trial(name, name, "running", 0, 1, 1, place="on cpu: no GPU here") for name in "ab"]
    assert shared_place(trials) == "on cpu: no GPU here"
    assert table_of("exp", trials).count("no GPU here") == 1
    other = Trial("c", "c", "running", 0, 1, 1)
    assert shared_place([*trials, other]) == ""
    assert table_of("exp", [*trials, other]).count("no GPU here") == 2


def test_the_style_stays_inside_its_element_and_takes_its_colours_from_the_theme():
    sheet = live_style()
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
