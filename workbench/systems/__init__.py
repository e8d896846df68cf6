"""Settings of other systems: translation to a `LossSpec`, comparison, and replay of their functions. See README.md.

Names are imported lazily.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "SYSTEMS": "registry",
    "load_system": "registry",
    "loss_spec": "translate",
    "settings_for": "translate",
    "replay": "replays",
    "case_settings": "replays",
    "explain": "explanations",
    "contract_table": "translate",
    "scaling_contract": "translate",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'workbench.systems' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"workbench.systems.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
