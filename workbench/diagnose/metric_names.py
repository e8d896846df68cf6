"""The keys of a foreign trainer's metrics, and ours for the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import RecordError
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import aliases, settings_of
from workbench.systems.registry import SYSTEMS


@dataclass(frozen=True)
class MetricNames:
    """Our keys of a trainer's metrics.

    Attributes:
        given: as a record's context maps them.
        of_system: as the system that it names defines them. Such a metric may be a mean over its micro-batches, and so
            of parts of the step.
    """

    given: Mapping[str, str]
    of_system: Mapping[str, str]

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> MetricNames:
        """Read ``metric_names`` and ``system`` of a record's context; another trainer's name is no system.

        Raises:
            RecordError: ``metric_names`` is no mapping to keys.
        """
        given, system = context.get("metric_names", {}), context.get("system")
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given.values()):
            raise RecordError(
                "metric_names in the context of a record",
                found=repr(given)[:80],
                rule="a mapping from the trainer's keys to ours, such as {'actor/pg_loss': 'loss/policy'}",
                fix="correct it in record.json, or leave it out",
            )
        known = aliases(str(system), settings_of(LossSpec())) if system in SYSTEMS else ()
        return cls(dict(given), {alias.metric.key: alias.canonical for alias in known if alias.canonical})

    def renamed(self, metrics: Mapping[str, float], partial: Iterable[str]) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics under our keys, and the names of those that are of parts of a step."""
        names = {**self.of_system, **self.given}
        of_parts = {names.get(name, name) for name in partial}
        of_parts |= {self.of_system[name] for name in metrics if name in self.of_system and name not in self.given}
        return {names.get(name, name): value for name, value in metrics.items()}, tuple(sorted(of_parts))
