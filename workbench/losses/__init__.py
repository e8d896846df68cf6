"""Policy losses as pure per-token arithmetic: tensors in, named terms out; no ranks, no model, no files.

Names are imported when they are first used. Settings: `workbench.specs.losses`.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "DocumentSums": "document_sums",
    "Loss": "terms",
    "LossInputs": "terms",
    "SURROGATES": "build",
    "Term": "terms",
    "build_loss": "build",
    "ratio_curves": "build",
}
"""Public name -> its module here."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'workbench.losses' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"workbench.losses.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
