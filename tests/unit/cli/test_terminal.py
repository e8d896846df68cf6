"""Nothing that was read from a disk commands the terminal; columns stand."""

from __future__ import annotations

import contextlib
import io

import pytest

from workbench.cli.terminal import print_lines, safe, safe_lines, size, table, when, width


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten", r"over\rwritten"),
        ("\x9b31m", r"\x9b31m"),  # the same as ESC [ in one letter
        ("a\u202eb", r"a\u202eb"),  # turns the reading direction
        ("two\nlines", r"two\nlines"),
        ("\x08\x7f\x00", r"\x08\x7f\x00"),
        ("\ud800", r"\ud800"),
        ("a\tb", "a\tb"),
        ("grün 中 ∑", "grün 中 ∑"),
    ],
)
def test_control_sequences_are_escaped(hostile, shown):
    assert safe(hostile) == shown


def test_lines_stay_lines():
    assert safe_lines("a\x1b\nb\r") == ["a\\x1b", "b\\r"]


def test_columns_are_aligned_and_empty_ones_dropped():
    assert table([["a", "", "bb"], ["ccc", "", "d\x1b"]], ("X", "Y", "Z")) == ["X    Z", "a    bb", "ccc  d\\x1b"]
    assert table([]) == []


def test_a_narrow_terminal_folds_cells_and_loses_nothing():
    assert table([["abc", "de fgh"]], width=8) == ["abc  de", "     fgh"]
    assert table([["abc", "defgh"]], width=7) == ["abc  defgh"]


def test_a_terminal_without_the_letters_gets_their_numbers():
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(output):
        print_lines(["grün", "plain"])
    output.flush()
    assert output.buffer.getvalue() == b"gr\\xfcn\nplain\n"


def test_output_to_a_file_is_not_folded(capsys):
    assert width() is None


def test_moments_and_sizes():
    assert when(None) == ""
    assert when(1_700_000_000_000_000_000)[:8] == "2023-11-"
    assert [size(count) for count in (1023, 1024, 3 * 2**20, 2**41)] == ["1023 B", "1.0 KiB", "3.0 MiB", "2.0 TiB"]
