"""Bitwise comparison of two runs by their certificates, with the first tensor and element that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError
from workbench.metrics.evidence import Evidence, weaker
from workbench.records.certificate import Certificate, read_certificate
from workbench.records.directory import RunDirectory

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Element:
    """The first element, in row-major order, in which two recorded tensors differ; ``differing`` of ``elements`` do."""

    place: tuple[int, ...]
    value: float
    reference: float
    differing: int
    elements: int

    def __str__(self) -> str:
        """The index, the two values, and the number of elements that differ."""
        values = f"{self.value!r} against {self.reference!r}"
        if not self.place:
            return values
        return f"element {list(self.place)} {values}, the first of {self.differing:,} in {self.elements:,}"


@dataclass(frozen=True)
class CertificateComparison:
    """One run's certificates compared with another's.

    Attributes:
        run: name of the run.
        reference: name of the other.
        steps: number of steps that both have.
        step: the first that differs; None if none does.
        differing: tensors of that step that differ, in the order in which the step computes them.
        tensors: number of tensors in a certificate.
        element: first differing element of the first of them, where both runs recorded it.
        unlike: tensors of that step of which the run's own ranks hold different replicas.
        evidence: of the run with fewer tokens that have a gradient; None for records without counts.
        vacuous: reason why equal bits prove nothing; "" if they prove something, or if that was not recorded.
        not_finite: the first loss or gradient norm of the reference that is not finite, no later than the first
            difference; "" if all are.
    """

    run: str
    reference: str
    steps: int
    step: int | None = None
    differing: tuple[str, ...] = ()
    tensors: int = 0
    element: Element | None = None
    unlike: tuple[str, ...] = ()
    evidence: Evidence | None = None
    vacuous: str = ""
    not_finite: str = ""

    @property
    def equal(self) -> bool:
        """True if every certificate equals the other's: the same bits, whatever they prove; see `verdict`."""
        return self.step is None

    @property
    def verdict(self) -> str:
        """One of "equal", "different", "vacuous", "unsound baseline": equal bits of nothing or of NaN prove nothing."""
        if self.not_finite:
            return "unsound baseline"
        if not self.equal:
            return "different"
        return "vacuous" if self.vacuous else "equal"

    @property
    def why(self) -> str:
        """One-sentence explanation."""
        problem = f"unsound baseline ({self.not_finite}): " if self.not_finite else ""
        if self.equal:
            of = f"all {self.steps} steps" if self.steps > 1 else "the step"
            if self.vacuous and not problem:
                return f"vacuous: {self.vacuous}, so the same certificate of {of} proves nothing"
            return (
                f"{problem}the certificate of {of} is the reference's: loss, log-probabilities, gradients and "
                "weights are the same bits"
            )
        more = f" and {len(self.differing) - 1} more" if len(self.differing) > 1 else ", alone"
        text = f"{problem}step {self.step}: certificates part at {self.differing[0]}{more} of {self.tensors} tensors"
        text += f"; {self.element}" if self.element else ""
        return text + (f"; ranks hold different replicas of {self.unlike[0]}" if self.unlike else "")

    def __str__(self) -> str:
        """The two names and the sentence."""
        return f"{self.run} against {self.reference}: {self.why}"

    __repr__ = __str__


def compare_certificates(run: RunDirectory, reference: RunDirectory) -> CertificateComparison | None:
    """Compare the certificates of a run with those of another; None where one of them has none.

    Raises:
        RecordError: a damaged certificate, or one that is missing while its step has its hash.
    """
    certificates, baseline = _certificates(run), _certificates(reference)
    steps = min(len(certificates), len(baseline))
    if not steps:
        return None
    lines, baseline_lines = run.steps()[:steps], reference.steps()[:steps]
    evidence = weaker(Evidence.of_steps(lines), Evidence.of_steps(baseline_lines))
    vacuous = nothing_trained(lines) or nothing_trained(baseline_lines)
    pairs = enumerate(zip(certificates, baseline, strict=False))
    step = next((number for number, (own, other) in pairs if own.hash != other.hash or own.differing_replicas), None)
    certificate, differing, element = certificates[step or 0], [], None
    if step is not None:
        differing, baseline_lines = certificate.differing(baseline[step]), baseline_lines[: step + 1]
        element = _element(differing[0], step, run, reference)
    return CertificateComparison(
        run.name,
        reference.name,
        steps,
        step,
        tuple(differing),
        len(certificate.fingerprints),
        element,
        certificate.differing_replicas,
        evidence,
        vacuous,
        first_not_finite(baseline_lines),
    )


def nothing_trained(lines: Sequence[Mapping[str, Any]]) -> str:
    """Reason why step records of a run have nothing to compare; "" if they have something, or if it is unknown.

    Records of earlier versions have no counts; a gradient norm of zero in every step shows it too.
    """
    if (evidence := Evidence.of_steps(lines)) is not None and evidence.steps == len(lines):
        return evidence.nothing
    norms = [line.get("gradient/norm/global") for line in lines]
    return "every gradient is zero in every step" if norms and all(norm == 0 for norm in norms) else ""


def first_not_finite(lines: Sequence[Mapping[str, Any]]) -> str:
    """The first loss or gradient norm of step records that is not finite, with its step; "" if all are."""
    for line in lines:
        for key, name in (("loss/total/sum", "loss"), ("gradient/norm/global", "gradient norm")):
            if key in line and not math.isfinite(_number(line[key])):
                return f"step {line.get('step', '?')}: the {name} is {_number(line[key])}"
    return ""


def _certificates(run: RunDirectory) -> list[Certificate]:
    certificates = []
    for number, step in enumerate(run.steps()):
        if "certificate" not in step:
            break
        certificate = read_certificate(run, number)
        if certificate is None or certificate.hash != step["certificate"]:
            raise RecordError(
                f"compare {run.path.name} by certificates",
                found=f"step {number}: {'no' if certificate is None else 'another'} certificate next to its hash",
                rule="a record keeps both",
                fix="run the configuration again",
            )
        certificates.append(certificate)
    return certificates


def _element(tensor: str, number: int, run: RunDirectory, reference: RunDirectory) -> Element | None:
    value, other = (_recorded(tensor, number, each) for each in (run, reference))
    if value is None or other is None or value.shape != other.shape or value.dtype != other.dtype:
        return None
    apart = value.view(_BITS[value.element_size()]) != other.view(_BITS[other.element_size()])
    if not apart.any():
        return None
    place = tuple(apart.nonzero()[0].tolist())
    return Element(place, float(value[place]), float(other[place]), int(apart.sum()), apart.numel())


def _recorded(tensor: str, number: int, run: RunDirectory) -> Tensor | None:
    """A tensor of a certificate, if the run recorded its values too."""
    kind, _, name = tensor.partition("/")
    if kind == "loss":
        return torch.tensor(_number(run.steps()[number].get(tensor)), dtype=torch.float64)
    file, name = {"logprobs": ("tokens", "policy_logprobs"), "gradient": ("gradients", name)}.get(kind, ("", ""))
    stem = f"step{number:04d}.{file}"
    return run.read_tensors(stem).get(name) if file and run.has_tensors(stem) else None


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
