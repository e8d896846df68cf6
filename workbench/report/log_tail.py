"""The end of a growing log, read from where the last read stopped.

Shown as on a terminal, without its colours; of a line that overwrites itself, the last state.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

LINES = 200
_READ_BYTES = 64 * 1024  # per read; the beginning of what came faster than that is skipped
_LINE_LETTERS = 2000
_TERMINAL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class LogTail:
    """The last lines of one file.

    Args:
        path: of the log; it need not exist yet.
        lines: number of lines to keep.

    Attributes:
        passed_over: bytes of the file that were skipped, because the log grew too fast.
    """

    def __init__(self, path: Path, lines: int = LINES) -> None:
        self.path = path
        self.passed_over = 0
        self._lines: deque[str] = deque(maxlen=lines)
        self._offset, self._rest = 0, b""
        self._cut = False  # the current line lacks its beginning

    def read(self) -> bool:
        """Read what is new; return True if there was anything."""
        try:
            size = self.path.stat().st_size
            if size == self._offset:
                return False
            if size < self._offset:  # the log was started again
                self._lines.clear()
                self._offset, self._rest, self.passed_over, self._cut = 0, b"", 0, False
            begin = max(self._offset, size - _READ_BYTES)
            with self.path.open("rb") as file:
                file.seek(begin)
                content = file.read(size - begin)
        except OSError:
            return False
        if begin > self._offset:
            self.passed_over += begin - self._offset
            self._rest, self._cut = b"", True
        self._offset = begin + len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        if whole and self._cut:
            whole[0], self._cut = b"... " + whole[0], False
        self._lines.extend(map(_as_text, whole))
        self._rest = self._rest[-_READ_BYTES:]
        return bool(content)

    def text(self) -> str:
        """Return the last lines; the very last one may be incomplete."""
        lines = [*self._lines, *([_as_text(self._rest)] if self._rest else [])]
        return "\n".join(lines[-(self._lines.maxlen or LINES) :])


def _as_text(line: bytes) -> str:
    plain = _TERMINAL.sub(b"", line).rstrip(b"\r")
    shown = plain.rpartition(b"\r")[2].decode("utf8", errors="replace")
    shown = "".join(
        letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in shown
    )
    return shown if len(shown) <= _LINE_LETTERS else f"{shown[:_LINE_LETTERS]} ..."
