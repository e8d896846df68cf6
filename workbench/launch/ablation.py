"""An ablation: a base spec, axes, and named configurations, unfolded into runs.

    question: one sentence
    base: {steps: 4}                        settings of every run
    axes: {precision: [float64, float32]}   setting (dotted where nested) -> values; every configuration runs once for
                                            each combination. As a mapping, each value adds further settings:
                                            {precision: {float64: {}, float32: {frozen_clip: one_rank-float64}}}
    reference: one_rank                     the configuration that the others are compared with
    truth: one_rank-float64                 the float64 run whose numbers are taken as exact; needed below float64
    configurations:                         name -> changed settings
      one_rank: {}
      cp2_zigzag: {layout: {cp: 2, order: zigzag}}
    extra:                                  outside the axes: runs once, with its own values
      fault: {precision: float64, layout: {cp: 2}, faults: [local_denominator]}

The runs of the example are one_rank-float64, one_rank-float32, cp2_zigzag-float64, cp2_zigzag-float32 and
fault. Each is compared with the reference at the same values of the axes. A float64 run must match the reference
itself; below float64, its budget is the distance of the reference of its own precision from the truth.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.columns import columns
from workbench.errors import SpecError, listed
from workbench.faults import fault_names, nearest_faults
from workbench.launch.ablation_checks import check_comparable, check_order, check_structure, unknown
from workbench.records.certificate import compared_bitwise
from workbench.records.directory import RUN_NAME
from workbench.records.provenance import project_root
from workbench.specs.descriptions import describe_fields
from workbench.specs.mistakes import WHERE_SETTINGS_ARE, each_mistake
from workbench.specs.reading import flatten, merge, parse_spec, read_yaml
from workbench.specs.run import RunSpec

MAX_RUNS = 10_000
"""Runs of an ablation: a plan of them is checked in a minute, and a report cannot show more."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an ablation.

    Attributes:
        name: unique in the ablation, and a legal folder name.
        reference: name of the run that it is compared with; "" for a reference, and for a truth that has none of its
            precision.
        truth: name of the run whose numbers are taken as exact; "" if none, and for the truth itself.
        configuration: the name in the YAML file, without the values of the axes.
    """

    name: str
    spec: RunSpec
    reference: str
    truth: str
    configuration: str

    @property
    def world_size(self) -> int:
        """Ranks that it needs."""
        return self.spec.layout.world_size


class AblationSpec(BaseModel):
    """Content of an ablation file, explained above field by field.

    Example:
        >>> ablation = AblationSpec(question="?", reference="a", configurations={"a": {}, "b": {"layout": {"cp": 2}}},
        ...                         truth="a-float64", axes={"precision": ["float64", "float32"]})
        >>> [(run.name, run.reference) for run in ablation.expand()][2:]
        [('b-float64', 'a-float64'), ('b-float32', 'a-float32')]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def model_json_schema(cls, *args: Any, **named: Any) -> dict[str, Any]:
        """As pydantic's, with docstrings as descriptions."""
        describe_fields([cls])
        return super().model_json_schema(*args, **named)

    question: str = ""
    """The question that the ablation answers, in a sentence: the report's title."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Settings of every run."""
    axes: dict[str, list[Any] | dict[Any, dict[str, Any]]] = Field(default_factory=dict)
    """Setting -> values: every configuration runs once for each combination. A value may add settings of its own."""
    reference: str
    """The configuration with which the others are compared."""
    truth: str = ""
    """The float64 run whose numbers are taken as exact; needed below float64, where nothing else tells how far
    rounding alone may go."""
    configurations: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name -> settings in which it differs from the base."""
    extra: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Runs outside the axes, such as a planted fault, each with all of its own settings."""

    def expand(self, *, where: str = "ablation") -> list[PlannedRun]:
        """Every run, references and the truth first.

        Args:
            where: origin of the ablation, such as its file, for messages.

        Raises:
            SpecError: an invalid setting or fault (with the configuration's name), two runs of one name, a reference or
                truth that is missing or cannot be one, a configuration that sets an axis.
        """
        if self.reference not in self.configurations:
            raise unknown(where, "reference", self.reference, self.configurations)
        self._check_axes(where)
        self._check_number(where)
        settings = list(self._settings())
        specs = _parse_all(where, settings)
        names = [name for name, _, _ in settings]
        if illegal := [name for name in names if not RUN_NAME.fullmatch(name)]:
            raise SpecError(
                f"{where}: names of runs",
                found=", ".join(map(repr, illegal)),
                rule="letters, digits, '.', '_' and '-', beginning with a letter or digit",
                fix="rename the configuration; values of axes are part of names too",
            )
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise SpecError(
                f"{where}: two runs of one name",
                found=", ".join(twice),
                rule="every run has a name of its own: a configuration's with the values of the "
                "axes, joined by '-', or an extra's",
                fix="rename one of them",
            )
        if self.truth and self.truth not in names:
            raise unknown(where, "truth", self.truth, names)
        check_order(where, specs)

        places = {name: self._place(specs[name]) for name in names}
        references = {places[name]: name for name, configuration, _ in settings if configuration == self.reference}
        planned = []
        for name, configuration, _ in settings:
            reference = references.get(places[name])
            if name == self.truth and (reference is None or specs[reference].precision != specs[name].precision):
                reference = name  # it need not be compared
            if reference is None:
                raise SpecError(
                    f"{where}: extra {name!r} has no reference",
                    found=", ".join(f"{axis}={value}" for axis, value in zip(self.axes, places[name], strict=True)),
                    rule=f"its values of the axes are among those of {self.reference!r}",
                    fix="give it one of the axes' values, or add its value to the axis",
                )
            truth = "" if name == self.truth else self.truth
            reference = "" if name == reference else reference
            planned.append(PlannedRun(name, specs[name], reference, truth, configuration))
        check_comparable(where, planned)
        self._check_truth(where, planned)
        return sorted(planned, key=lambda run: bool(run.reference) and run.name != self.truth)

    def __repr__(self) -> str:
        """The question and every run, with its differences from its reference."""
        try:
            planned = self.expand()
        except SpecError as error:
            return f"AblationSpec({self.question!r}; {error.parts['requested']}: {error.parts['found']})"
        rows = []
        for run in planned:
            changes = ", ".join(f"{key}={value}" for key, value in changed_settings(run, planned).items())
            rows.append(("", run.name, f"{self.role(run, planned)}: {changes or 'nothing changed'}"))
        return "\n".join([f"AblationSpec({self.question!r}, {len(planned)} runs)", *columns(rows)])

    __str__ = __repr__

    def role(self, run: PlannedRun, planned: Sequence[PlannedRun]) -> str:
        """Role of a run: the run that it is compared with, or what others use it for."""
        if run.reference:
            return f"against {run.reference}"
        roles = ["reference"] if any(other.reference == run.name for other in planned) else []
        return " and ".join([*roles, *(["truth"] if run.name == self.truth else [])]) or "alone"

    def _settings(self) -> Iterable[tuple[str, str, dict[str, Any]]]:
        """(name of the run, name in the file, settings) of every run."""
        for configuration, changes in self.configurations.items():
            for values in itertools.product(*self.axes.values()):
                placed: dict[str, Any] = self.base
                for (axis, choices), value in zip(self.axes.items(), values, strict=True):
                    placed = merge(placed, _nested(axis, value))
                    if isinstance(choices, Mapping):
                        placed = merge(placed, choices[value])
                yield "-".join([configuration, *map(str, values)]), configuration, merge(placed, changes)
        for name, changes in self.extra.items():
            yield name, name, merge(self.base, changes)

    def _check_axes(self, where: str) -> None:
        for axis, values in self.axes.items():
            if not values:
                raise SpecError(
                    f"{where}: axis {axis!r} has no values",
                    rule="at least one value",
                    fix="give values, or remove the axis",
                )
            for name, changes in self.configurations.items():
                if (own := lookup(changes, axis)) is not None:
                    raise SpecError(
                        f"{where}: configuration {name!r} sets {axis}",
                        found=f"{axis} = {own}",
                        rule=f"{axis} is an axis, which gives every configuration its values",
                        fix="move the configuration to `extra`, which is outside the axes",
                    )

    def _check_number(self, where: str) -> None:
        combinations = math.prod(len(values) for values in self.axes.values())
        if (number := len(self.configurations) * combinations + len(self.extra)) > MAX_RUNS:
            raise SpecError(
                f"{where}: {number:,} runs",
                found=f"{len(self.configurations):,} configurations, {combinations:,} combinations of the axes' values",
                rule=f"an ablation has at most {MAX_RUNS:,} runs",
                fix="take fewer values, or several ablations",
            )

    def _check_truth(self, where: str, planned: Sequence[PlannedRun]) -> None:
        """Refuse runs below float64 without a float64 ground truth."""
        exact = {run.name: run.configuration for run in planned if run.spec.in_float64}
        specs = {run.name: run.spec for run in planned}
        below = [run for run in planned if run.reference and run.name not in exact]
        inexact = [run.name for run in below if not compared_bitwise(run.spec, specs[run.reference])]
        if self.truth in exact or not (self.truth or inexact):
            return
        fitting = [f"`truth: {name}`" for name, configuration in exact.items() if configuration == self.reference]
        example = json.dumps(merge(self.configurations[self.reference], {"precision": "float64"}))  # YAML as well
        if self.truth:
            problem, cause = f"truth {self.truth!r}", f"{self.truth} is not a float64 run"
        else:
            below_it = " and ".join(sorted({specs[name].precision for name in inexact}))
            problem, cause = (
                "truth is missing",
                f"{below_it} runs that are compared with a reference: {listed(inexact)}",
            )
        raise SpecError(
            f"{where}: {problem}",
            found=cause,
            rule="below float64 nothing is exact: a run is judged by its distance from the truth, a float64 run, and "
            "that of its reference",
            fix=f"write {fitting[0] if fitting else f'`truth: exact` and `extra: {{exact: {example}}}`'}",
        )

    def _place(self, spec: RunSpec) -> tuple[str, ...]:
        """Values of a run on the axes."""
        dumped = spec.model_dump(mode="json")
        # settings of an own loss stand next to its name in a file, and in its surrogate afterwards
        stored = {axis: axis.replace("loss.", "loss.surrogate.", 1) for axis in self.axes if _is_own(axis)}
        return tuple(str(lookup(dumped, stored.get(axis, axis))) for axis in self.axes)


