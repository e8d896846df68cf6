"""Docstrings of settings are their descriptions, and are read only for a schema."""

from __future__ import annotations

import subprocess
import sys

from pydantic import Field

from workbench.records.provenance import project_root
from workbench.specs.losses.base import Settings


class Plain(Settings):
    """One of each."""

    told: int = Field(1, description="by itself")
    """Not this."""
    documented: int = 1
    """Two
    lines."""
    kept: int = 1
    """Inherited."""
    silent: int = 1


class Derived(Plain):
    """Inherits a description, and replaces a field."""

    silent: int = 2
    """Now told."""
    documented: int = 2


class Whole(Settings):
    """Contains one that is derived."""

    part: Derived = Derived()
    """A part."""


def descriptions(properties):
    return {name: part.get("description") for name, part in properties.items()}


def test_docstrings_are_descriptions():
    properties = Plain.model_json_schema()["properties"]
    assert descriptions(properties) == {
        "told": "by itself",
        "documented": "Two\nlines.",
        "kept": "Inherited.",
        "silent": None,
    }


def test_also_those_of_parts_and_of_inherited_fields():
    schema = Whole.model_json_schema()
    assert descriptions(schema["properties"]) == {"part": "A part."}
    assert descriptions(schema["$defs"]["Derived"]["properties"]) == {
        "told": "by itself",
        "documented": None,  # replaced, and without a docstring
        "kept": "Inherited.",
        "silent": "Now told.",
    }


def test_a_class_without_source_has_none():
    namespace = {"__name__": "nowhere", "Settings": Settings}
    exec("class Own(Settings):\n    field: int = 1\n    'told'\n", namespace)
    assert descriptions(namespace["Own"].model_json_schema()["properties"]) == {"field": None}


def test_importing_settings_parses_no_source():
    code = "import ast, pydantic.main; ast.parse = None; import workbench.launch.ablation"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project_root())
    assert done.returncode == 0, done.stderr
