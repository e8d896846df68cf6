"""The front door of `workbench.sensitivity`: the mutation score of an ablation's comparison, and an assertion of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import SpecError, VerdictError
from workbench.experiment import Experiment
from workbench.launch.ablation import select
from workbench.sensitivity.gates import Gate
from workbench.sensitivity.measure import measure
from workbench.sensitivity.record import Sensitivity
from workbench.sensitivity.trials import Plan


def sensitivity(
    ablation: Path | str | Mapping[str, Any],
    *,
    configurations: Sequence[str] = (),
    faults: Sequence[str] = (),
    gate: Gate | Sequence[Gate] = (),
    remedies: bool = True,
    dataset: Path | str | None = None,
    project: Path | None = None,
    report_progress: Callable[[str], None] | None = None,
    command: str = "",
) -> Sensitivity:
    """Return the mutation score of an ablation's comparison: known bugs that it rejects, and those that it accepts.

    Every admissible fault is planted in one run, on simulated ranks in this process, and the faulty run is compared
    with the clean baseline by the budgets of `Experiment.compare`; see `workbench.sensitivity`.

    Args:
        ablation: as of `Experiment`.
        configurations: names of configurations or runs in which faults are planted; if none is named, those in float64,
            whose budget is the narrowest, or all runs of an ablation without any.
        faults: names of faults; all if none is named.
        gate: other checks' tolerances, which get their kill rates on the same faulty runs.
        remedies: search the smallest change of data or settings that kills each survivor.
        dataset: folder of a generated rollout dataset of fewer than 200 tokens, on which every fault is measured that
            lacks nothing but data; None: none is generated.
        project: the folder that paths in specs are relative to.
        report_progress: called with a line after each run.
        command: for the record.

    Raises:
        SpecError: invalid settings, an unknown name, or no run that can be measured.

    Example:
        >>> score = sensitivity("experiments/layout_parity/ablation.yaml", gate=Gate(loss=0.005))   # doctest: +SKIP
        >>> print(score)                                                                            # doctest: +SKIP
    """
    experiment = Experiment(ablation, project=project)
    clean = [plan for plan in experiment.planned if not plan.spec.faults]
    named = {plan.name for plan in clean if plan.name in configurations or plan.configuration in configurations}
    if configurations:
        select(clean, configurations)  # an unknown name raises here
    record = measure(
        [Plan(plan.name, plan.spec, plan.reference, plan.truth) for plan in clean],
        ablation=experiment.name,
        project=experiment.project,
        configurations=[plan.name for plan in clean if plan.name in named],
        faults=faults,
        remedies=remedies,
        dataset=None if dataset is None else Path(dataset),
        report_progress=report_progress,
        command=command,
    )
    return record.with_gates(*(gate if isinstance(gate, Sequence) else (gate,)))


def assert_sensitive(ablation: Path | str | Mapping[str, Any], *, at_least: float, **settings: Any) -> Sensitivity:
    """Fail unless the comparison of an ablation rejects this share of known bugs of gradients; see `sensitivity`.

    Args:
        ablation: as of `Experiment`.
        at_least: share of the admissible faults that make a gradient wrong, from 0 to 1; as ``--least``.
        settings: of `sensitivity`; the changes that kill survivors are not searched unless ``remedies=True``.

    Raises:
        VerdictError: an AssertionError with the survivors and the facts that they lack; also if no fault is admissible.
        SpecError: a share outside 0 to 1, and as `sensitivity`.
    """
    if not 0 <= at_least <= 1:
        raise SpecError(f"at_least = {at_least!r}", rule="a share of faults, from 0 to 1", fix="0.6 is 60 %")
    score = sensitivity(ablation, **({"remedies": False} | settings))
    killed, admissible = score.of_gradients
    if not admissible or killed / admissible < at_least:
        raise VerdictError(
            f"the comparison of {score.ablation} rejects {at_least:.0%} of the faults that make a gradient wrong",
            found=str(score),
            rule=f"at least {at_least:g}",
            fix="change data or settings so that a survivor has the facts that it lacks; remedies=True tries changes",
        ).about(score)
    return score
