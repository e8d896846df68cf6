"""From run directories to verdicts: align steps and parameters, measure distances, compare them with budgets.

README.md has the budgets, with their sources, and the verdicts. In short: in float64 every parameter is within 1e-12
of the baseline; below, no further from the float64 ground truth than a multiple of the baseline's own distance; two
runs in the reproducible mode have the same certificates, and gradients on disk are measured anyway.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.compare.certificates import CertificateComparison, compare_certificates
from workbench.compare.comparison import AGREES, Comparison, Configuration
from workbench.compare.distances import (
    agreement_sentence,
    difference_sentence,
    distance_of,
    float64_budgets,
    measured_budgets,
    name_factor,
    step_differences,
    unlike_parameters,
)
from workbench.compare.reading import (
    Gradients,
    RunReader,
    evidence_of,
    not_finite,
    ratio_histograms,
    same_tokens,
    too_far,
    too_small,
    why_vacuous,
)
from workbench.errors import RecordError
from workbench.records.certificate import compared_bitwise
from workbench.records.directory import RunDirectory
from workbench.records.failures import failure_summary


@dataclass(frozen=True)
class Subject:
    """One configuration of an ablation and its run.

    Attributes:
        run: None if it never started.
        reference: name of the baseline configuration; "" for a baseline.
        truth: name of the float64 configuration that budgets are measured from.
        settings: the spec as JSON data; None: read from the run.
        failure: reason for a missing run.
    """

    name: str
    run: RunDirectory | None
    reference: str = ""
    truth: str = ""
    settings: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None


def compare_runs(
    subjects: Sequence[Subject], *, experiment: str, question: str, provenance: Mapping[str, Any] | None = None
) -> Comparison:
    """Compare every configuration with its baseline.

    Raises:
        RecordError: a reference or truth is not among the subjects.
    """
    by_name = {subject.name: subject for subject in subjects}
    for subject in subjects:
        for role in (subject.reference, subject.truth):
            if role and role not in by_name:
                raise RecordError(
                    f"compare {subject.name!r} against {role!r}",
                    found="no such configuration",
                    rule=f"one of {', '.join(by_name)}",
                    fix="correct reference or truth of the ablation",
                )
    # A run that others are compared with is read once.
    followed = {role for subject in subjects for role in (subject.reference, subject.truth) if role}
    readers = {name: RunReader(run) for name in followed if (run := by_name[name].run)}
    with _one_thread_for_small(subjects):
        # One that cannot be compared becomes a failed configuration and does not stop the others.
        configurations = [_configuration(subject, by_name, readers) for subject in subjects]
    return Comparison(experiment, question, configurations, dict(provenance or {}))


SMALL_BYTES = 2**26
"""Size of the largest recorded file up to which one thread adds: for 2 MB two take eight times its processor time."""


@contextlib.contextmanager
def _one_thread_for_small(subjects: Sequence[Subject]) -> Iterator[None]:
    """Compare small gradients in one thread; their sums then have the same bits on any number of cores."""
    files = [file for subject in subjects if subject.run for file in (subject.run.path / "tensors").glob("*")]
    threads = torch.get_num_threads()
    if max((file.stat().st_size for file in files), default=0) <= SMALL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _configuration(subject: Subject, by_name: Mapping[str, Subject], readers: Mapping[str, RunReader]) -> Configuration:
    base = _described(subject)
    if subject.run is None or base["state"] != "succeeded":
        failure = subject.failure or (subject.run.failure() if subject.run else None) or {"exception": base["state"]}
        return Configuration(**base, verdict="failed", why=failure_summary(failure), failure=dict(failure))
    run = readers.get(subject.name) or RunReader(subject.run)
    try:
        base |= {"steps": run.steps, "diverged_step": run.diverged_step}
        if not subject.reference:
            return _stands_alone(base, run, subject, readers)
        return _compared(base, run, subject, readers)
    except RecordError as error:
        why = f"{error.parts['requested']}: {error.parts['found']}"
        failure = {"exception": "RecordError", "message": str(error)}
        return Configuration(**base, verdict="failed", why=why, failure=failure)


def _described(subject: Subject) -> dict[str, Any]:
    """Fields of a configuration that are known before the comparison."""
    run = subject.run
    settings = subject.settings or (run.spec.model_dump(mode="json") if run else {})
    state = run.state if run else {"state": "failed"}
    return {
        "name": subject.name,
        "settings": settings,
        "against": subject.reference,
        "state": state["state"],
        "device": state.get("device", "cpu"),
        "device_note": state.get("device_note", ""),
        "run": f"runs/{run.path.name}" if run else "",
        "world_size": run.spec.layout.world_size if run else 1,
    }


def _stands_alone(
    base: dict[str, Any], run: RunReader, subject: Subject, readers: Mapping[str, RunReader]
) -> Configuration:
    """A run without a baseline: a baseline itself, or one of several runs that train differently."""
    base |= _seen(run, None)
    unsound = _not_finite(run)
    if not unsound and subject.truth and not run.spec.in_float64:
        unsound = _too_far_from_truth(run, readers.get(subject.truth))
    if unsound:
        return Configuration(**base, verdict="unsound baseline", why=unsound)
    if nothing := why_vacuous(run, run):
        return Configuration(**base, verdict="vacuous", why=nothing)
    why = "what the others are compared with" if subject.name in readers else "stands for itself"
    return Configuration(**base, verdict="reference", why=why)


def _too_far_from_truth(run: RunReader, reader: RunReader | None) -> str:
    """Reason why a baseline below float64 is unsound; "" if it is sound, or without a finished ground truth."""
    if reader is None or reader.run.state["state"] != "succeeded" or not _both_full(run.run, reader.run):
        return ""
    for step in range(min(run.spec.steps, reader.spec.steps)):
        if reader.diverged_step == step or _other_tokens(run, {"the truth": reader}, step):
            return ""
        gradients, true = run.gradients(step), reader.gradients(step)
        if not unlike_parameters(gradients, true) and (why := _baseline_error(run, reader, step, gradients, true)):
            return why
    return ""


def _baseline_error(reference: RunReader, truth: RunReader, step: int, gradients: Gradients, true: Gradients) -> str:
    return reference.once(("error", truth, step), lambda: _measured_error(reference, truth, step, gradients, true))


def _measured_error(reference: RunReader, truth: RunReader, step: int, gradients: Gradients, true: Gradients) -> str:
    error = math.hypot(*(distance_of(gradients[name], true[name]) for name in true))
    return too_far(reference, truth, step, error, math.hypot(*(float(g.double().norm()) for g in true.values())))


def _compared(
    base: dict[str, Any], run: RunReader, subject: Subject, readers: Mapping[str, RunReader]
) -> Configuration:
    """A run against its baseline: by certificates where those decide, else by distances and budgets."""
    reference = readers.get(subject.reference)
    finished = reference is not None and reference.run.state["state"] == "succeeded"
    certified = compare_certificates(run.run, reference.run) if reference and finished else None
    if reference and certified and _certificates_decide(subject, run.run, reference.run, certified):
        base |= _seen(run, reference)
        judged = _judge_bits(base, run, reference, certified)
    else:
        reference, truth = _standards(subject, run, readers)
        base |= _seen(run, reference)
        judged = _judge(base, run, reference, truth)
        judged = replace(judged, why=f"{judged.why}; {certified.why}") if certified else judged
    nothing = why_vacuous(run, reference) if judged.verdict in AGREES else ""
    return replace(judged, verdict="vacuous", why=f"nothing was compared: {nothing}") if nothing else judged


def _seen(run: RunReader, reference: RunReader | None) -> dict[str, Any]:
    """Evidence of a comparison: importance ratios, and tokens and documents with a gradient."""
    evidence = evidence_of(run, reference)
    ratios = ratio_histograms(run, reference or run)
    return {"ratios": ratios, "evidence": {} if evidence is None else evidence.as_json()}


def _certificates_decide(
    subject: Subject, run: RunDirectory, reference: RunDirectory, certified: CertificateComparison
) -> bool:
    """True if the mode demands equal certificates, or if they agree and nothing else can be measured."""
    measurable = _both_full(run, reference) and (run.spec.in_float64 or bool(subject.truth))
    return compared_bitwise(run.spec, reference.spec) or (certified.equal and not measurable)


def _both_full(run: RunDirectory, reference: RunDirectory) -> bool:
    return all(each.spec.record.gradients == "full" for each in (run, reference))


def _judge_bits(
    base: dict[str, Any], run: RunReader, reference: RunReader, certified: CertificateComparison
) -> Configuration:
    """Equal if all bits are; gradients on disk are also measured against the baseline's."""
    if certified.steps != run.spec.steps or run.spec.steps != reference.spec.steps:
        raise RecordError(
            f"compare {run.name} with {reference.name} by certificates",
            found=f"{certified.steps} certificates, {run.spec.steps} and {reference.spec.steps} steps",
            rule="a certificate for each step, and as many steps in both",
            fix="run both again",
        )
    whole, parameters = [], []
    for step in range(run.spec.steps if _both_full(run.run, reference.run) else 0):
        gradients, baseline = (each.gradients(step) for each in (run, reference))
        if not unlike_parameters(gradients, baseline):
            budgets = dict.fromkeys(baseline, (0.0, "bits"))
            rows, entry = step_differences(
                run, reference, reference, step, gradients, baseline, baseline, budgets, exact=True
            )
            parameters += rows
            whole.append(entry)
    base |= {"whole_gradient": whole, "parameters": parameters}
    if why := certified.not_finite:
        return Configuration(**base, verdict="unsound baseline", first_step=reference.diverged_step, why=why)
    if certified.equal:
        return Configuration(**base, verdict="equal", why=certified.why)
    first = next((name.removeprefix("gradient/") for name in certified.differing if name.startswith("gradient/")), None)
    return Configuration(
        **base,
        verdict="different",
        first_step=certified.step,
        first_parameter=first,
        why="; ".join(filter(None, (certified.why, _not_finite(run)))),
    )


