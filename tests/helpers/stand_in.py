"""A stand-in for a library in one module of ours only: the test replaces the module's own name for it.

monkeypatch.setattr(doctor, "shutil", stand_in(shutil, disk_usage=lambda folder: full))
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class _StandIn(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:  # for all other attributes
        return getattr(object.__getattribute__(self, "_real"), name)


def stand_in(real: Any, **replaced: Any) -> Any:
    """An object that behaves like ``real`` except for some of its attributes."""
    return _StandIn(_real=real, **replaced)
