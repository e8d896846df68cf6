"""Other systems' settings: translated into our spec, explained against each other, replayed. See README.md.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "SYSTEMS": "registry",
    "load_system": "registry",
    "loss_spec": "translate",
    "settings_for": "translate",
    "replay": "replays",
    "case_settings": "replays",
    "explain": "explanations",
    "contract_table": "contracts",
    "scaling_contract": "contracts",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'workbench.systems' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"workbench.systems.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
