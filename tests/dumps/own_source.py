"""Functions of a system, executed from its source file where importing the module needs packages that it does not use.

Nothing of a function is changed: its source is compiled as it stands, with the names that it refers to.
"""

import ast
from pathlib import Path
from typing import Any


def function(path: Path, name: str, names: dict[str, Any]) -> Any:
    """Return a function ("name") or method ("Class.name") of a source file; ``names`` are the globals that it uses."""
    body = ast.parse(path.read_text()).body
    *owner, last = name.split(".")
    for part in owner:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == part).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    node = next(node for node in body if isinstance(node, kinds) and node.name == last)
    future = ast.parse("from __future__ import annotations").body
    scope = dict(names)
    exec(compile(ast.Module([*future, node], []), str(path), "exec"), scope)
    return scope[last]


class Placeholder:
    """A module, function or context of an engine that is imported and has no effect on what is written."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Placeholder()

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return None
