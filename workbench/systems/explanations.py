"""Decide if two systems' settings are the same loss, by their canonical form or a batch that tells them apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from workbench.errors import WorkbenchError
from workbench.losses.canonical import canonical
from workbench.specs.losses import SURROGATES, LossSpec
from workbench.systems.counterexample import Counterexample, Verdict, compare, same_scaling
from workbench.systems.registry import (
    Settings,
    System,
    Translation,
    load_system,
    parse_settings,
    translate_settings,
    unit_temperature,
)
from workbench.systems.translate import FACTORS

if TYPE_CHECKING:
    import pandas as pd

PROBES = (0.25, 1.5, 4.0, 0, 2)
"""Values that are tried in an option to see which settings it decides."""
CLIPS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "delta",
    "bounds",
    "log_clamp",
    "log_cap",
    "ratio_cap",
    "threshold",
    "threshold_low",
    "threshold_high",
)
"""Settings of a surrogate that bound its ratio or drop tokens."""
DENOMINATORS = (
    "denominator",
    "denominator_constant",
    "compat",
    "truncated",
)
"""Settings and groups that define denominators."""
TEMPERATURE = "policy.temperature"
"""A setting outside the loss; it tells apart two systems that both start from logits."""


@dataclass(frozen=True)
class Difference:
    """A setting of the spec on which the two translations differ.

    Attributes:
        setting: its path in the spec.
        topic: one of "denominator", "clip", "policy term", "correction", "KL", "temperature", "other terms".
        meaning: its description.
        values: its value in both.
        options: the options that decide it in both systems, with value and a mark if that is an unset default; "" if
            none does.
        silent: True where no option was set, in both: it is the system's default, or fixed.
        acts: True if it changes loss or gradient of a micro-batch.
    """

    setting: str
    topic: str
    meaning: str
    values: tuple[Any, Any]
    options: tuple[str, str]
    silent: tuple[bool, bool]
    acts: bool


@dataclass(frozen=True)
class Explanation:
    """Verdict on two systems' settings, and their differences.

    Attributes:
        systems: titles of both.
        specs: both as a spec.
        verdict: "same": one canonical form, so equal on every batch; "different": a batch shows it; "cannot say".
        same_loss: True if the number is the same; None: not known.
        same_gradient: True if the gradient is the same; None: not known.
        same_scaling: True if they stay equal for any split of a step into ranks and micro-batches; None if they are not
            the same loss to begin with.
        differences: setting by setting, those that act first.
        notes: what each system does implicitly.
        counterexample: a batch that tells them apart, or None.
    """

    systems: tuple[str, str]
    specs: tuple[LossSpec, LossSpec]
    verdict: Verdict
    same_loss: bool | None
    same_gradient: bool | None
    same_scaling: bool | None
    differences: tuple[Difference, ...]
    notes: tuple[tuple[str, ...], tuple[str, ...]]
    counterexample: Counterexample | None

    def table(self) -> pd.DataFrame:
        """Tabulate the differences, one row per setting: both values, each system's options, whether it acts."""
        import pandas as pd

        first, second = _distinct(self.systems)
        columns = ["setting", "topic", first, second, f"{first} says", f"{second} says", "acts", "meaning"]
        rows = [(d.setting, d.topic, *d.values, *d.options, d.acts, d.meaning) for d in self.differences]
        return pd.DataFrame(rows, columns=columns).set_index("setting")

    def __str__(self) -> str:
        first, second = self.systems
        lines = [f"{first} | {second}: {self.verdict}" + self._restriction()]
        if self.counterexample is not None:
            w = self.counterexample
            lines.append(
                f"  batch {w.seed}: loss {w.losses[0]:.10g} | {w.losses[1]:.10g}, "
                f"gradient norm {w.gradient_norms[0]:.10g} | {w.gradient_norms[1]:.10g}"
            )
        for d in self.differences:
            values = " | ".join(
                f"{_short(value)}{f' ({option})' if option else ''}"
                for value, option in zip(d.values, d.options, strict=True)
            )
            lines.append(f"  {'' if d.acts else '(no difference here) '}{d.topic}, {d.setting}: {values}")
        lines += [f"  {title}: {note}" for title, notes in zip(self.systems, self.notes, strict=True) for note in notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _restriction(self) -> str:
        if self.verdict == "same":
            return "" if self.same_scaling else " on one micro-batch; a step of several is scaled differently"
        if self.verdict == "different" and self.same_gradient:
            return " (the loss; the gradient is the same)"
        if self.verdict == "different" and self.same_loss:
            return " (the gradient; the loss is the same)"
        return ""


def explain(system_a: str, settings_a: Mapping[str, Any], system_b: str, settings_b: Mapping[str, Any]) -> Explanation:
    """Decide if two systems' settings are the same policy loss, and name the differences.

    Counts of a batch among the settings (`Translation.given`) are facts, not settings, and are ignored here. Loss and
    gradient are those of one micro-batch; ``same_scaling`` covers dp, cp and accumulation. "same" is proven by
    `workbench.losses.canonical`, and "different" by a batch of `workbench.systems.counterexample`; without either, the
    verdict is "cannot say".

    Args:
        system_a: one of `SYSTEMS`.
        settings_a: options by that system's names; unset ones have its default.
        system_b: one of `SYSTEMS`, perhaps the same.
        settings_b: options by that system's names.

    Raises:
        SpecError: invalid options, or options that cannot be expressed.

    Example:
        >>> explain("verl", {"clip_ratio": 0.2}, "verl", {"clip_ratio": 0.2}).verdict
        'same'
    """
    systems = load_system(system_a), load_system(system_b)
    settings = tuple(
        parse_settings(system.settings, given, where=system.name)
        for system, given in zip(systems, (settings_a, settings_b), strict=True)
    )
    translations = tuple(translate_settings(system, each) for system, each in zip(systems, settings, strict=True))
    specs = translations[0].spec, translations[1].spec
    temperatures = tuple(system.temperature(each) for system, each in zip(systems, settings, strict=True))
    heated = (
        all(system.temperature is not unit_temperature for system in systems) and temperatures[0] != temperatures[1]
    )
    verdict, same_loss, same_gradient, witness = compare(*specs, temperatures if heated else None)
    titles = systems[0].title, systems[1].title
    differences = _differences(systems, settings, translations, verdict, temperatures if heated else None)
    return Explanation(
        titles,
        specs,
        verdict,
        same_loss,
        same_gradient,
        same_scaling(*specs) if verdict == "same" else None,
        differences,
        (translations[0].notes, translations[1].notes),
        witness,
    )


# ---- setting by setting ----------------------------------------------------------------------------------------


def _differences(
    systems: tuple[System, System],
    settings: tuple[Any, ...],
    translations: tuple[Translation, ...],
    verdict: Verdict,
    temperatures: tuple[float, float] | None,
) -> tuple[Difference, ...]:
    """Return the differences, those that act first."""
    flat = [_flat(each.spec) for each in translations]
    forms = [canonical(each.spec) for each in translations]
    acting = {path for path in {*forms[0], *forms[1]} if forms[0].get(path) != forms[1].get(path)}
    roots = {
        "surrogate.upper": ("surrogate.clip_high", "surrogate.bounds", "surrogate.delta"),
        "surrogate.lower": ("surrogate.clip_low", "surrogate.bounds"),
    }
    acting |= {root for path in acting for root in roots.get(path, ())}
    scaling = translations[0].spec.compat.scaling, translations[1].spec.compat.scaling
    cancelled = [f"compat.scaling.{name}" for name in FACTORS] if scaling[0].powers == scaling[1].powers else []
    deciding = [decides(system, each) for system, each in zip(systems, settings, strict=True)]
    values_of = {path: (value, flat[1][path]) for path, value in flat[0].items()}
    if temperatures is not None:
        values_of, acting = {TEMPERATURE: temperatures, **values_of}, {TEMPERATURE, *acting}
    rows = []
    for path, values in values_of.items():
        if values[0] == values[1] or path in ("name", "correction.kind") or path in cancelled:
            continue
        options = tuple(_label(each, decided.get(path, ())) for each, decided in zip(settings, deciding, strict=True))
        silent = tuple(
            not any(_is_set(each, name) for name in decided.get(path, ()))
            for each, decided in zip(settings, deciding, strict=True)
        )
        rows.append(
            Difference(
                path, _topic(path), _meaning(path), values, options, silent, verdict != "same" and path in acting
            )
        )
    return tuple(sorted(rows, key=lambda row: not row.acts))


def decides(system: System, settings: Settings) -> Mapping[str, tuple[str, ...]]:
    """Map each path in the spec, or `TEMPERATURE`, to the options of the system whose change changes it.

    Args:
        system: system of the options.
        settings: the options, of which one at a time is changed.
    """
    base, explicit, deciding = _flat_settings(system, settings), settings.model_dump(exclude_unset=True), {}
    for name, annotation, value in _options(settings):
        for other in _other_values(annotation, value):
            try:
                probed = parse_settings(type(settings), _replaced(explicit, name, other), where=system.name)
                changed = _flat_settings(system, probed)
            except WorkbenchError:
                continue  # invalid combination of options
            for path in base:
                if changed[path] != base[path] and name not in deciding.setdefault(path, []):
                    deciding[path].append(name)
    return {path: tuple(names) for path, names in deciding.items()}


def _flat_settings(system: System, settings: Settings) -> dict[str, Any]:
    return {**_flat(translate_settings(system, settings).spec), TEMPERATURE: system.temperature(settings)}


def _options(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, annotation, value) of every option, of groups one by one."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation, value


def _replaced(options: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    group, dot, rest = name.partition(".")
    return options | {group: _replaced(options.get(group, {}), rest, value) if dot else value}


def _other_values(annotation: Any, value: Any) -> Iterator[Any]:
    kinds = (annotation,) if get_origin(annotation) is Literal or not get_args(annotation) else get_args(annotation)
    for kind in kinds:
        if get_origin(kind) is Literal:
            yield from (other for other in get_args(kind) if other != value)
        elif kind is bool:
            yield not value
        elif kind in (int, float):
            yield from (kind(probe) for probe in PROBES if probe != value)
        elif kind is type(None) and value is not None:
            yield None


def _label(settings: Settings, names: tuple[str, ...]) -> str:
    return ", ".join(
        f"{name}={_short(functools.reduce(getattr, name.split('.'), settings))}"
        f"{'' if _is_set(settings, name) else ', its default'}"
        for name in names
    )


def _is_set(settings: Settings, name: str) -> bool:
    *groups, last = name.split(".")
    holder: Any = functools.reduce(getattr, groups, settings)
    return last in holder.model_fields_set


def _topic(path: str) -> str:
    group, _, name = path.partition(".")
    if path == TEMPERATURE:
        return "temperature"
    if group == "surrogate":
        return "clip" if name in CLIPS else "policy term"
    if group in DENOMINATORS:
        return "denominator"
    return {"correction": "correction", "kl": "KL"}.get(group, "other terms")


def _flat(spec: LossSpec) -> dict[str, Any]:
    """Return every setting by its path; None for a parameter that only other surrogates have."""
    parameters = dict.fromkeys(f"surrogate.{name}" for kind in SURROGATES.values() for name in kind.model_fields)
    return {**parameters, **_fields(spec)}


def _fields(spec: BaseModel, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        flat |= _fields(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}": value}
    return flat


def _meaning(path: str) -> str:
    if path == TEMPERATURE:
        return "Divides logits."
    model: Any = LossSpec
    *groups, name = path.split(".")
    for group in groups:
        kinds = [kind for kind in SURROGATES.values() if name in kind.model_fields]
        model = kinds[0] if group == "surrogate" else model.model_fields[group].annotation
    return " ".join((model.model_fields[name].description or "").split())


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _distinct(titles: tuple[str, str]) -> tuple[str, str]:
    return titles if titles[0] != titles[1] else (f"{titles[0]} (a)", f"{titles[1]} (b)")