def _is_own(axis: str) -> bool:
    return axis.split(".")[:2] in (["loss", "settings"], ["loss", "engine"])


def ablation_file(source: Path | str, project: Path | None = None) -> Path:
    """The file itself, or ``ablation.yaml`` of a folder.

    A relative path is one in the current folder if it exists there, and else one in the project (None: `project_root`),
    so that a notebook in ``notebooks/`` and a terminal name an ablation alike.
    """
    path = Path(source)
    if not path.exists() and ((project or project_root()) / path).exists():
        path = (project or project_root()) / path
    return path / "ablation.yaml" if path.is_dir() else path


def load_ablation(source: Path | str | Mapping[str, Any]) -> AblationSpec:
    """Read an ablation, or one run's spec as an ablation of one configuration, from a file or the settings themselves.

    Raises:
        SpecError: no such file, not YAML, a name given twice, an invalid setting.
    """
    if isinstance(source, Mapping):
        where, name, settings = "ablation", "run", source
    else:
        path = ablation_file(source)
        where, name, settings = str(path), path.stem, read_yaml(path)
    if not isinstance(settings, Mapping):
        raise SpecError(
            f"read {where}",
            found=f"a {type(settings).__name__}",
            rule="a mapping of settings",
            fix="experiments/ holds examples",
        )
    if not {"configurations", "axes", "question", "reference"}.intersection(settings):
        parse_spec(RunSpec, settings, where=where)
        settings = {"base": settings, "reference": name, "configurations": {name: {}}}
    check_structure(where, settings, AblationSpec.model_fields)
    ablation = parse_spec(AblationSpec, settings, where=where)
    ablation.expand(where=where)
    return ablation


