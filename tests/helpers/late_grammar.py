"""A pytest plugin: the grammar of IRIs is compiled when one is checked, not when jsonschema is imported.

rfc3987_syntax, which jsonschema imports where JupyterLab is installed, compiles it for 1.7 s of CPU time in every
process; no test reads it. The package does the same where it imports nbformat (`workbench.report.notebook`).
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "rfc3987_syntax"


class LateGrammar:
    """Find a module in place of the real one, which it imports at the first call."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of the stand-in."""
        return ModuleSpec(name, self) if name == NAME else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the stand-in the one function that jsonschema calls."""
        module.is_valid_syntax = _is_valid_syntax


def _is_valid_syntax(term: str, value: str) -> bool:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LateGrammar)]
    sys.modules.pop(NAME, None)
    return importlib.import_module(NAME).is_valid_syntax(term, value)


sys.meta_path.insert(0, LateGrammar())
