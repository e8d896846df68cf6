"""Reading of settings: YAML without duplicate keys, and every mistake in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from workbench.errors import SpecError, did_you_mean
from workbench.specs.losses import check_inherited


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
            found=mistakes(error, model),
            rule=f"settings of {model.__name__}; unknown keys are errors",
            fix="correct the file; `workbench run --help` lists every setting",
        ) from None


def mistakes(error: ValidationError, model: type[BaseModel], noun: str = "key", *, list_known: bool = True) -> str:
    """Return every mistake in settings of a model as text; an unknown name comes with the nearest or all known ones."""
    return "; ".join(_mistake(each, model, noun, list_known) for each in error.errors())


def _mistake(error: Any, model: type[BaseModel], noun: str, list_known: bool) -> str:
    path = error["loc"]
    name = ".".join([*group_at(model, path[:-1])[0], *map(str, path[-1:])])
    if error["type"] == "extra_forbidden":
        key, known = str(path[-1]), _fields(model, path[:-1])
        deeper = [f"{group}.{key}" for group in known if key in _fields(model, [*path[:-1], group])]
        listed = f"known here: {', '.join(sorted(known))}" if known and list_known else ""
        hint = f"did you mean {deeper[0]!r}?" if deeper else did_you_mean(key, known, otherwise=listed)
        return f"unknown {noun} {name!r}" + (f" ({hint})" if hint else "")
    # the input of a missing setting, and of a rule between several, is the whole group
    whole = isinstance(error["input"], Mapping) and error["type"] in ("missing", "value_error")
    shown = [name] * bool(name) + ([] if whole else [repr(error["input"])])
    return ": ".join(filter(None, [" = ".join(shown), error["msg"].removeprefix("Value error, ")]))


def group_at(model: type[BaseModel], path: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the names along the path of a mistake, without the kinds that pydantic adds, and the group at its end."""
    names: list[str] = []
    groups = [model]
    for part in path:
        kinds = [each for each in groups if len(groups) > 1 and part in (f.default for f in each.model_fields.values())]
        if not kinds:
            names.append(str(part))
            kind = next((each.model_fields[part].annotation for each in groups if part in each.model_fields), None)
            kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, BaseModel)]
        groups = kinds
    return names, groups[0] if groups else None


def _fields(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    group = group_at(model, path)[1]
    return list(group.model_fields) if group else []


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
