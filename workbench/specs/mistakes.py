"""Mistakes in settings as text: every mistake with its place, and for an unknown name the nearest known ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from workbench.errors import SpecError, did_you_mean, listed, nearest_names

ELSEWHERE = {
    "lr": ("optimizer.learning_rate",),
    "lora_r": ("lora.r",),
    "lora_rank": ("lora.r",),
    "beta": ("loss.kl.coefficient", "loss.surrogate.beta"),
    "kl_coef": ("loss.kl.coefficient",),
    "kl_loss_coef": ("loss.kl.coefficient",),
    "epsilon": ("loss.surrogate.clip_low", "loss.surrogate.clip_high"),
    "cliprange": ("loss.surrogate.clip_low", "loss.surrogate.clip_high"),
    "clip_ratio": ("loss.surrogate.clip_low", "loss.surrogate.clip_high"),
    "eps_clip": ("loss.surrogate.clip_low", "loss.surrogate.clip_high"),
    "epsilon_high": ("loss.surrogate.clip_high",),
    "clip_ratio_high": ("loss.surrogate.clip_high",),
    "loss_agg_mode": ("loss.denominator",),
    "loss_type": ("loss.name", "loss.denominator"),
    "grad_clip": ("optimizer.max_grad_norm",),
    "num_generations": ("online.answers",),
}
"""Name of a setting in TRL's GRPOConfig, verl's actor config or slime's arguments -> its name here."""

WHERE_SETTINGS_ARE = "`workbench describe` explains every setting"


def unusable(where: str, error: ValidationError, model: type[BaseModel], *, fix: str) -> SpecError:
    """Return the error that lists every mistake in settings from ``where``."""
    return SpecError(
        f"{where}: {error.error_count()} setting(s) cannot be used",
        found=mistakes(error, model),
        rule=f"settings of {model.__name__}; unknown keys are errors",
        fix=fix,
    )


def mistakes(error: ValidationError, model: type[BaseModel], noun: str = "key", *, list_known: bool = True) -> str:
    """Return the mistakes in settings of a model as text; an unknown name comes with the nearest or all known ones."""
    return listed(each_mistake(error, model, noun, list_known=list_known), 12, separator="; ")


def each_mistake(
    error: ValidationError, model: type[BaseModel], noun: str = "key", *, list_known: bool = True
) -> list[str]:
    """Return every mistake in settings of a model, one text each."""
    return [_mistake(each, model, noun, list_known) for each in error.errors()]


def _mistake(error: Any, model: type[BaseModel], noun: str, list_known: bool) -> str:
    path = error["loc"]
    name = ".".join([*group_at(model, path[:-1])[0], *map(str, path[-1:])])
    if error["type"] == "extra_forbidden":
        hint = _hint(str(path[-1]), model, path[:-1], list_known=list_known)
        return f"unknown {noun} {name!r}" + (f" ({hint})" if hint else "")
    # the input of a missing setting, and of a rule between several, is the whole group
    whole = isinstance(error["input"], dict) and error["type"] in ("missing", "value_error")
    shown = [name] * bool(name) + ([] if whole else [_brief(error["input"])])
    inside = ""
    if path and error["type"] == "model_type":
        fields = _fields(model, path)
        inside = f"; its settings are {', '.join(fields)}"
        if isinstance(error["input"], str) and "name" in fields:
            inside += f", so write {{name: {error['input']}}}"
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall("'([^']*)'", error["ctx"]["expected"])
        longer = [choice for choice in choices if choice.startswith(error["input"])]
        near = _did_you_mean_any(longer) if longer else did_you_mean(error["input"], choices)
        inside = f"; {near}" if near else ""
    return ": ".join(filter(None, [" = ".join(shown), error["msg"].removeprefix("Value error, ") + inside]))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _hint(key: str, model: type[BaseModel], path: Sequence[int | str], *, list_known: bool) -> str:
    """The nearest name in the group; else settings of that name elsewhere, the nearest elsewhere, or those known here.

    A name in the group is relative to it, and one elsewhere is that of the whole model.
    """
    (names, group), known = group_at(model, path), _fields(model, path)
    inside = setting_names(group, "".join(f"{name}." for name in names)) if group else ()
    if (deeper := [name for name in inside if name.rpartition(".")[2] == key]) and key not in ELSEWHERE:
        return _did_you_mean_any(deeper)
    if near := did_you_mean(key, known) if key not in ELSEWHERE else "":
        return near
    if elsewhere := nearest_settings(key, model):
        return _did_you_mean_any(elsewhere)
    return f"known here: {', '.join(sorted(known))}" if known and list_known else ""


def _did_you_mean_any(names: Sequence[str], most: int = 3) -> str:
    return f"did you mean {' or '.join(map(repr, names[:most]))}?"


@functools.cache  # a mistake of the base is in every configuration
def nearest_settings(name: str, model: type[BaseModel]) -> tuple[str, ...]:
    """Return settings of a model, by dotted name, that a misspelt, shortened or misplaced name may mean; best first.

    In this order: the last part of the name is that of the setting, its initials (``lr``), or nearly its name.

    Example:
        >>> from workbench.specs.run import RunSpec
        >>> nearest_settings("clip_high", RunSpec), nearest_settings("lr", RunSpec)
        (('loss.surrogate.clip_high',), ('optimizer.learning_rate',))
    """
    key = name.rpartition(".")[2]
    known = set(setting_names(model))
    if elsewhere := [setting for setting in ELSEWHERE.get(key, ()) if setting in known]:
        return tuple(elsewhere)
    leaves: dict[str, list[str]] = {}
    for setting in setting_names(model):
        leaves.setdefault(setting.rpartition(".")[2], []).append(setting)
    initials = [leaf for leaf in leaves if "_" in leaf and "".join(part[:1] for part in leaf.split("_")) == key]
    for matches in ([key] if key in leaves else [], initials, nearest_names(key, leaves, cutoff=0.75)):
        if settings := tuple(setting for leaf in matches for setting in leaves[leaf]):
            return settings
    return ()


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of a model, groups before what they contain, each once."""
    yield from dict.fromkeys(_setting_names(model, prefix))


def _setting_names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for group in _groups(field.annotation):
            yield from _setting_names(group, f"{prefix}{name}.")


def _groups(annotation: Any) -> list[type[BaseModel]]:
    """Return the groups that a field may hold."""
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def group_at(model: type[BaseModel], path: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Return the names along the path of a mistake, without the kinds that pydantic adds, and the group at its end."""
    names: list[str] = []
    groups = [model]
    for part in path:
        kinds = [each for each in groups if len(groups) > 1 and part in (f.default for f in each.model_fields.values())]
        if not kinds:
            names.append(str(part))
            fields = (each.model_fields[part] for each in groups if part in each.model_fields)
            kinds = _groups(next((field.annotation for field in fields), None))
        groups = kinds
    return names, groups[0] if groups else None


def _fields(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    group = group_at(model, path)[1]
    return list(group.model_fields) if group else []
