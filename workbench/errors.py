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
from collections.abc import Iterable
from typing import Any


class WorkbenchError(Exception):
    """Base of every error that the user can fix.

    Args:
        requested: the request, with its values.
        found: the actual state.
        rule: the requirement.
        fix: the remedy.
    """

    def __init__(self, requested: str, *, found: str = "", rule: str = "", fix: str = "") -> None:
        self.parts = {"requested": requested, "found": found, "rule": rule, "fix": fix}
        lines = [requested]
        lines += [f"  {label}: {text}" for label, text in (("found", found), ("rule", rule), ("do", fix)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.parts, self.__dict__.get("__notes__", []))


def did_you_mean(name: Any, known: Iterable[str], otherwise: str = "", *, most: int = 1, show: Any = repr) -> str:
    """Return a question with the known names that are nearest to a misspelt one; ``otherwise`` if none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=most)
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
    """Two configurations that had to agree do not."""
