"""Runs of an ablation's configurations with and without a planted fault, on simulated ranks, and their comparison.

A trial is one whole run in a temporary folder (`workbench.train.worker.run_here`), compared with the clean baseline
by `workbench.compare.align`, with the budgets that a launched ablation has. Clean runs are shared by all trials.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workbench.compare.align import Subject, compare_runs
from workbench.compare.comparison import AGREES, Configuration
from workbench.errors import WorkbenchError
from workbench.faults import Fault, planted_faults
from workbench.records.directory import RunDirectory
from workbench.sensitivity.distances import Distances, measure_distances
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here


@dataclass(frozen=True)
class Plan:
    """One run of an ablation, as `workbench.launch.ablation.PlannedRun` has it.

    Attributes:
        name: unique in the ablation.
        spec: its settings.
        reference: the baseline that it is compared with; "" for a baseline.
        truth: the float64 run that budgets below float64 are measured from; "" if none.
    """

    name: str
    spec: RunSpec
    reference: str = ""
    truth: str = ""


@dataclass(frozen=True)
class Clean:
    """A run without a fault.

    Attributes:
        run: its record.
        seams: seams of faults that it has called.
        verdict: of the comparison with its baseline.
        why: the comparison's explanation.
    """

    run: RunDirectory
    seams: frozenset[str]
    verdict: str
    why: str

    @property
    def agrees(self) -> bool:
        """True if the comparison accepts the run, so that a fault can be what it rejects."""
        return self.verdict in AGREES


@dataclass(frozen=True)
class Trial:
    """A run with a fault.

    Attributes:
        verdict: of the comparison of the faulty run with the clean baseline.
        why: the comparison's explanation.
        distances: loss, gradient norm, log-probabilities and weights against the clean run of the same configuration;
            None if the run failed.
    """

    verdict: str
    why: str
    distances: Distances | None

    @property
    def killed(self) -> bool:
        """True if the comparison rejects the run."""
        return self.verdict not in AGREES


class Trials:
    """The runs of one measurement, in one folder.

    Args:
        plans: all runs of the ablation that trials may need, baselines and ground truth included.
        folder: gets the run directories.
        project: the folder that paths in specs are relative to.
        report_progress: called with a line after each run.
    """

    def __init__(
        self,
        plans: Iterable[Plan],
        folder: Path,
        project: Path,
        *,
        report_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.plans = {plan.name: replace(plan, spec=_recorded(plan.spec)) for plan in plans}
        self.folder, self.project = folder, project
        self._report = report_progress or (lambda line: None)
        self._clean: dict[str, tuple[RunDirectory, frozenset[str]]] = {}

    def clean(self, name: str, seams: Iterable[str] = ()) -> Clean:
        """Run a configuration without a fault, and compare it with its baseline.

        Raises:
            WorkbenchError: simulated ranks cannot run it, such as parameters sharded by FSDP2.
        """
        plan = self.plans[name]
        run, called = self._clean_run(name, seams)
        result = self._compared(plan, plan.name, run)
        self._report(f"{name}: {result.verdict}")
        return Clean(run, called, result.verdict, result.why)

    def trial(self, name: str, fault: Fault) -> Trial:
        """Run a configuration with a fault, and compare it with the clean baseline."""
        plan = self.plans[name]
        clean, _ = self._clean_run(name)
        run = self._run(f"{fault.name}.{name}", plan.spec, [fault])
        result = self._compared(plan, f"{name} with {fault.name}", run)
        self._report(f"{fault.name} in {name}: {result.verdict}")
        distances = measure_distances(run, clean) if run.status == "succeeded" else None
        return Trial(result.verdict, result.why, distances)

    def _clean_run(self, name: str, seams: Iterable[str] = ()) -> tuple[RunDirectory, frozenset[str]]:
        if name not in self._clean:
            plan = self.plans[name]
            deciding = plan.spec.frozen_clip
            if deciding in self.plans and deciding != name:
                self._clean_run(deciding, seams)
            called: set[str] = set()
            run = self._run(name, plan.spec, [_recorder(seam, called) for seam in sorted(set(seams))], raises=True)
            self._clean[name] = run, frozenset(called)
        return self._clean[name]

    def _run(self, name: str, spec: RunSpec, faults: Sequence[Fault], *, raises: bool = False) -> RunDirectory:
        decided = {"frozen_clip_run": self._clean[spec.frozen_clip][0].path.name} if spec.frozen_clip else {}
        run = RunDirectory.create(self.folder, name, spec, **decided)
        with _quiet(), planted_faults(faults), contextlib.ExitStack() as expected:
            if not raises:  # a fault may end a run in any exception, which the run directory records
                expected.enter_context(contextlib.suppress(Exception))
            run_here(run, self.project)
        return run

    def _compared(self, plan: Plan, subject: str, run: RunDirectory) -> Configuration:
        """Compare a run with the clean baseline of its plan; a baseline's own faulty run with its clean one."""
        reference = plan.reference or (plan.name if subject != plan.name else "")
        others = [name for name in dict.fromkeys((reference, plan.truth)) if name]
        subjects = [Subject(name, self._clean_run(name)[0]) for name in others]
        subjects.append(Subject(subject, run, reference, plan.truth))
        return compare_runs(subjects, experiment="sensitivity", question="").configurations[-1]


def _recorded(spec: RunSpec) -> RunSpec:
    """The spec of a trial: everything that distances need is recorded, on the CPU, without the spec's own faults."""
    record: Mapping[str, Any] = {"gradients": "full", "tokens": True, "checkpoint_every": spec.steps}
    return spec.merged({"record": record, "device": "cpu", "faults": []})


def _recorder(seam: str, called: set[str]) -> Fault:
    """A replacement of a seam that changes nothing and records the call."""

    def recording(correct: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            called.add(seam)
            return correct(*args, **options)

        return record

    return Fault(f"call of {seam}", "", "", "", "", seam, recording)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what runs print: a fault makes warnings of its own. One thread: these matrices are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)


def needed_plans(plans: Mapping[str, Plan], name: str) -> list[Plan]:
    """Return a plan and those that it needs: baseline, ground truth, and the run whose clip decisions it takes."""
    needed: dict[str, Plan] = {}
    names = [name]
    while names:
        plan = plans[names.pop()]
        needed[plan.name] = plan
        others = (plan.reference, plan.truth, plan.spec.frozen_clip or "")
        names += [other for other in others if other in plans and other not in needed]
    return list(needed.values())


def why_not_runnable(error: WorkbenchError) -> str:
    """Return the first line of an error, as the reason why a configuration is left out."""
    return f"{error.parts['requested']}: {error.parts['found']}" if error.parts["found"] else error.parts["requested"]
