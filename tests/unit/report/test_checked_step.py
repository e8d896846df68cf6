"""The page of a checked step: every token that differs is marked, and only those."""

import re
from dataclasses import replace

import pytest
import torch

from tests.helpers.dumped_step import LENGTHS, ROWS, WIDTH, dump, inputs
from workbench.check import check_step
from workbench.errors import SpecError
from workbench.report import checked_step
from workbench.report.checked_step import page, write_page


@pytest.fixture(scope="module")
def differing():
    weights = inputs()["loss_mask"].double() / inputs()["loss_mask"].sum()
    weights[3] *= 2
    return check_step(dump(weights=weights, origin="a <step>"))


def documents(text):
    """Document -> (tokens, tokens that differ by its title, marked rows)."""
    parts = re.split(r"<h3>document (\d+): (\d+) tokens, (\d+) differ</h3>", text.partition('id="section-2"')[2])[1:]
    return {
        int(number): (int(tokens), int(differ), body.partition("</table>")[0].count(">≠</td>"))
        for number, tokens, differ, body in zip(*[iter(parts)] * 4, strict=True)
    }


def test_tokens_that_differ_are_marked_and_come_first(differing):
    drawn = documents(page(differing))
    assert list(drawn) == [3, 0, 1, 2, 4, 5, 6, 7]
    assert drawn[3] == (WIDTH, LENGTHS[3], LENGTHS[3])
    assert {differ for number, (_, *differ) in drawn.items() if number != 3 for differ in differ} == {0}
    assert len(drawn) == ROWS


def test_the_page_has_stages_causes_and_what_is_not_decided(differing, tmp_path):
    text = write_page(differing, tmp_path / "step.html").read_text()
    assert text == page(differing)
    assert "a &lt;step&gt;" in text
    assert "a <step>" not in text
    assert "first in the stage coefficients" in text
    for sentence in differing.undecided[:1]:
        assert sentence[:40] in text
    assert not re.search(r'(src|href)="(?!#)', text)


def test_a_long_step_shows_a_part_and_says_so(differing, monkeypatch):
    monkeypatch.setattr(checked_step, "MOST_TOKENS", 2 * WIDTH)
    text = page(differing)
    assert list(documents(text)) == [3, 0]
    assert "6 further documents are not drawn" in text
    monkeypatch.setattr(checked_step, "MOST_TOKENS", 3)
    assert documents(page(differing))[3][2] == 3


def test_a_step_that_agrees_marks_nothing():
    text = page(check_step(dump()))
    assert "It agrees" in text
    assert "Nothing differs." in text
    assert "≠</td>" not in text


def test_tokens_that_do_not_train_are_not_marked(differing):
    coefficients = differing.numbers.recorded["coefficients"].clone()
    coefficients[~differing.numbers.reading.dump.loss_mask_T] = torch.nan
    other = replace(differing.numbers, recorded={**differing.numbers.recorded, "coefficients": coefficients})
    assert documents(page(replace(differing, numbers=other)))[3][1] == LENGTHS[3]


def test_a_check_without_numbers_is_refused(differing):
    with pytest.raises(SpecError, match="without its numbers"):
        page(replace(differing, numbers=None))
