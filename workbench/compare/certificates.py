"""Two runs by their certificates: are they the same, bit for bit, and if not, which tensor and element is the first?"""

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
    """The first element in which two recorded tensors differ, in row-major order.

    Attributes:
        place: its index.
        value: in the run.
        reference: in the other.
        differing: how many elements differ.
        elements: of how many.
    """

    place: tuple[int, ...]
    value: float
    reference: float
    differing: int
    elements: int

    def __str__(self) -> str:
        """Where, what, and how many."""
        values = f"{self.value!r} against {self.reference!r}"
        if not self.place:
            return values
        where = ", ".join(map(str, self.place))
        return f"element [{where}] {values}, the first of {self.differing:,} in {self.elements:,}"


@dataclass(frozen=True)
class CertificateComparison:
    """One run's certificates held against another's.

    Attributes:
        run: name of the run.
        reference: name of the other.
        steps: how many both have.
        step: the first that differs; None if none does.
        differing: tensors of that step that differ, in the order in which the step computes them.
        tensors: how many there are.
        element: of the first of them, where both runs recorded it.
        unlike: tensors of that step of which the run's own ranks hold different replicas.
        evidence: of the run with fewer tokens that have a gradient; None for records without counts.
        vacuous: why equal bits prove nothing; "" if they prove something, or the records do not say.
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
        """True if every certificate is the other's: the same bits, whatever they prove; see `verdict`."""
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
        """It in a sentence."""
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
        words = f"{problem}step {self.step}: certificates part at {self.differing[0]}{more} of {self.tensors} tensors"
        words += f"; {self.element}" if self.element else ""
        return words + (f"; ranks hold different replicas of {self.unlike[0]}" if self.unlike else "")

    def __str__(self) -> str:
        """The two names and the sentence."""
        return f"{self.run} against {self.reference}: {self.why}"

    __repr__ = __str__


def compare_certificates(run: RunDirectory, reference: RunDirectory) -> CertificateComparison | None:
    """Hold the certificates of a run against those of another; None where one of them has none.

    Example:
        >>> compare_certificates(run, reference).equal  # doctest: +SKIP
        True

    Raises:
        RecordError: a damaged certificate, or one that is missing while its step has its hash.
    """
    mine, theirs = _certificates(run), _certificates(reference)
    steps = min(len(mine), len(theirs))
    if not steps:
        return None
    lines, their_lines = run.steps()[:steps], reference.steps()[:steps]
    evidence = weaker(Evidence.of_steps(lines), Evidence.of_steps(their_lines))
    vacuous = nothing_trained(lines) or nothing_trained(their_lines)
    for number in range(steps):
        if mine[number].hash != theirs[number].hash or mine[number].unlike:
            differing = mine[number].differing(theirs[number])
            return CertificateComparison(
                run.name,
                reference.name,
                steps,
                number,
                tuple(differing),
                len(mine[number].fingerprints),
                _element(differing[0], number, run, reference),
                mine[number].unlike,
                evidence,
                vacuous,
                first_not_finite(their_lines[: number + 1]),
            )
    return CertificateComparison(
        run.name,
        reference.name,
        steps,
        tensors=len(mine[0].fingerprints),
        evidence=evidence,
        vacuous=vacuous,
        not_finite=first_not_finite(their_lines),
    )


def nothing_trained(lines: Sequence[Mapping[str, Any]]) -> str:
    """Why step records of a run have nothing to compare; "" if they have something, or do not say.

    Records of earlier versions have no counts; a gradient norm of zero in every step says it too.
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
    found = []
    for number, step in enumerate(run.steps()):
        if "certificate" not in step:
            break
        certificate = read_certificate(run, number)
        if certificate is None or certificate.hash != step["certificate"]:
            raise RecordError(
                f"compare {run.path.name} by certificates",
                found=f"step {number}: {'no' if certificate is None else 'another'} certificate beside its hash",
                rule="a record keeps both",
                fix="run the configuration again",
            )
        found.append(certificate)
    return found


def _element(tensor: str, number: int, run: RunDirectory, reference: RunDirectory) -> Element | None:
    mine, theirs = (_recorded(tensor, number, each) for each in (run, reference))
    if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None
    apart = mine.view(_BITS[mine.element_size()]) != theirs.view(_BITS[theirs.element_size()])
    if not apart.any():
        return None
    place = tuple(apart.nonzero()[0].tolist())
    return Element(place, float(mine[place]), float(theirs[place]), int(apart.sum()), apart.numel())


def _recorded(tensor: str, number: int, run: RunDirectory) -> Tensor | None:
    """A tensor of a certificate, if the run kept it beside."""
    kind, _, name = tensor.partition("/")
    if kind == "loss":
        return torch.tensor(_number(run.steps()[number].get(tensor)), dtype=torch.float64)
    file, name = {"logprobs": ("tokens", "policy_logprobs"), "gradient": ("gradients", name)}.get(kind, ("", ""))
    kept = f"step{number:04d}.{file}"
    return run.read_tensors(kept).get(name) if file and run.has_tensors(kept) else None


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
