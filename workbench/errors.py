"""Errors of the workbench.

Every message has the same four parts: the request, what was found instead, the rule, and the fix. Every error is
picklable, because errors cross process boundaries.

    WorkbenchError
    |-- ShapeError(ValueError)        a tensor's shape, dtype or values break a stated rule
    |-- ShardingError(ValueError)     tokens, heads or ranks cannot be divided as requested
    |-- UnreducedError(TypeError)     a number was read while it is still a partial sum over mesh axes
    |-- SpecError(ValueError)         a setting is unknown, contradictory or out of range
    |-- LaunchError(RuntimeError)     a job could not be started or did not end well
    |-- RecordError(RuntimeError)     a file is missing, damaged or of another version
    `-- VerdictError(AssertionError)  two configurations that had to agree do not

To add one: derive it from WorkbenchError and from the standard exception that it replaces, add it to this tree, and
give it no constructor of its own.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PART_LIMITS = {"requested": (4, 800), "found": (18, 2000), "rule": (4, 700), "fix": (4, 500)}
"""Lines and characters of each part that a message shows: 30 lines and 4,000 characters in all, about one screen."""


class WorkbenchError(Exception):
    """Base of every error that the user can fix. A message is at most one screen; `parts` has all of it.

    Args:
        requested: the request, with its values.
        found: the actual state.
        rule: the requirement.
        fix: the remedy.
    """

    def __init__(self, requested: str, *, found: str = "", rule: str = "", fix: str = "") -> None:
        self.parts = {"requested": requested, "found": found, "rule": rule, "fix": fix}
        shown = {name: _clipped(text, *PART_LIMITS[name]) for name, text in self.parts.items()}
        labels = {"found": "found", "rule": "rule", "fix": "do"}
        lines = [shown["requested"], *(f"  {label}: {shown[name]}" for name, label in labels.items() if shown[name])]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.parts, self.__dict__.get("__notes__", []))

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython shows instead of a traceback: the user's own line, the message, notes and the cause."""
        notes = [f"  {note}" for note in getattr(self, "__notes__", [])]
        cause = self.__cause__
        if cause is not None and not isinstance(cause, WorkbenchError):
            notes += [f"  caused by {line}" for line in traceback.format_exception_only(cause)[-1].splitlines()]
        return [*_own_line(self), *f"{type(self).__name__}: {self}".splitlines(), *notes]


def listed(items: Iterable[Any], most: int = 8, *, rest: str = "", separator: str = ", ") -> str:
    """Join items for a message; of more than ``most`` the others are counted, and ``rest`` tells where all of them are.

    Example:
        >>> listed(range(9), 2, rest="in the file")
        '0, 1 and 7 more (in the file)'
    """
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return separator.join(texts)
    return f"{separator.join(texts[:most])} and {len(texts) - most} more" + (f" ({rest})" if rest else "")


def check_kind(what: str, value: Any, kinds: type | tuple[type, ...], fix: str) -> None:
    """Raise if an argument is of no accepted kind.

    Raises:
        SpecError: it names the argument, its value and the accepted types.
    """
    accepted = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, accepted):
        text = repr(value)
        raise SpecError(
            what,
            found=f"a {type(value).__name__}, {text if len(text) < 80 else text[:80] + '...'}",
            rule=f"a {' or '.join(kind.__name__ for kind in accepted)}",
            fix=fix,
        )


def _clipped(text: str, lines: int, characters: int) -> str:
    """Shorten a text in its middle: mistakes are listed first, and a traceback ends with its error."""
    rows = text.split("\n")
    if len(rows) > lines:
        head = max(1, 2 * lines // 3)
        rows = [*rows[:head], f"... {len(rows) - lines + 1} more lines ...", *rows[len(rows) - (lines - head - 1) :]]
        text = "\n".join(rows)
    if len(text) > characters:
        tail = characters // 4
        text = f"{text[: characters - tail]} ... {len(text) - characters} more characters ... {text[-tail:]}"
    return text


def _own_line(error: BaseException) -> list[str]:
    """The user's last line before the package was called; [] if there is none."""
    inside = (str(Path(__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return [f"line {frames[-1].lineno}: {frames[-1].line}"] if frames and frames[-1].line else []


def nearest_names(name: Any, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return at most so many known names that a misspelt one may mean, nearest first.

    ``cutoff`` is the least similarity: twice the number of matching characters over that of all, 0.6 in `difflib`.
    """
    return difflib.get_close_matches(str(name), list(known), n=most, cutoff=cutoff)


def did_you_mean(name: Any, known: Iterable[str], otherwise: str = "", *, most: int = 1, show: Any = repr) -> str:
    """Return a question with the known names that are nearest to a misspelt one; ``otherwise`` if none is near."""
    near = nearest_names(name, known, most=most)
    return f"did you mean {' or '.join(map(show, near))}?" if near else otherwise


def _rebuild(kind: type[WorkbenchError], parts: dict[str, str], notes: list[str]) -> WorkbenchError:
    error = kind(parts["requested"], found=parts["found"], rule=parts["rule"], fix=parts["fix"])
    for note in notes:
        error.add_note(note)
    return error


class ShapeError(WorkbenchError, ValueError):
    """A tensor's shape, dtype or values break a stated rule."""


class ShardingError(WorkbenchError, ValueError):
    """Tokens, heads or ranks cannot be divided as requested."""


class UnreducedError(WorkbenchError, TypeError):
    """A number was read while it is still a partial sum over mesh axes."""


class SpecError(WorkbenchError, ValueError):
    """A setting is unknown, contradictory or out of range."""


class LaunchError(WorkbenchError, RuntimeError):
    """A job could not be started or did not end well."""


class RecordError(WorkbenchError, RuntimeError):
    """A file is missing, damaged or of another version."""


class VerdictError(WorkbenchError, AssertionError):
    """Two configurations that had to agree do not.

    Attributes:
        judged: the proof, diagnosis or score that failed, of which a page can be drawn; None after pickling.
    """

    judged: Any = None

    def about(self, judged: Any) -> VerdictError:
        """Attach what was judged, and return the error."""
        self.judged = judged
        return self
