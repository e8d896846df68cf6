"""The page of the precision record: its rows, its sentences, and its parts."""

import re

from experiments.precision import page


def test_the_saved_page_is_that_of_the_record():
    assert page.RECORD.with_name("report.html").read_text() == page.page(page.load_record())


def test_rows_are_in_units_of_bf16_mixed():
    lines = {line[0]: line[1:] for line in page.rows(page.load_record())}
    assert lines["bf16_mixed"][:4] == ["1.0"] * 4
    assert "float64" not in lines
    assert lines["bf16_pure"][page.COLUMNS.index("unmoved")] == "100 %"


def test_the_answer_has_the_numbers_of_the_record():
    record = page.load_record()
    shown = re.search(r"lose (\d+) % of the updates of (\d+) steps", page.answer(record))
    assert shown.groups() == ("100", str(record["steps"]))


def test_every_choice_is_drawn_once():
    record = page.load_record()
    [axes] = page.error_against_time(record).axes
    looks = [(line.get_marker(), line.get_color()) for line in axes.lines]
    assert len(set(looks)) == len(looks) == len(record["choices"]) - 1
