"""Where two runs part: the sentence and the place."""

import re

from tests.helpers.trials import HOSTILE
from workbench.compare.bisect import Bisection, Divergence
from workbench.report.rich import as_html as drawn
from workbench.report.rich.bisection import as_html

PLACE = Divergence(0, "forward", "model.norm", 1, 2, (16, 24), 3, 9, "model.layers.2")


def cells(html):
    return dict(re.findall(r'<tr><th scope="row">(.*?)</th><td[^>]*>(.*?)</td></tr>', str(html)))


def test_the_place_stands_in_a_table():
    found = Bisection("one", "two", PLACE, 1, 59, {"one": {"data.micro_batches": 2}})
    html = as_html(found)
    assert cells(html) == {
        "step": "0",
        "way": "forward",
        "tensor": "<code>model.norm</code>",
        "row": "1",
        "tokens": "16 to 23",
        "blocks that differ": "3 of 9",
        "the same until": "<code>model.layers.2</code>",
    }
    assert 'class="trouble">one and two: step 0, forward: the output of model.norm' in html
    assert "one was run with data.micro_batches = 2" in html
    assert drawn(found) == str(html)


def test_where_no_tokens_can_be_named_none_are():
    html = as_html(Bisection("one", "two", Divergence(3, "weights", "head"), 4, 59, {}))
    assert list(cells(html)) == ["step", "way", "tensor"]


def test_equal_ones_are_no_trouble():
    html = as_html(Bisection("one", "two", None, 4, 59, {}))
    assert 'class="trouble"' not in html
    assert "the same bits in 4 steps" in html


def test_names_are_quoted():
    assert "<script" not in as_html(Bisection(HOSTILE, HOSTILE, Divergence(0, "loss", HOSTILE), 1, 1, {HOSTILE: {}}))
