"""Columns stand, and every letter of every cell is printed, however narrow the terminal is."""

from __future__ import annotations

import pytest

from workbench.columns import columns

HEADS = ("RUN", "STATE", "WHEN", "WHY")
ROW = ("missing_cp_factor", "different", "2026-11-22 10:00:00", "a/path/without/any/space/in/it and [bold]words[/] :x:")


def test_lines_are_whole_without_a_width():
    assert columns([("tp2", "equal", "1"), ("one_rank", "", "20")]) == ["tp2       equal  1", "one_rank         20"]
    assert columns([("x" * 500, "y " * 500)])[0] == f"{'x' * 500}  {'y ' * 500}".rstrip()
    assert columns([], HEADS) == []


@pytest.mark.parametrize("width", range(1, 140, 6))
def test_no_letter_is_lost_and_names_stay_whole_in_any_width(width):
    lines = columns([ROW], HEADS, width=width)
    assert sorted("".join(lines).replace(" ", "")) == sorted("".join(HEADS + ROW).replace(" ", ""))
    assert lines[1].startswith("missing_cp_factor  different  2026-11-22")


def test_a_long_name_is_not_folded_while_words_can_be():
    lines = columns([("x" * 40, "many short words " * 9)], width=60)
    assert lines[0].startswith(f"{'x' * 40}  many short words")
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("width", [80, 90, 120])
def test_lines_fit_where_the_longest_words_fit(width):
    assert max(map(len, columns([ROW], HEADS, width=width))) <= width


def test_numbers_are_right_aligned_and_first_columns_have_a_minimum():
    assert columns([("a", "1.5"), ("b", "22")], ("name", "mean"), numbers_from=1, least=(6,)) == [
        "name    mean",
        "a        1.5",
        "b         22",
    ]


def test_letters_that_take_two_cells_are_counted_as_two():
    assert columns([("中文", "x"), ("abcd", "y")]) == ["中文  x", "abcd  y"]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([("中文", "x y"), ("", "-"), ("e\u0301 [b]", "99")], {"heads": ("RUN", "WHY IT")}),
        ([("a", "1.5"), ("bb", "22"), ("", "")], {"heads": ("name", "mean"), "numbers_from": 1, "least": (6,)}),
        ([("one", "", "three")], {}),
    ],
)
def test_lines_without_a_width_are_those_that_rich_draws_where_nothing_is_folded(rows, options):
    assert columns(rows, **options) == columns(rows, **options, width=1000)
