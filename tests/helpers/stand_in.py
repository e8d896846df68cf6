"""A library for one module of ours only: the test replaces the module's own name for it, and nobody else's.

monkeypatch.setattr(doctor, "shutil", stand_in(shutil, disk_usage=lambda folder: full))
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class _StandIn(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:  # for what is not replaced
        return getattr(object.__getattribute__(self, "_real"), name)


def stand_in(real: Any, **replaced: Any) -> Any:
    """What answers like ``real`` but for some of its attributes."""
    return _StandIn(_real=real, **replaced)
