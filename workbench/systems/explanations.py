"""Are two systems' settings the same loss? Shown by one canonical form of both, or by a batch that tells them apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from workbench.errors import WorkbenchError
from workbench.losses.canonical import canonical, canonical_gradient
from workbench.specs.losses import SURROGATES, LossSpec
from workbench.systems.back import FACTORS
from workbench.systems.counterexample import Outcome, apart, outcome
from workbench.systems.registry import (
    Settings,
    System,
    Translation,
    load_system,
    parse_settings,
    translated,
    undivided,
)

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["same", "different", "cannot say"]

SEEDS = range(24)
"""Batches that are searched for one that tells two losses apart."""
APART = 1e-7
"""Relative difference from which a batch tells two losses apart: far above rounding, and above what an epsilon in a
count can do."""
PROBES = (0.25, 1.5, 4.0, 0, 2)
"""Numbers that are put into an option to see what it decides."""
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
    "documents_counted",
    "gradient_divisor",
    "normalize_by_documents",
    "scaling",
    "truncated",
    "entropy_denominator",
)
"""Settings and groups that say what is divided by what."""
TEMPERATURE = "policy.temperature"
"""A setting of ours that is none of the loss; it tells apart two systems that both begin at logits."""


@dataclass(frozen=True)
class Difference:
    """One setting of ours that the two translations do not share.

    Attributes:
        setting: its path in the spec.
        topic: what it is about: "denominator", "clip", "policy term", "correction", "KL", "temperature", "other terms".
        meaning: what it says.
        values: of it, in both.
        options: what decides it in both systems, with its value and whether that is a default that nobody said; "" if
            no option does.
        silent: whether nobody said it, in both: it is the system's default, or always so.
        acts: whether it makes a difference to loss or gradient of a micro-batch.
    """

    setting: str
    topic: str
    meaning: str
    values: tuple[Any, Any]
    options: tuple[str, str]
    silent: tuple[bool, bool]
    acts: bool


@dataclass(frozen=True)
class Witness:
    """A batch on which two losses differ.

    Attributes:
        seed: of `workbench.systems.counterexample.nasty_row`.
        losses: the two numbers.
        gradient_norms: of the derivatives by what the policy says.
        relative: how far apart loss and the gradient's worst element are.
    """

    seed: int
    losses: tuple[float, float]
    gradient_norms: tuple[float, float]
    relative: tuple[float, float]


@dataclass(frozen=True)
class Explanation:
    """Whether two systems' settings are the same loss, and where they part.

    Attributes:
        systems: titles of both.
        specs: both in our words.
        verdict: "same": one canonical form, so equal on every batch; "different": there is a witness; "cannot say".
        same_loss: whether the number is the same; None: not known.
        same_gradient: whether the gradient is the same; None: not known.
        same_scaling: whether it stays so however a step is cut into ranks and micro-batches; None if it is not the same
            loss to begin with.
        differences: setting by setting, those that act first.
        notes: what each system does without saying so.
        witness: a batch that tells them apart, or None.
    """

    systems: tuple[str, str]
    specs: tuple[LossSpec, LossSpec]
    verdict: Verdict
    same_loss: bool | None
    same_gradient: bool | None
    same_scaling: bool | None
    differences: tuple[Difference, ...]
    notes: tuple[tuple[str, ...], tuple[str, ...]]
    witness: Witness | None

    def table(self) -> pd.DataFrame:
        """One row a setting that differs: its value in both, what each system calls it, whether it acts."""
        import pandas as pd

        first, second = _apart_names(self.systems)
        columns = ["setting", "topic", first, second, f"{first} says", f"{second} says", "acts", "meaning"]
        rows = [(d.setting, d.topic, *d.values, *d.options, d.acts, d.meaning) for d in self.differences]
        return pd.DataFrame(rows, columns=columns).set_index("setting")

    def __str__(self) -> str:
        first, second = self.systems
        lines = [f"{first} | {second}: {self.verdict}" + self._in_what()]
        if self.witness is not None:
            w = self.witness
            lines.append(
                f"  batch {w.seed}: loss {w.losses[0]:.10g} | {w.losses[1]:.10g}, "
                f"gradient norm {w.gradient_norms[0]:.10g} | {w.gradient_norms[1]:.10g}"
            )
        for d in self.differences:
            said = " | ".join(
                f"{_short(value)}{f' ({option})' if option else ''}"
                for value, option in zip(d.values, d.options, strict=True)
            )
            lines.append(f"  {'' if d.acts else '(no difference here) '}{d.topic}, {d.setting}: {said}")
        lines += [f"  {title}: {note}" for title, notes in zip(self.systems, self.notes, strict=True) for note in notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _in_what(self) -> str:
        if self.verdict == "same":
            return "" if self.same_scaling else " on one micro-batch; a step of several is cut otherwise"
        if self.verdict == "different" and self.same_gradient:
            return " (the loss; the gradient is the same)"
        if self.verdict == "different" and self.same_loss:
            return " (the gradient; the loss is the same)"
        return ""


def explain(system_a: str, settings_a: Mapping[str, Any], system_b: str, settings_b: Mapping[str, Any]) -> Explanation:
    """Say whether two systems' settings are the same policy loss, and name what differs.

    Counts of a batch that stand among the settings (`Translation.given`) are facts and not settings: they decide
    nothing here. Loss and gradient are those of one micro-batch; what dp, cp and accumulation make of them is
    ``same_scaling``. "same" is proven by `workbench.losses.canonical`, and "different" by a batch of
    `workbench.systems.counterexample`; where there is neither, it says so.

    Args:
        system_a: one of `SYSTEMS`.
        settings_a: options by that system's names; what is not said has its default.
        system_b: one of `SYSTEMS`, perhaps the same.
        settings_b: options by that system's names.

    Raises:
        SpecError: options that are refused, or that cannot be expressed.

    Example:
        >>> explain("verl", {"clip_ratio": 0.2}, "verl", {"clip_ratio": 0.2}).verdict
        'same'
    """
    systems = load_system(system_a), load_system(system_b)
    settings = tuple(
        parse_settings(system.settings, given, where=system.name)
        for system, given in zip(systems, (settings_a, settings_b), strict=True)
    )
    found = tuple(translated(system, each) for system, each in zip(systems, settings, strict=True))
    specs = found[0].spec, found[1].spec
    temperatures = tuple(system.temperature(each) for system, each in zip(systems, settings, strict=True))
    heated = all(system.temperature is not undivided for system in systems) and temperatures[0] != temperatures[1]
    verdict, same_loss, same_gradient, witness = compare(*specs, temperatures if heated else None)
    titles = systems[0].title, systems[1].title
    differences = _differences(systems, settings, found, verdict, temperatures if heated else None)
    return Explanation(
        titles,
        specs,
        verdict,
        same_loss,
        same_gradient,
        scale_alike(*specs) if verdict == "same" else None,
        differences,
        (found[0].notes, found[1].notes),
        witness,
    )


def compare(
    one: LossSpec, other: LossSpec, temperatures: tuple[float, float] | None = None
) -> tuple[Verdict, bool | None, bool | None, Witness | None]:
    """The verdict on two specs, on loss and gradient each, and the batch that tells them apart.

    Args:
        one: the first.
        other: the second.
        temperatures: what either divides the same logits by; None: both see the same log-probabilities.
    """
    if temperatures is None and canonical(one) == canonical(other):
        return "same", True, True, None
    same_gradient = True if temperatures is None and canonical_gradient(one) == canonical_gradient(other) else None
    heats = temperatures or (None, None)
    first, losses_apart, gradients_apart = None, False, False
    for seed in SEEDS:
        pair = _outcome(one.model_dump_json(), seed, heats[0]), _outcome(other.model_dump_json(), seed, heats[1])
        relative = apart(*pair)
        losses_apart, gradients_apart = losses_apart or relative[0] > APART, gradients_apart or relative[1] > APART
        if first is None and max(relative) > APART:
            norms = pair[0].gradient_norm, pair[1].gradient_norm
            first = Witness(seed, (pair[0].loss, pair[1].loss), norms, relative)
        if losses_apart and (gradients_apart or same_gradient):
            break
    if first is None:
        return "cannot say", None, same_gradient, None
    return "different", False if losses_apart else None, False if gradients_apart else same_gradient, first


def scale_alike(one: LossSpec, other: LossSpec) -> bool:
    """Whether two specs that are the same loss on one micro-batch stay so when a step is cut into several."""
    return (
        one.scaling.counts == other.scaling.counts
        and one.scaling.powers == other.scaling.powers
        and one.breaks == other.breaks
    )


@functools.lru_cache(maxsize=8192)
def _outcome(spec: str, seed: int, temperature: float | None) -> Outcome:
    return outcome(LossSpec.model_validate_json(spec), seed, temperature)


# ---- setting by setting ----------------------------------------------------------------------------------------


def _differences(
    systems: tuple[System, System],
    settings: tuple[Any, ...],
    found: tuple[Translation, ...],
    verdict: Verdict,
    temperatures: tuple[float, float] | None,
) -> tuple[Difference, ...]:
    """Those that act first."""
    flat = [_flat(each.spec) for each in found]
    forms = [canonical(each.spec) for each in found]
    acting = {path for path in {*forms[0], *forms[1]} if forms[0].get(path) != forms[1].get(path)}
    roots = {
        "surrogate.upper": ("surrogate.clip_high", "surrogate.bounds", "surrogate.delta"),
        "surrogate.lower": ("surrogate.clip_low", "surrogate.bounds"),
    }
    acting |= {root for path in acting for root in roots.get(path, ())}
    scaling = found[0].spec.scaling, found[1].spec.scaling
    cancelled = [f"scaling.{name}" for name in FACTORS] if scaling[0].powers == scaling[1].powers else []
    deciding = [decides(system, each) for system, each in zip(systems, settings, strict=True)]
    values_of = {path: (value, flat[1][path]) for path, value in flat[0].items()}
    if temperatures is not None:
        values_of, acting = {TEMPERATURE: temperatures, **values_of}, {TEMPERATURE, *acting}
    rows = []
    for path, values in values_of.items():
        if values[0] == values[1] or path in ("name", "correction.kind") or path in cancelled:
            continue
        options = tuple(_said(each, decided.get(path, ())) for each, decided in zip(settings, deciding, strict=True))
        silent = tuple(
            not any(_is_said(each, name) for name in decided.get(path, ()))
            for each, decided in zip(settings, deciding, strict=True)
        )
        rows.append(
            Difference(
                path, _topic(path), _meaning(path), values, options, silent, verdict != "same" and path in acting
            )
        )
    return tuple(sorted(rows, key=lambda row: not row.acts))


def decides(system: System, settings: Settings) -> Mapping[str, tuple[str, ...]]:
    """Path in our spec, or `TEMPERATURE` -> options of the system that decide it: those whose change changes it.

    Args:
        system: whose.
        settings: the options that the others are left at.
    """
    base, said, found = _reached(system, settings), settings.model_dump(exclude_unset=True), {}
    for name, annotation, value in _options(settings):
        for other in _other_values(annotation, value):
            try:
                probed = parse_settings(type(settings), _replaced(said, name, other), where=system.name)
                reached = _reached(system, probed)
            except WorkbenchError:
                continue  # options that do not go together
            for path in base:
                if reached[path] != base[path] and name not in found.setdefault(path, []):
                    found[path].append(name)
    return {path: tuple(names) for path, names in found.items()}


def _reached(system: System, settings: Settings) -> dict[str, Any]:
    return {**_flat(translated(system, settings).spec), TEMPERATURE: system.temperature(settings)}


def _options(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, annotation, value) of every option; groups are opened."""
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


def _said(settings: Settings, names: tuple[str, ...]) -> str:
    return ", ".join(
        f"{name}={_short(functools.reduce(getattr, name.split('.'), settings))}"
        f"{'' if _is_said(settings, name) else ', its default'}"
        for name in names
    )


def _is_said(settings: Settings, name: str) -> bool:
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


def _flat(spec: BaseModel, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {f"{prefix}{name}": value}
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


def _apart_names(titles: tuple[str, str]) -> tuple[str, str]:
    return titles if titles[0] != titles[1] else (f"{titles[0]} (a)", f"{titles[1]} (b)")
