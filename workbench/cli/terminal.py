"""Terminal output: tables, and text without control sequences.

Names, messages and logs come from disks and from other people. A terminal obeys control sequences in them: they can
hide lines, rename the window, or inject input. So everything that was read is printed through `safe`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO, cast

from workbench.columns import columns, escaped


def safe(text: str) -> str:
    r"""Escape everything in a text that a terminal would obey; tabs stay.

    Example:
        >>> safe("done\x1b[2J"), safe("a\tb")
        ('done\\x1b[2J', 'a\tb')
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def safe_lines(text: str) -> list[str]:
    """Split a text into lines, each `safe`."""
    return [safe(line) for line in text.split("\n")]


def table(rows: Sequence[Sequence[str]], heads: Sequence[str] = (), *, width: int | None = None) -> list[str]:
    """Format rows by `columns`; cells are escaped by `safe`, and a column without any content is left out."""
    clean = [[safe(cell).replace("\t", " ") for cell in row] for row in rows]
    used = [index for index in range(len(heads) or max(map(len, clean), default=0)) if any(row[index] for row in clean)]
    shown = [[row[index] for index in used] for row in clean]
    return columns(shown, [heads[index] for index in used] if heads else (), width=width)


_REDRAWN = "\r\x1b[K"
"""Beginning of a line of progress, which replaces the one before."""


class Writer:
    """A stream for text that may come from anywhere: escapes what a terminal would obey, and what its encoding lacks.

    Everything that the command line prints goes through it, tables and errors of libraries too.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write the text, escaped; an IOBase would close the stream when it is deleted, so this is none."""
        head = _REDRAWN if text.startswith(_REDRAWN) else ""
        rest = escaped(text[len(head) :])
        self.stream.write(head + rest)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Let all output of this process go through `Writer`; closed streams become those of the null device."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: no file of a record may become an output
    before = sys.stdout, sys.stderr
    out, err = (Path(os.devnull).open("w", encoding="utf8") if each is None else each for each in before)  # noqa: SIM115
    sys.stdout, sys.stderr = cast(TextIO, Writer(out)), cast(TextIO, Writer(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def print_lines(lines: Iterable[str], *, raw: bool = False) -> None:
    """Print lines; raw ones are not escaped, for readers that are no terminal."""
    for line in lines:
        print(line, file=getattr(sys.stdout, "stream", sys.stdout) if raw else sys.stdout)


_asked: ContextVar[list[Any] | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def asked_for_json() -> Iterator[list[Any]]:
    """Have the verb within give its result to `answered`; what it prints goes to standard error meanwhile."""
    result: list[Any] = []
    before = _asked.set(result)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield result
    finally:
        _asked.reset(before)


def answered(value: Callable[[], Any]) -> bool:
    """Store the result of the verb if ``--json`` was given; False if it is to be printed as text."""
    result = _asked.get()
    if result is None:
        return False
    result[:] = [value()]
    return True


def print_json(schema: str, content: Mapping[str, Any]) -> None:
    """Print a JSON object with the name and version of its schema."""
    from workbench.atomic import to_json

    print(to_json({"schema": schema, **content}).decode(), end="")


def width() -> int | None:
    """Return the characters in a line of the terminal; None if the output is no terminal, where nothing is folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def when(time_ns: int | None) -> str:
    """Format a moment in this machine's time zone, to the second; "" for None.

    Units: nanoseconds since 1970.
    """
    return "" if time_ns is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def size(count: int) -> str:
    """Format a number of bytes.

    Example:
        >>> size(0), size(2047), size(5 * 2**30)
        ('0 B', '2.0 KiB', '5.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    power = next((power for power in (1, 2, 3) if count / 1024**power < 1024), 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
