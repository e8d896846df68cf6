"""Audit events of Python during a test: files opened, processes started, connections made.

From Python's own audit events, so nothing is replaced. Python keeps an audit hook for ever; ours does nothing while no
test looks on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_looking: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextmanager
def audited(look: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call ``look`` with each event and its arguments, of all threads; the event's cause raises its errors."""
    _install()
    _looking.append(look)
    try:
        yield
    finally:
        _looking.remove(look)


@contextmanager
def files_opened(folder: Path) -> Iterator[list[Path]]:
    """Return the files under a folder in the order in which any code opened them."""
    results: list[Path] = []

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(folder)):
            results.append(Path(arguments[0]))

    with audited(look):
        yield results


@functools.cache
def _install() -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for look in tuple(_looking or ()):  # None when the interpreter ends
            look(event, arguments)

    sys.addaudithook(hook)
