"""Reading of settings: YAML without duplicate keys, and every mistake in one error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from workbench.errors import SpecError
from workbench.specs.losses import SURROGATES, check_inherited


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested ``changes`` into a copy of ``base``.

    Raises:
        SpecError: a loss of another kind over one whose surrogate was given parameters; see
            `workbench.specs.losses.check_inherited`.
    """
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        if nested and key == "loss":
            check_inherited(merged[key], value)
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
        raise SpecError(
            f"{where}: {error.error_count()} setting(s) cannot be used",
            found="; ".join(_message(model, e) for e in error.errors()),
            rule=f"settings of {model.__name__}; unknown keys are errors",
            fix="correct the file; `workbench run --help` lists every setting",
        ) from None


def _message(model: type[BaseModel], error: Any) -> str:
    pairs = zip(("", *error["loc"]), error["loc"], strict=False)
    path = ".".join(str(part) for group, part in pairs if not (group == "surrogate" and part in SURROGATES))
    if isinstance(error["input"], Mapping) and error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")  # from a validator of several settings
        return f"{path}: {text}" if path else text
    if error["type"] != "extra_forbidden":
        return f"{path} = {error['input']!r}: {error['msg']}"
    *parents, key = map(str, error["loc"])
    known = _fields(model, parents)
    deeper = [f"{group}.{key}" for group in known if key in _fields(model, [*parents, group])]
    near = deeper or difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
    return f"unknown key {path!r} ({hint})"


def _fields(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the keys of a group of settings; none if the path does not lead to a group."""
    for at, part in enumerate(path):
        if at and path[at - 1] == "surrogate" and part in SURROGATES:
            model = SURROGATES[part]
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = [a for a in candidates if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def read_yaml(path: Path) -> Any:
    """Read the settings in a YAML file, without duplicate keys.

    Raises:
        SpecError: no such file, not YAML, or a duplicate key (in plain YAML the last one silently wins).
    """
    try:
        with path.open(encoding="utf8") as file:
            return yaml.load(file, Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise SpecError(
            f"read {path}",
            found="no such file",
            rule="a YAML file with an ablation or a spec",
            fix="check the path; experiments/ holds examples",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(
            f"read {path}", found=str(error), rule="valid YAML", fix="correct the place named above"
        ) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key != "<<":
                line = key_node.start_mark.line + 1
                raise SpecError(
                    f"read {self.name}",
                    found=f"{key!r} on line {seen[key]} and again on line {line}",
                    rule="every key is unique",
                    fix="rename or remove one of them",
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)
