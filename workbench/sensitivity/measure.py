"""Measure the mutation score of a comparison: plant every admissible fault in one of its runs, and compare."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.errors import SpecError, WorkbenchError
from workbench.faults import Fault, fault_names, load_fault
from workbench.policy.decoder import load_decoder
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.sensitivity.changes import DATA, small_dataset
from workbench.sensitivity.facts import Facts, observed, step_facts
from workbench.sensitivity.needs import Need, missing_needs
from workbench.sensitivity.parts import change_by_ratios_of_parts
from workbench.sensitivity.record import FaultResult, Sensitivity
from workbench.sensitivity.remedies import Remedies
from workbench.sensitivity.trials import Clean, Plan, Trials, why_not_runnable
from workbench.specs.reading import flatten

Report = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """The configuration in which a fault is planted, and the needs that it lacks there."""

    name: str
    missing: tuple[Need, ...]


@dataclass(frozen=True)
class Measured:
    """Clean runs of an ablation: what its faults are measured in.

    Attributes:
        trials: runs and compares.
        clean: clean runs that their comparison accepts, smallest first.
        facts: of each of them.
        left_out: other runs -> the reason.
    """

    trials: Trials
    clean: Mapping[str, Clean]
    facts: Mapping[str, Facts]
    left_out: Mapping[str, str]

    def choose(self, fault: Fault) -> Choice | None:
        """Choose the configuration of a fault; None if no run calls its seam.

        That which lacks fewest of its needs, none if it is predicted to show; of these the one with most settings of
        ``shows_in``, and of these the smallest.
        """
        called = [name for name, clean in self.clean.items() if fault.seam in clean.seams]
        if not called:
            return None
        choices = [Choice(name, missing_needs(fault, self.facts[name])) for name in called]
        return min(choices, key=lambda choice: (len(choice.missing), -self._shared(fault, choice.name)))

    def _shared(self, fault: Fault, name: str) -> int:
        settings = flatten(self.facts[name].spec.model_dump(mode="json"))
        return sum(settings.get(key) == value for key, value in flatten(dict(fault.shows_in)).items())


def measure(
    plans: Sequence[Plan],
    *,
    ablation: str,
    project: Path,
    configurations: Sequence[str] = (),
    faults: Sequence[str] = (),
    report_progress: Report | None = None,
    remedies: bool = True,
    dataset: Path | None = None,
    command: str = "",
) -> Sensitivity:
    """Return the mutation score of the comparison of an ablation's runs.

    Every run is executed on simulated ranks in this process; see `workbench.sensitivity` for the definitions.

    Args:
        plans: runs of the ablation, with the baselines and ground truths that they name.
        ablation: its name.
        project: the folder that paths in specs are relative to.
        configurations: names of runs in which faults are planted; if none is named, those in float64, or else all.
        faults: names of faults; all if none is named.
        report_progress: called with a line after each run.
        remedies: search the smallest change that kills each survivor.
        dataset: gets a generated rollout dataset of fewer than 200 tokens (`workbench.sensitivity.changes`), on which
            every fault is measured that lacks nothing but data; None: none is generated.
        command: for the record.

    Raises:
        SpecError: an unknown fault, online rollouts, or no run that can be measured.
    """
    began = time.monotonic()
    chosen = [load_fault(name) for name in faults or fault_names()]
    counted = [fault for fault in chosen if fault.changes_numbers or fault.changes_update]
    with tempfile.TemporaryDirectory(prefix="workbench-sensitivity-") as folder:
        trials = Trials(plans, Path(folder), project, report_progress=report_progress)
        measured = run_clean(trials, configurations or _narrowest(plans), [fault.seam for fault in counted])
        choices = {fault.name: measured.choose(fault) for fault in counted}  # every prediction comes before any trial
        results = tuple(
            _result(measured, fault, choice) for fault in counted if (choice := choices[fault.name]) is not None
        )
        if remedies:
            search = Remedies(trials, measured.facts)
            results = tuple(_with_remedies(search, result, choices) for result in results)
        described: dict[str, int] = {}
        if dataset is not None:
            results, described = _on_small_dataset(measured, results, choices, dataset)
    return Sensitivity(
        ablation,
        {name: clean.verdict for name, clean in measured.clean.items()},
        dict(measured.left_out),
        results,
        {fault.name: fault.seam for fault in counted if choices[fault.name] is None},
        {fault.name: fault.signature for fault in chosen if fault not in counted},
        time.monotonic() - began,
        max(facts.spec.steps for facts in measured.facts.values()),
        described,
        command=command,
    )


def _with_remedies(search: Remedies, result: FaultResult, choices: Mapping[str, Choice | None]) -> FaultResult:
    choice = choices[result.fault]
    if result.killed or choice is None:
        return result
    return replace(result, remedies=search.of(load_fault(result.fault), choice.name, choice.missing))


def _on_small_dataset(
    measured: Measured, results: Sequence[FaultResult], choices: Mapping[str, Choice | None], folder: Path
) -> tuple[tuple[FaultResult, ...], dict[str, int]]:
    """Measure every fault that data can show on a generated dataset; return the results, and its size."""
    trials = measured.trials
    batch = small_dataset(load(trials.project / next(iter(trials.plans.values())).spec.data.path))
    batch.save(folder, overwrite=True)
    path = {"data": {"path": str(folder.resolve())}}
    plans = [replace(plan, spec=plan.spec.merged(path)) for plan in trials.plans.values()]
    seams = [load_fault(result.fault).seam for result in results]
    small = run_clean(Trials(plans, trials.folder / "generated", trials.project), list(measured.clean), seams)
    tested = []
    for result in results:
        choice = choices[result.fault]
        assert choice is not None, "admissible"
        fault = load_fault(result.fault)
        if all(need.change in DATA for need in choice.missing) and (fitting := small.choose(fault)) is not None:
            result = replace(result, generated=small.trials.trial(fitting.name, fault).killed)
        tested.append(result)
    return tuple(tested), {"documents": batch.num_documents, "tokens": batch.num_tokens}


def _result(measured: Measured, fault: Fault, choice: Choice) -> FaultResult:
    trial = measured.trials.trial(choice.name, fault)
    return FaultResult(
        fault.name,
        fault.family,
        fault.what,
        fault.changes_gradient,
        choice.name,
        tuple(need.missing for need in choice.missing),
        trial.verdict,
        trial.why,
        trial.killed,
        trial.distances,
    )


def _narrowest(plans: Sequence[Plan]) -> list[str]:
    """Runs in float64, whose budget is the narrowest; all runs if none is in float64."""
    return [plan.name for plan in plans if plan.spec.in_float64] or [plan.name for plan in plans]


def run_clean(trials: Trials, names: Sequence[str], seams: Sequence[str]) -> Measured:
    """Run configurations without a fault, smallest first.

    Raises:
        SpecError: online rollouts, or no run that its comparison accepts.
    """
    clean, left_out, facts = {}, {}, {}
    batches: dict[str, RolloutBatch] = {}
    for name in sorted(names, key=lambda each: trials.plans[each].spec.layout.world_size):
        plan = trials.plans[name]
        if plan.spec.online.on:
            left_out[name] = "online rollouts: two runs would not train on the same tokens once a fault acts"
            continue
        try:
            run = trials.clean(name, seams)
        except WorkbenchError as error:
            left_out[name] = why_not_runnable(error)
            continue
        if not run.agrees:
            left_out[name] = f"without a fault it is {run.verdict}: {run.why}"
            continue
        path = plan.spec.data.path
        batches[path] = batches.get(path) or load(trials.project / path)
        clean[name], facts[name] = run, facts_of(plan, run, batches[path], trials.project)
    if not clean:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise SpecError(
            "measure what a comparison can see",
            found=reasons or "no run",
            rule="a run that the comparison accepts without a fault, or a fault is not what it rejects",
            fix="correct the ablation, or choose other configurations",
        )
    return Measured(trials, clean, facts, left_out)


def facts_of(plan: Plan, clean: Clean, batch: RolloutBatch, project: Path) -> Facts:
    """Return the facts of a configuration: of its data, its settings, and its clean run."""
    spec = plan.spec
    decoder = load_decoder(spec.model.source, project=project, tied=spec.model.tied, seed=spec.model.seed)
    config = decoder.config
    return Facts(
        spec,
        step_facts(batch, spec),
        observed(clean.run, change_by_ratios_of_parts(clean.run, batch, spec, project)),
        int(config.vocab_size),
        int(config.num_key_value_heads),
        int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0),
        spec.policy.temperature or batch.temperature,
        any(name.endswith(".sinks") for name, _ in decoder.named_parameters()),
        bool(config.tie_word_embeddings),
    )
