"""LogTail: the last lines of a file that grows, is begun anew, or says more than anybody can read."""

import pytest

from workbench.report.log_tail import LogTail


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank00000.log"


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


def test_a_log_that_is_not_there_yet_has_nothing_new(path):
    tail = LogTail(path)
    assert not tail.read()
    append(path, b"one\n")
    assert tail.read()
    assert tail.text() == "one"


def test_each_look_reads_only_what_is_new(path):
    tail = LogTail(path)
    append(path, b"one\ntw")
    assert tail.read()
    assert tail.text() == "one\ntw"
    assert not tail.read()
    append(path, b"o\nthree\n")
    assert tail.read()
    assert tail.text() == "one\ntwo\nthree"


def test_only_the_last_lines_are_kept(path):
    tail = LogTail(path, lines=3)
    append(path, b"".join(b"%d\n" % number for number in range(10)) + b"rest")
    tail.read()
    assert tail.text() == "8\n9\nrest"


def test_a_file_begun_anew_is_read_anew(path):
    tail = LogTail(path)
    append(path, b"a long first line of an earlier attempt\n")
    tail.read()
    path.write_bytes(b"new\n")
    assert tail.read()
    assert tail.text() == "new"


def test_of_a_flood_the_beginning_is_passed_over_and_counted(path):
    tail = LogTail(path)
    append(path, b"first\n")
    tail.read()
    append(path, b"x" * 99 + b"\n" + b"y" * 200_000 + b"\nlast\n")
    tail.read()
    assert tail.text().splitlines()[0] == "first"
    assert tail.text().splitlines()[1].startswith("... yyy")
    assert tail.text().splitlines()[1].endswith(" ...")
    assert tail.text().splitlines()[2:] == ["last"]
    assert tail.passed_over == path.stat().st_size - 6 - 64 * 1024


def test_a_letter_cut_by_a_look_is_whole_in_the_end(path):
    tail = LogTail(path)
    euro = "€\n".encode()
    append(path, euro[:2])
    tail.read()
    append(path, euro[2:])
    tail.read()
    assert tail.text() == "€"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[31mred\x1b[0m\n", "red"),
        (b"\x1b]0;title\x07words\n", "words"),
        (b" 10%\r 50%\r100%\n", "100%"),
        (b"windows\r\n", "windows"),
        (b"\xff\x00bell\x07\n", "\ufffd\ufffdbell\ufffd"),
        (b"tab\there\n", "tab\there"),
    ],
)
def test_it_shows_what_a_terminal_would_have_shown(path, written, shown):
    tail = LogTail(path)
    append(path, written)
    tail.read()
    assert tail.text() == shown