def select(planned: Sequence[PlannedRun], names: Sequence[str]) -> list[PlannedRun]:
    """Select runs by name or configuration, with the runs that they need: reference, truth, clip decisions.

    Raises:
        SpecError: an unknown name.
    """
    known = {run.name for run in planned} | {run.configuration for run in planned}
    for name in names:
        if name not in known:
            raise unknown("choose runs", "name", name, known)
    needed: set[str | None] = set()
    more: set[str | None] = {run.name for run in planned if run.name in names or run.configuration in names}
    while more:
        needed |= more
        more = {
            name for run in planned if run.name in more for name in (run.reference, run.truth, run.spec.frozen_clip)
        } - needed
    return [run for run in planned if run.name in needed]


def changed_settings(run: PlannedRun, planned: Sequence[PlannedRun]) -> dict[str, Any]:
    """Settings, by dotted name, in which a run differs from its reference, or a reference from the defaults."""
    base = next((other.spec for other in planned if other.name == run.reference), RunSpec())
    before = flatten(base.model_dump(mode="json"))
    return {key: value for key, value in flatten(run.spec.model_dump(mode="json")).items() if value != before[key]}


def differences(before: RunSpec, after: RunSpec) -> dict[str, list[Any]]:
    """Settings that differ, by dotted name in alphabetical order: [value before, value after]."""
    old, new = (flatten(spec.model_dump(mode="json")) for spec in (before, after))
    keys = sorted(old.keys() | new.keys())
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def _parse_all(where: str, settings: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, RunSpec]:
    specs: dict[str, RunSpec] = {}
    problems: dict[str, list[str]] = {}  # a mistake -> the runs that have it: one of the base is in all of them
    known = set(fault_names())
    for name, _, changed in settings:
        try:
            specs[name] = RunSpec.model_validate(changed)
        except ValidationError as error:
            found = each_mistake(error, RunSpec)
        else:
            found = [f"fault {fault!r}: {nearest_faults(fault)}" for fault in sorted({*specs[name].faults} - known)]
        for mistake in found:
            problems.setdefault(mistake, []).append(name)
    if problems:
        lines = [f"{_runs(names, len(settings))}: {mistake}" for mistake, names in problems.items()]
        raise SpecError(
            f"{where}: {len({*itertools.chain(*problems.values())})} of {len(settings)} runs cannot be used",
            found=listed(lines, separator="; "),
            rule="settings of RunSpec, and faults of workbench.faults; unknown ones are refused",
            fix=f"correct the file; {WHERE_SETTINGS_ARE}",
        )
    return specs


def _runs(names: Sequence[str], count: int) -> str:
    return "every run" if len(names) == count > 1 else listed(names, 4)


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def lookup(settings: Mapping[str, Any], dotted: str) -> Any:
    """Value of a setting by its dotted name; None without it."""
    value: Any = settings
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
