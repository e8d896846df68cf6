"""Registry of systems: each has options, a translation of them to a spec, and the data that its replays need.

Each sub-package named after a system declares ``SYSTEM = System(...)``. A system is data and translation: its losses
are computed by the layers below, from the spec.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from workbench.errors import SpecError, did_you_mean
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.specs.mistakes import group_at, mistakes

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.dumps.step import StepDump
    from workbench.reduction.denominators import GivenCounts
    from workbench.systems.case import Case
    from workbench.systems.metrics import Alias, PeerSettings
    from workbench.systems.replays import Replayed

SYSTEMS = (
    "nemo_rl",
    "verl",
    "trl",
    "liger",
    "fast_llm",
    "prime_rl",
    "openrlhf",
    "slime",
    "miles",
    "areal",
    "pipelinerl",
    "nous_torchtitan",
    "skyrl",
    "roll",
)
"""Names of all systems."""

LOGPROBS = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
HEAD = ("hidden", "weight", "bias", "ref_hidden", "ref_weight", "ref_bias", "targets")
VALUES = ("values", "old_values", "returns", "mask", "document_index")
ESTIMATOR = ("logprobs", "ref_logprobs", "mask", "cotangent")
CORRECTION = ("old_logprobs", "rollout_logprobs", "mask")
BATCH = ("logprobs", *LOGPROBS, "advantages", "mask")
"""Arrays that functions of several systems take."""


class Settings(BaseModel):
    """Options of a system, by its names and with its defaults; one subclass per function that they configure."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WholeSettings(Settings):
    """Options of a whole config, most of which leave the loss as it is: those are accepted, and listed."""

    without_effect: ClassVar[Mapping[str, str]] = {}
    ignored: tuple[str, ...] = ()
    """Options that were given and do not change the loss, with their reasons in ``without_effect``."""

    @model_validator(mode="before")
    @classmethod
    def _set_aside(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        aside = tuple(name for name in value if name in cls.without_effect)
        if not aside:
            return value
        kept = {name: option for name, option in value.items() if name not in aside}
        return {**kept, "ignored": (*kept.get("ignored", ()), *aside)}


@dataclass(frozen=True)
class Translation:
    """Settings of a system as a spec."""

    spec: LossSpec
    notes: tuple[str, ...] = ()
    """Implicit behaviour of the system."""
    given: tuple[str, ...] = ()
    """Options that are counts of the batch, not settings."""


def unit_temperature(_: Any) -> float:
    """Return the temperature of a system whose loss starts from log-probabilities: it has none."""
    return 1.0


@dataclass(frozen=True)
class System:
    """A system: its options, their translation, and the data of its replays.

    Attributes:
        name: as in `SYSTEMS`.
        title: as its authors write it.
        version: version of the code that was read.
        settings: options of its policy loss.
        translate: from an instance of ``settings`` to a translation.
        back: from a spec to options; raises SpecError if there are none. None: no spec has any.
        counts: the denominators that a micro-batch was given, from an instance of ``settings``.
        scaling: its contract, by the name of the backend or mode.
        replays: kind of case -> replay, for kinds beyond the common ones, and instead of them.
        case_settings: options of the policy loss from a case; some follow from the function's name.
        temperature: divisor of the logits, from an instance of ``settings``; `unit_temperature` if its loss starts from
            log-probabilities.
        peer_settings: settings of its metrics; None: those of `settings_of`.
        metrics: numbers that are no alias, by name; they override aliases.
        outputs: token-aligned [T] outputs beyond loss and gradients, by name, and others in their own shape.
        arrays: arrays that its policy loss takes in addition to the policy itself, advantages and a mask.
        arrays_of: kind that is no policy loss -> arrays that its function takes.
        unsupported_arrays: array -> the reason why its policy loss does not take it, and the fix.
        aliases: its metrics by its own definitions, from the settings that they depend on.
        left_out: metric -> what the system reports there in some case, and what is reported here instead.
        estimator: the advantage estimator and its settings, from options by the system's names; None: not translated.
        read_dump: reader of a file that the system writes of a step; None: there is none.
    """

    name: str
    title: str
    version: str
    settings: type[Settings]
    translate: Callable[[Any], Translation]
    back: Callable[[LossSpec], dict[str, Any]] | None = None
    counts: Callable[[Any], GivenCounts | None] = lambda _: None
    scaling: Mapping[str, ScalingSpec] = field(default_factory=dict)
    replays: Mapping[str, Callable[[Case], dict[str, Any]]] = field(default_factory=dict)
    case_settings: Callable[[Case], Mapping[str, Any]] = lambda case: case.config
    temperature: Callable[[Any], float] = unit_temperature
    peer_settings: Callable[[Replayed], PeerSettings] | None = None
    metrics: Callable[[Replayed], Mapping[str, float]] = lambda _: {}
    outputs: Callable[[Replayed], Mapping[str, Tensor]] = lambda _: {}
    arrays: tuple[str, ...] = ()
    arrays_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsupported_arrays: Mapping[str, str] = field(default_factory=dict)
    aliases: Callable[[PeerSettings], Iterable[Alias]] = lambda _: ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    estimator: Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]] | None = None
    read_dump: Callable[[Path], StepDump] | None = None


def translate_settings(system: System, settings: Settings) -> Translation:
    """Return the translation of settings; options that `LossSpec` rejects are a `SpecError`, too."""
    try:
        return system.translate(settings)
    except SpecError as error:
        if not isinstance(error.__context__, ValidationError):  # the translation's own refusal
            raise
        raise SpecError(
            f"{system.title}: translation of these options to a LossSpec",
            found=error.parts["found"],
            rule="options that exclude each other in a LossSpec have no translation",
            fix="change one of them",
        ) from None


def load_system(name: str) -> System:
    """Return the system of a name; an unknown one is a `SpecError`."""
    if name not in SYSTEMS:
        raise SpecError(
            f"system {name!r}",
            rule=f"one of {', '.join(SYSTEMS)}",
            fix=did_you_mean(str(name).lower().replace("-", "_"), SYSTEMS, otherwise="choose one of them"),
        )
    return importlib.import_module(f"workbench.systems.{name}").SYSTEM


def parse_settings(model: type[Settings], settings: Mapping[str, Any], *, where: str) -> Any:
    """Validate options against their model, and report every mistake, with the system's name from ``where``.

    Raises:
        SpecError: no mapping, an unknown option (with the closest one), a value of the wrong type or out of range.
    """
    if not isinstance(settings, Mapping):
        raise SpecError(
            f"options of {where}",
            found=repr(settings),
            rule="names and values, in a mapping",
            fix="pass {} for the system's defaults",
        )
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        unknown = (group_at(model, e["loc"][:-1])[1] for e in error.errors() if e["type"] == "extra_forbidden")
        groups = dict.fromkeys(filter(None, unknown))
        known = [f"options of {group.__name__}: {', '.join(group.model_fields)}" for group in groups]
        raise SpecError(
            f"{where}: {error.error_count()} option(s) cannot be used",
            found=mistakes(error, model, "option", list_known=False),  # the rule lists them
            rule="; ".join(known) or "a value that the option accepts",
            fix="correct the options; unset ones have the system's own default",
        ) from None
