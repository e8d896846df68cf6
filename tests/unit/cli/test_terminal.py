"""Nothing that was read from a disk commands the terminal; columns stand."""

from __future__ import annotations

import contextlib
import gc
import io
import subprocess
import sys

import pytest

from workbench.cli.terminal import Writer, print_lines, safe, safe_lines, safe_output, size, table, when, width


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
    with contextlib.redirect_stdout(output), safe_output():
        print_lines(["grün", "plain"])
    output.flush()
    assert output.buffer.getvalue() == b"gr\\xfcn\nplain\n"


def test_output_to_a_file_is_not_folded(capsys):
    assert width() is None


def test_moments_and_sizes():
    assert when(None) == ""
    assert when(1_700_000_000_000_000_000)[:8] == "2023-11-"
    assert [size(count) for count in (1023, 1024, 3 * 2**20, 2**41)] == ["1023 B", "1.0 KiB", "3.0 MiB", "2.0 TiB"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\n", "a\\x1b[2Jb\n"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),  # colours of a help text
        ("\r\x1b[K3 steps", "\r\x1b[K3 steps"),  # a line of progress
        ("a\r\x1b[Kb", "a\\r\\x1b[Kb"),
        ("\x7f\x9b31m\u202e", "\\x7f\\x9b31m\\u202e"),
        ("gr\xf6\xdfer \ud800", "gr\\xf6\\xdfer \\ud800"),  # the stream is ASCII
    ],
)
def test_whatever_is_printed_is_escaped_by_the_writer(text, shown):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", newline="")
    print(text, end="", file=Writer(stream), flush=True)
    assert buffer.getvalue().decode("ascii") == shown


def test_a_deleted_writer_leaves_its_stream_open():
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        for _ in range(2):
            with safe_output():
                print_lines(["x\x1b[2J"])
            gc.collect()
    assert stream.getvalue() == "x\\x1b[2J\n" * 2


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 2, "No space left on device"),
        ("; mkdir gone; cd gone; rmdir ../gone; {}", 2, "the current folder was removed"),
    ],
)
def test_closed_and_full_outputs_and_a_removed_folder(tmp_path, redirection, code, message):
    from workbench.records.provenance import project_root

    program = f"{sys.executable} -m workbench --help"
    line = f"true {redirection.format(program)}" if "{}" in redirection else f"{program} {redirection}"
    environment = {"PYTHONPATH": str(project_root()), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert message in done.stderr
