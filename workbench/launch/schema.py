"""JSON Schema of ablation files, and each setting as it describes it: editors complete and check YAML with the first.

    # yaml-language-server: $schema=https://.../ablation.schema.json

is the first line of a file that an editor checks. Settings are the fields of `RunSpec`; what a schema cannot say (rules
between several settings, presets that fill in others) is checked when the file is read.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.faults import fault_names
from workbench.launch.ablation import AblationSpec
from workbench.specs.losses import PRESETS, SURROGATES
from workbench.specs.run import RunSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}


@dataclass(frozen=True)
class Setting:
    """A setting of runs, or a group of settings.

    Attributes:
        name: dotted.
        meaning: "" if its name says it.
        kind: its type with bounds, such as "number, at least 0"; "" for a group, "list of groups" for several.
        choices: the values that it may have; () if these are not a list.
        default: None for a group; with several surrogate kinds, those that differ, as kind -> default.
        settings: names of the settings in a group.
        kinds: surrogate kinds that have it; () for settings outside of `loss.surrogate`.
    """

    name: str
    meaning: str
    kind: str
    choices: tuple[str, ...] = ()
    default: Any = None
    settings: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


def ablation_schema() -> dict[str, Any]:
    """Return the JSON Schema of an ablation file, or of the file of one run's spec."""
    run, ablation = _run_schema(), AblationSpec.model_json_schema()
    settings = {"$ref": "#/$defs/RunSpec"}
    parts = {name: {**part, "description": _one_line(part)} for name, part in ablation["properties"].items()}
    parts["base"] = {**settings, "description": parts["base"]["description"]}
    for name in ("configurations", "extra"):
        parts[name]["additionalProperties"] = settings
    parts["axes"]["propertyNames"] = {"enum": list(settings_by_name())}
    whole = {
        "type": "object",
        "properties": parts,
        "additionalProperties": False,
        "required": ["reference", "configurations"],
    }
    return {
        "$schema": DIALECT,
        "title": "An ablation of the workbench, or the settings of one run",
        "if": {"anyOf": [{"required": [name]} for name in ("configurations", "axes", "question", "reference")]},
        "then": whole,
        "else": settings,
        "$defs": run.pop("$defs") | {"RunSpec": run},
    }


@functools.cache
def settings_by_name() -> dict[str, Setting]:
    """Return every setting and group of settings of a run by dotted name, groups before what they contain."""
    schema = _run_schema()
    return {setting.name: setting for setting in _walk(schema, schema["$defs"], "")}


def _run_schema() -> dict[str, Any]:
    schema = copy.deepcopy(RunSpec.model_json_schema())
    groups = schema["$defs"]
    for group in [schema, *groups.values()]:
        for part in group.get("properties", {}).values():
            part.pop("title", None)
            if "$ref" in part:
                part.pop("default", None)  # those of its settings say it
            part["description"] = _one_line(part)
    loss = groups["LossSpec"]["properties"]
    own = groups["OwnLoss"]["properties"]
    loss["surrogate"] = _any_surrogate(loss["surrogate"]["description"], groups)
    loss |= {key: own[key] for key in ("settings", "engine")}  # they stand next to the loss's name
    loss["name"]["anyOf"] = [{"enum": list(PRESETS)}, {"pattern": r"\.py:\w+$"}]
    faults = {"enum": fault_names()}
    schema["properties"]["faults"] = {
        **{key: schema["properties"]["faults"][key] for key in ("description", "default")},
        "anyOf": [{"type": "array", "items": faults}, faults],
    }
    return schema


def _any_surrogate(description: str, groups: dict[str, Any]) -> dict[str, Any]:
    """One object for the surrogates of all kinds, because a preset, not the file, may name the kind."""
    kinds = {kind: groups.pop(model.__name__)["properties"] for kind, model in SURROGATES.items()}
    merged = {name: _merged(name, kinds) for properties in kinds.values() for name in properties}
    merged["kind"] = {"enum": list(kinds), "description": "The mathematics of the policy term.", "default": "ppo"}
    rules = [
        {
            "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
            "then": {"propertyNames": {"enum": sorted(properties)}},
        }
        for kind, properties in kinds.items()
    ]
    return {
        "type": "object",
        "description": description,
        "properties": merged,
        "additionalProperties": False,
        "allOf": rules,
    }


def _merged(name: str, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter that several kinds have: what any of them accepts, each kind's default, the first meaning."""
    variants = {kind: properties[name] for kind, properties in kinds.items() if name in properties}
    bounds = [_without(variant, "default", "description") for variant in variants.values()]
    defaults = {kind: variant.get("default") for kind, variant in variants.items()}
    first = next(iter(variants.values()))
    accepted = bounds[0] if all(each == bounds[0] for each in bounds) else {"anyOf": _unique(bounds)}
    same = len({repr(default) for default in defaults.values()}) == 1
    default = {"default": first.get("default")} if same else {"x-defaults": defaults}
    return {**accepted, "description": first["description"], **default, "x-kinds": list(variants)}


def _unique(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value not in values[:place]]


def _walk(group: Mapping[str, Any], groups: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
    for key, part in group["properties"].items():
        name, meaning = f"{prefix}{key}", part.get("description", "")
        listed = "$ref" in part.get("items", {})
        reference = part["items"]["$ref"] if listed else part.get("$ref", "")
        inner = groups[reference.rpartition("/")[2]] if reference else part
        if "properties" in inner:
            settings = tuple(f"{name}.{each}" for each in inner["properties"])
            yield Setting(name, meaning or _one_line(inner), "list of groups" if listed else "", settings=settings)
            yield from _walk(inner, groups, f"{name}.")
        else:
            default, kinds = part.get("default", part.get("x-defaults")), tuple(part.get("x-kinds", ()))
            yield Setting(name, meaning, _kind(part), tuple(map(_text, _choices(part))), default, kinds=kinds)


def _kind(part: Mapping[str, Any]) -> str:
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(_kind(each) for each in part["anyOf"]))
    if "pattern" in part:
        return "FILE.py:NAME"
    if "enum" in part or "const" in part:
        return "one of the choices"
    named = {"null": "none", "boolean": "true or false", "string": "text", "array": "list", "object": "mapping"}
    kind = named.get(part.get("type", ""), part.get("type", "any value"))
    return ", ".join([kind, *(text.format(_text(part[key])) for key, text in _BOUNDS.items() if key in part)])


def _choices(part: Mapping[str, Any]) -> list[Any]:
    inner = (
        [choice for each in (*part.get("anyOf", ()), part.get("items", {})) for choice in _choices(each)]
        if part
        else []
    )
    own = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
    return list(dict.fromkeys([*own, *inner]))


def _text(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, (bool, float)) else str(value)


def _one_line(part: Mapping[str, Any]) -> str:
    return " ".join(part.get("description", "").split("Example:")[0].split())


def _without(part: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in keys}
