"""Reading of settings: YAML without duplicate keys, and every mistake in one error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from workbench.errors import SpecError, did_you_mean
from workbench.specs.losses import inherited_loss
from workbench.specs.mistakes import WHERE_SETTINGS_ARE, unusable
from workbench.specs.yaml_reader import parse_yaml


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested ``changes`` into a copy of ``base``.

    Raises:
        SpecError: a loss of another kind over one whose surrogate was given parameters; see
            `workbench.specs.losses.inherited_loss`.
    """
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        if nested and key == "loss":
            merged[key] = inherited_loss(merged[key], value)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def parse_spec(model: type[BaseModel], settings: Any, *, where: str) -> Any:
    """Validate settings from ``where``, such as a file, and report every mistake in one error.

    Raises:
        SpecError: an unknown key (with the nearest known one), a wrong type, a value out of range.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise unusable(where, error, model, fix=f"correct the file; {WHERE_SETTINGS_ARE}") from None


def read_yaml(path: Path) -> Any:
    """Read the settings in a YAML file, without duplicate keys.

    Raises:
        SpecError: no such file, not YAML, or a duplicate key (in plain YAML the last one silently wins).
    """
    try:
        return parse_yaml(path.read_text(encoding="utf8"), str(path))
    except FileNotFoundError:
        raise SpecError(
            f"read {path}",
            found="no such file",
            rule="a YAML file with an ablation or a spec",
            fix=_similar_file(path) or "check the path; experiments/ holds examples",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(
            f"read {path}", found=str(error), rule="valid YAML, every key once", fix="correct the place named above"
        ) from None


def _similar_file(path: Path) -> str:
    """Return a question with the nearest YAML file of the same folder; "" if there is none."""
    files = [file.name for file in path.parent.glob("*") if file.suffix in (".yaml", ".yml")]
    return did_you_mean(path.name, files)
