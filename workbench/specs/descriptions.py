"""Docstrings of settings as the descriptions of their fields, read when a schema is asked for.

pydantic reads them while it creates a class (``use_attribute_docstrings``): for each it searches all loaded modules and
parses the source again. That was more than half of the time to import the settings, in every rank and every command.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Sequence

from pydantic import BaseModel


def describe_fields(models: Sequence[type[BaseModel]]) -> None:
    """Give the fields of models their docstrings as descriptions, and build the models again, for their schemas.

    A field keeps a description that it has.

    Args:
        models: in the order of their creation: what a model contains is older.
    """
    news = [_describe(model) for model in models]
    if any(news):
        for model in models:
            model.model_rebuild(force=True)


def _describe(model: type[BaseModel]) -> bool:
    """True if a field got a description."""
    new = False
    for name, field in model.model_fields.items():
        owner = next((base for base in model.__mro__ if name in inspect.get_annotations(base)), model)
        text = _docstrings(owner.__module__).get(owner.__qualname__, {}).get(name)
        if field.description is None and text is not None:
            field.description, new = text, True
    return new


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Class -> attribute -> the string that follows it, of a module; {} if its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    results: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):  # of the module itself: settings are defined in no other class
            results[node.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(text.value.value, str)
            }
    return results
