"""Intermediate results that many readings of one step share, kept while it is judged."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Result = TypeVar("Result")
KEPT = 4
"""Results of one name that are kept: the step's own and those of the mistakes in turn, which come in families."""


class Memo:
    """Results by the objects and settings that they depend on; objects, such as tensors, are compared by identity."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[Hashable, tuple[Any, Any]]] = {}

    def get(self, name: str, objects: tuple[object, ...], settings: Hashable, compute: Callable[[], Result]) -> Result:
        """Return the result for these objects and settings; computed once, unless it was dropped for newer ones."""
        entries = self._entries.setdefault(name, {})
        key = (*map(id, objects), settings)
        if key not in entries:
            if len(entries) >= KEPT:
                del entries[next(iter(entries))]
            entries[key] = (objects, compute())  # the objects stay alive, so that an id is not used twice
        else:
            entries[key] = entries.pop(key)
        result: Result = entries[key][1]
        return result