def _standards(subject: Subject, run: RunReader, readers: Mapping[str, RunReader]) -> tuple[RunReader, RunReader]:
    """The finished baseline and ground truth of a configuration, in float64 the same run."""
    exact, standards = run.spec.in_float64, []
    truth = subject.reference if exact else subject.truth
    for role, name in (("reference", subject.reference), ("truth", truth)):
        other = readers.get(name)
        # Without a float64 ground truth the budget would be 0, and every correct layout different.
        if other is None or other.run.state["state"] != "succeeded":
            raise RecordError(
                f"its {role} did not finish, so there is nothing to compare it with"
                if name
                else f"below float64 a budget is measured from a float64 truth, and {subject.name} has none",
                found=name or f"precision {run.spec.precision}",
                rule=f"a finished {role}",
                fix="name a float64 configuration as `truth` of the ablation",
            )
        if (role == "truth" or exact) and not other.spec.in_float64:
            raise RecordError(
                f"{name} is the {role} of {subject.name}",
                found=f"precision {other.spec.precision}",
                rule="a truth, and the reference of a float64 run, are float64 runs",
                fix="add such a configuration to the ablation",
            )
        if other.spec.steps != run.spec.steps:
            raise RecordError(
                f"compare {run.name} with {name}",
                found=f"{run.spec.steps} steps against {other.spec.steps}",
                rule="configurations of one ablation take the same number of steps",
                fix="set steps in the base of the ablation",
            )
        standards.append(other)
    return standards[0], standards[0] if exact else standards[1]


