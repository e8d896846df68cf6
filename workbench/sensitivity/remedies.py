"""The smallest change of data or settings under which a comparison rejects a fault that it accepts.

A survivor lacks facts, and each of these names the change that provides it (`workbench.sensitivity.changes`). The
changes of all missing facts, and nothing more, are made in the configuration and in its baseline, and both are run
again: without all of them the fault has no effect. Where a missing fact has no change, the settings are those of the
fault's own ``shows_in``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, WorkbenchError
from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.sensitivity.changes import DATA, SETTINGS, changed
from workbench.sensitivity.facts import Facts, step_facts
from workbench.sensitivity.needs import GRADIENT, Need, missing_needs
from workbench.sensitivity.record import Remedy
from workbench.sensitivity.trials import Plan, Trial, Trials, needed_plans, why_not_runnable
from workbench.specs.reading import merge

SHOWS_IN = "the settings in which the fault declares to show"


class Remedies:
    """Changed configurations, each run once without a fault.

    Args:
        trials: of the unchanged configurations.
        facts: of each configuration that was measured.
    """

    def __init__(self, trials: Trials, facts: Mapping[str, Facts]) -> None:
        self.trials, self.facts = trials, facts
        self._changed: dict[str, Trials] = {}
        self._datasets: dict[tuple[str, tuple[str, ...]], Path] = {}

    def of(self, fault: Fault, name: str, missing: Sequence[Need]) -> tuple[Remedy, ...]:
        """Try the changes of a survivor in turn, until one kills it.

        Args:
            fault: the survivor.
            name: the configuration in which it was planted.
            missing: its missing needs there.
        """
        if GRADIENT in missing:
            return ()
        tried: list[Remedy] = []
        changes = tuple(dict.fromkeys(need.change for need in missing))
        known = tuple(filter(None, changes))
        attempts = [(" and ".join(known), known, _settings(known))] if known == changes else []
        if fault.shows_in:
            # Without the tie of a tiny model's head, which a checkpoint defines.
            own = {key: value for key, value in fault.shows_in.items() if key != "model" or "source" in value}
            shown = merge(_settings(known), own)
            attempts.append((" and ".join((SHOWS_IN, *known)), known, shown))
        for label, names, settings in attempts:
            edits = tuple(each for each in names if each in DATA)
            try:
                chosen = self._configuration(fault, name, settings, edits)
                trial = self._trial(fault, chosen, settings, edits)
            except WorkbenchError as error:  # such as a layout that the changed rows do not fit
                tried.append(Remedy(label, settings, False, why_not_runnable(error)))
                continue
            tried.append(Remedy(label, settings, trial.killed, trial.verdict))
            if trial.killed:
                break
        return tuple(tried)

    def _configuration(self, fault: Fault, name: str, settings: Mapping[str, Any], edits: tuple[str, ...]) -> str:
        """The smallest configuration in which nothing is missing under the change; the survivor's own if none is."""
        for other in (name, *self.facts) if edits else ():
            facts = self.facts[other]
            spec = changed(facts.spec, settings)
            batch = edited(load(self.trials.project / spec.data.path), edits)
            other_facts = replace(facts, spec=spec, steps=step_facts(batch, spec))
            if all(
                need.observed for need in missing_needs(fault, other_facts)
            ):  # what a run meets is not known before it
                return other
        return name

    def _trial(self, fault: Fault, name: str, settings: Mapping[str, Any], edits: tuple[str, ...]) -> Trial:
        key = json.dumps([name, settings, edits], sort_keys=True)
        if key not in self._changed:
            plans = [self._plan(plan, name, settings, edits) for plan in needed_plans(self.trials.plans, name)]
            folder = self.trials.folder / f"changed{len(self._changed):03d}"
            self._changed[key] = Trials(plans, folder, self.trials.project)
        trials = self._changed[key]
        clean = trials.clean(name)
        if not clean.agrees:
            raise RecordError(f"without the fault {name} is {clean.verdict}", found=clean.why)
        return trials.trial(name, fault)

    def _plan(self, plan: Plan, name: str, settings: Mapping[str, Any], edits: tuple[str, ...]) -> Plan:
        """A plan under a change; the layout changes in the configuration alone, not in what it is compared with."""
        own = dict(settings) if plan.name == name else {key: v for key, v in settings.items() if key != "layout"}
        path = plan.spec.data.path
        if edits:
            own = merge(own, {"data": {"path": str(self._dataset(path, edits))}})
        return replace(plan, spec=changed(plan.spec, own))

    def _dataset(self, path: str, edits: tuple[str, ...]) -> Path:
        if (path, edits) not in self._datasets:
            folder = self.trials.folder / f"dataset{len(self._datasets):03d}"
            edited(load(self.trials.project / path), edits).save(folder)
            self._datasets[path, edits] = folder
        return self._datasets[path, edits]


def edited(batch: RolloutBatch, edits: Sequence[str]) -> RolloutBatch:
    """Return a rollout dataset with changes of `DATA`, one after another."""
    for name in edits:
        batch = DATA[name](batch)
    return batch


def _settings(changes: Sequence[str]) -> dict[str, Any]:
    """Merge the settings of changes; those of data have none."""
    settings: dict[str, Any] = {}
    for name in changes:
        settings = merge(settings, dict(SETTINGS.get(name, {})))
    return settings
