"""strips: pieces on a scale, and stretches of equal neighbours."""

import re

from tests.helpers.trials import HOSTILE
from workbench.report.rich.strips import Piece, framed, legend, runs, strip


def grown(drawn):
    return re.findall(r'<i class="(\w*)"[^>]*flex-grow:(\d+)', drawn)


def test_pieces_stand_side_by_side_and_the_rest_stays_empty():
    assert grown(strip([Piece(3, "prompt"), Piece(2, "up")], 8, label="a document")) == [
        ("prompt", "3"),
        ("up", "2"),
        ("gap", "3"),
    ]


def test_a_gap_between_pieces_is_a_gap():
    assert grown(strip([Piece(3, ""), Piece(2, "held")], 5, label="a rank")) == [("gap", "3"), ("held", "2")]


def test_stretches():
    assert runs([]) == []
    assert runs([1, 1, 2, 1]) == [(1, 0, 2), (2, 2, 3), (1, 3, 4)]


def test_texts_are_quoted():
    drawn = framed(strip([Piece(1, "up", HOSTILE, HOSTILE)], 1, label=HOSTILE), legend([("up", HOSTILE)]))
    assert "<script" not in drawn
    assert "<img" not in drawn
    assert drawn.count("&lt;script&gt;") == 4


def test_the_style_begins_and_ends_with_its_frame():
    style = framed().partition("<style>")[2].partition("</style>")[0].partition("*/")[2].strip()
    assert style.startswith(".workbench-rich {")
    assert style.endswith("}")
    assert "\n}\n" not in style
    assert "var(--jp-ui-font-color1" in style