def _not_finite(run: RunReader) -> str:
    """The step from which loss or gradient are not finite, in a sentence; "" if they always are."""
    return "" if run.diverged_step is None else f"from step {run.diverged_step} on its loss or gradient is not finite"


def _judge(base: dict[str, Any], run: RunReader, reference: RunReader, truth: RunReader) -> Configuration:
    exact = run.spec.in_float64
    whole, parameters, stopped, unsound = [], [], "", False
    for step in range(run.spec.steps):
        stopped = not_finite("baseline", reference, step) or not_finite("float64 ground truth", truth, step)
        if unsound := bool(stopped):
            break
        if stopped := _other_tokens(run, {"the reference": reference, "the truth": truth}, step):
            break
        gradients, baseline = (each.gradients(step) for each in (run, reference))
        if unlike := unlike_parameters(gradients, baseline):
            return Configuration(
                **base,
                verdict="different",
                first_step=step,
                first_parameter=unlike[0].split(" ")[0],
                why=f"another model than the reference's: {'; '.join(unlike)}",
            )
        if stopped := too_small("baseline", reference, step, baseline):
            unsound = True
            break
        true = baseline if exact else truth.gradients(step)
        if unlike := unlike_parameters(gradients, true, whose="the truth"):
            raise RecordError(
                f"measure {run.name} by the truth {truth.name}",
                found="; ".join(unlike),
                rule="a truth is a run of the same model",
                fix="name such a run as `truth`",
            )
        if not exact and (stopped := _baseline_error(reference, truth, step, baseline, true)):
            unsound = True
            break
        budgets = reference.once(
            ("budgets", truth, step, exact),
            lambda: float64_budgets(baseline) if exact else measured_budgets(baseline, true),  # noqa: B023 (called now)
        )
        rows, entry = step_differences(run, reference, truth, step, gradients, baseline, true, budgets, exact=exact)
        parameters += rows
        whole.append(entry)
    failing = [w["step"] for w in whole if not w["within"]]
    bitwise = all(w["bitwise_equal"] for w in whole)
    base |= {"whole_gradient": whole, "parameters": parameters}
    if stopped and not failing:
        return Configuration(
            **base, verdict="unsound baseline" if unsound else "different", first_step=len(whole), why=stopped
        )
    if not failing:
        verdict = "equal" if exact or bitwise else "within budget"
        return Configuration(**base, verdict=verdict, why=agreement_sentence(verdict, whole, parameters, bitwise))
    first = [row for row in parameters if row.step == failing[0]]
    # In production precision the whole gradient may be over its budget while no single parameter is.
    worst = next((row for row in first if not row.within), max(first, key=lambda row: row.relative_l2))
    factor, meaning = name_factor(first, run.spec)
    return Configuration(
        **base,
        verdict="different",
        factor=factor,
        factor_meaning=meaning,
        first_step=failing[0],
        first_parameter=worst.parameter,
        why="; ".join(filter(None, (difference_sentence(failing[0], worst, first, factor, meaning), _not_finite(run)))),
    )


def _other_tokens(run: RunReader, others: Mapping[str, RunReader], step: int) -> str:
    """Reason why a step cannot be compared: runs that sample their own rollouts may have drawn other tokens.

    "" if it can, or if tokens were not recorded.
    """
    for role, other in others.items():
        if same_tokens(run, other, step) is False:
            since = f", and agrees in the {step} before" if step else ""
            return f"step {step}: it trains on other tokens than {role}{since}"
    return ""
