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
DENOMINATORS = ("denominator", "denominator_constant", "compat", "truncated")
"""Settings and groups that define denominators."""
TEMPERATURE = "policy.temperature"
"""A setting outside the loss; it tells apart two systems that both start from logits."""


@dataclass(frozen=True)
class Difference:
    """A setting of the spec on which the two translations differ."""

    setting: str
    """Its path in the spec."""
    topic: str
    """One of "denominator", "clip", "policy term", "correction", "KL", "temperature", "other terms"."""
    meaning: str
    values: tuple[Any, Any]
    options: tuple[str, str]
    """Options that decide it, with value and a mark if that is an unset default; "" if none does."""
    silent: tuple[bool, bool]
    """True where no option was set: it is the system's default, or fixed."""
    acts: bool
    """True if it changes loss or gradient of a micro-batch."""


@dataclass(frozen=True)
class Explanation:
    """Verdict on two systems' settings, and their differences."""

    systems: tuple[str, str]
    """Titles of both."""
    specs: tuple[LossSpec, LossSpec]
    verdict: Verdict
    """Either "same" by one canonical form, so on every batch; "different" on some batch; or "cannot say"."""
    same_loss: bool | None
    """None: not known."""
    same_gradient: bool | None
    """None: not known."""
    same_scaling: bool | None
    """True if they stay equal for any split of a step into ranks and micro-batches; None unless "same"."""
    differences: tuple[Difference, ...]
    """Setting by setting, those that act first."""
    notes: tuple[tuple[str, ...], tuple[str, ...]]
    """Implicit behaviour of each system."""
    counterexample: Counterexample | None
    """A batch that tells them apart."""

    def table(self) -> pd.DataFrame:
        """Tabulate the differences, one row per setting: both values, each system's options, whether it acts."""
        import pandas as pd

        first, second = self.systems
        if first == second:
            first, second = f"{first} (a)", f"{second} (b)"
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
            pairs = zip(map(_short, d.values), d.options, strict=True)
            values = " | ".join(f"{value} ({option})" if option else value for value, option in pairs)
            lines.append(f"  {'' if d.acts else '(no difference here) '}{d.topic}, {d.setting}: {values}")
        lines += [f"  {title}: {note}" for title, notes in zip(self.systems, self.notes, strict=True) for note in notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _restriction(self) -> str:
        if self.verdict == "same" and not self.same_scaling:
            return " on one micro-batch; a step of several is scaled differently"
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
    sides = one, other = _Side.of(system_a, settings_a), _Side.of(system_b, settings_b)
    specs = one.spec, other.spec
    temperatures = one.temperature, other.temperature
    from_logits = all(side.system.temperature is not unit_temperature for side in sides)
    divisors = temperatures if from_logits and temperatures[0] != temperatures[1] else None
    verdict, same_loss, same_gradient, counterexample = compare(*specs, divisors)
    return Explanation(
        (one.system.title, other.system.title),
        specs,
        verdict,
        same_loss,
        same_gradient,
        same_scaling(*specs) if verdict == "same" else None,
        _differences(sides, verdict, divisors),
        (one.notes, other.notes),
        counterexample,
    )


# ---- setting by setting ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """A system with its options, and their translation."""

    system: System
    settings: Settings
    spec: LossSpec
    notes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> _Side:
        system = load_system(name)
        settings = parse_settings(system.settings, given, where=name)
        translation = translate_settings(system, settings)
        return cls(system, settings, translation.spec, translation.notes)

    @property
    def temperature(self) -> float:
        return self.system.temperature(self.settings)


def _differences(
    sides: tuple[_Side, _Side], verdict: Verdict, temperatures: tuple[float, float] | None
) -> tuple[Difference, ...]:
    """Return the differences, those that act first."""
    flat, forms = [_flat(side.spec) for side in sides], [canonical(side.spec) for side in sides]
    acting = {path for path in {*forms[0], *forms[1]} if forms[0].get(path) != forms[1].get(path)}
    roots = {
        "surrogate.upper": ("surrogate.clip_high", "surrogate.bounds", "surrogate.delta"),
        "surrogate.lower": ("surrogate.clip_low", "surrogate.bounds"),
    }
    acting |= {root for path in acting for root in roots.get(path, ())}
    powers = [side.spec.compat.scaling.powers for side in sides]
    ignored = {"name", "correction.kind"}
    if powers[0] == powers[1]:
        ignored |= {f"compat.scaling.{name}" for name in FACTORS}
    deciding = [(side.settings, decides(side.system, side.settings)) for side in sides]
    values_of = {path: (value, flat[1][path]) for path, value in flat[0].items()}
    if temperatures is not None:
        values_of, acting = {TEMPERATURE: temperatures, **values_of}, {TEMPERATURE, *acting}
    rows = []
    for path, values in values_of.items():
        if values[0] == values[1] or path in ignored:
            continue
        one, other = ((settings, decided.get(path, ())) for settings, decided in deciding)
        options, silent = (_label(*one), _label(*other)), (_is_silent(*one), _is_silent(*other))
        acts = verdict != "same" and path in acting
        rows.append(Difference(path, _topic(path), _meaning(path), values, options, silent, acts))
    return tuple(sorted(rows, key=lambda row: not row.acts))


def decides(system: System, settings: Settings) -> Mapping[str, tuple[str, ...]]:
    """Map each path in the spec, or `TEMPERATURE`, to the options whose change, one at a time, changes it."""
    base, explicit = _flat_settings(system, settings), settings.model_dump(exclude_unset=True)
    deciding: dict[str, list[str]] = {}
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
    values = {name: _short(functools.reduce(getattr, name.split("."), settings)) for name in names}
    defaults = {name: "" if _is_set(settings, name) else ", its default" for name in names}
    return ", ".join(f"{name}={values[name]}{defaults[name]}" for name in names)


def _is_silent(settings: Settings, names: tuple[str, ...]) -> bool:
    return not any(_is_set(settings, name) for name in names)


def _is_set(settings: Settings, name: str) -> bool:
    *groups, last = name.split(".")
    return last in functools.reduce(getattr, groups, settings).model_fields_set


def _topic(path: str) -> str:
    group, _, name = path.partition(".")
    if group == "surrogate":
        return "clip" if name in CLIPS else "policy term"
    if group in DENOMINATORS:
        return "denominator"
    return {"correction": "correction", "kl": "KL", "policy": "temperature"}.get(group, "other terms")


def _flat(spec: LossSpec) -> dict[str, Any]:
    """Return every setting by its path; None for a parameter that only other surrogates have."""
    parameters = dict.fromkeys(f"surrogate.{name}" for kind in SURROGATES.values() for name in kind.model_fields)
    return {**parameters, **{path: value for path, _, value in _options(spec)}}


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
