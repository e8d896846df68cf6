"""The mutation score of a comparison: a result for every fault, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.atomic import read_json, to_json, write_whole
from workbench.columns import columns
from workbench.errors import RecordError
from workbench.sensitivity.distances import Apart, Change, Distances
from workbench.sensitivity.gates import Gate, GateScore

FORMAT = "workbench.sensitivity/1"
"""Version of the JSON form."""


@dataclass(frozen=True)
class Remedy:
    """A change of data or settings under which the comparison rejects a fault that it accepted, or still accepts it.

    Attributes:
        change: names of the changes of `workbench.sensitivity.changes`, or of the fault's own ``shows_in``.
        settings: changed settings; the dataset of a change of data is named in ``change`` alone.
        killed: True if the comparison rejects the fault under the change.
        verdict: of the comparison.
    """

    change: str
    settings: Mapping[str, Any]
    killed: bool
    verdict: str


@dataclass(frozen=True)
class FaultResult:
    """One admissible fault.

    Attributes:
        fault: its name, ``family`` its letter, and ``what`` the mistake in a sentence.
        changes_gradient: True if the fault makes a gradient wrong; False for one of metrics, norms or the update.
        configuration: the run in which it was planted.
        missing: facts that it needs and that data and settings lack; predicted to be hidden if there are any.
        verdict: of the comparison of the faulty run with the clean baseline; ``why`` its explanation.
        killed: True if the comparison rejects the faulty run.
        distances: what gates compare; None if the faulty run failed.
        remedies: changes that were tried on a survivor, the smallest first.
        generated: True or False if the comparison rejects it on the generated dataset; None: not measured.
    """

    fault: str
    family: str
    what: str
    changes_gradient: bool
    configuration: str
    missing: tuple[str, ...]
    verdict: str
    why: str
    killed: bool
    distances: Distances | None
    remedies: tuple[Remedy, ...] = ()
    generated: bool | None = None

    @property
    def predicted_killed(self) -> bool:
        """True if nothing that the fault needs is missing."""
        return not self.missing

    @property
    def remedy(self) -> Remedy | None:
        """The smallest change that was measured to kill it; None if none did."""
        return next((remedy for remedy in self.remedies if remedy.killed), None)


@dataclass(frozen=True)
class Sensitivity:
    """The faults that a comparison sees, and those that it cannot see.

    Attributes:
        ablation: its name.
        configurations: measured runs, with the verdict of each without a fault.
        left_out: runs that were not measured -> the reason.
        results: one for each admissible fault.
        inadmissible: faults whose seam no measured run calls -> the seam.
        uncounted: faults that change no number -> what they do.
        seconds: wall time of the measurement.
        steps: optimizer steps of each run.
        dataset: documents and tokens of the generated dataset; {} if none was generated.
        gates: kill rates of other checks.
        command: the command of the record.
    """

    ablation: str
    configurations: Mapping[str, str]
    left_out: Mapping[str, str]
    results: tuple[FaultResult, ...]
    inadmissible: Mapping[str, str]
    uncounted: Mapping[str, str]
    seconds: float
    steps: int
    dataset: Mapping[str, int] = field(default_factory=dict)
    gates: tuple[GateScore, ...] = ()
    command: str = ""

    @property
    def killed(self) -> int:
        """Number of admissible faults that the comparison rejects."""
        return sum(result.killed for result in self.results)

    @property
    def score(self) -> float:
        """Killed faults over admissible ones; NaN without any."""
        return self.killed / len(self.results) if self.results else math.nan

    @property
    def of_gradients(self) -> tuple[int, int]:
        """Killed and admissible faults among those that make a gradient wrong."""
        wrong = [result for result in self.results if result.changes_gradient]
        return sum(result.killed for result in wrong), len(wrong)

    @property
    def survivors(self) -> tuple[FaultResult, ...]:
        """Admissible faults that the comparison accepts."""
        return tuple(result for result in self.results if not result.killed)

    @property
    def disagreements(self) -> tuple[FaultResult, ...]:
        """Faults of which prediction and measurement differ."""
        return tuple(result for result in self.results if result.killed != result.predicted_killed)

    def result(self, fault: str) -> FaultResult:
        """Return the result of a fault.

        Raises:
            RecordError: it is not admissible here.
        """
        for each in self.results:
            if each.fault == fault:
                return each
        raise RecordError(
            f"result of fault {fault!r}",
            found=f"its seam {self.inadmissible[fault]} is not called"
            if fault in self.inadmissible
            else "no such fault",
            rule="admissible faults have a result",
            fix="choose one of `results`",
        )

    def with_gates(self, *gates: Gate) -> Sensitivity:
        """Return the record with the kill rates of gates on the same faulty runs."""
        return replace(self, gates=(*self.gates, *(gate.score(self.results) for gate in gates)))

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON data."""
        killed, admissible = self.of_gradients
        numbers = {
            "format": FORMAT,
            "score": self.score,
            "killed": self.killed,
            "admissible": len(self.results),
            "gradient_killed": killed,
            "gradient_admissible": admissible,
            "disagreements": [result.fault for result in self.disagreements],
        }
        return numbers | _finite(asdict(self))

    def save(self, path: Path | str) -> Path:
        """Write the record as JSON, and return its path."""
        return write_whole(Path(path), to_json(self.as_json()))

    @classmethod
    def load(cls, path: Path | str) -> Sensitivity:
        """Read a record that `save` wrote.

        Raises:
            RecordError: missing, damaged or of another version.
        """
        fix = "measure again: workbench sensitivity ABLATION"
        content = read_json(Path(path), requested=f"read {path}", fix=fix)
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}")
            return _read(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(
                f"read {path}", found=f"{type(error).__name__}: {error}", rule=f"a record of format {FORMAT}", fix=fix
            ) from None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        killed, admissible = self.of_gradients
        lines = [
            f"{self.ablation}: the comparison rejects {self.killed} of {len(self.results)} admissible faults "
            f"({_share(self.score)}), {killed} of {admissible} of those that make a gradient wrong",
            f"{len(self.configurations)} configurations, {self.steps} steps, {self.seconds:.0f} s; "
            f"{len(self.inadmissible)} faults are not admissible: no measured run calls their seam",
        ]
        lines += [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        if self.dataset:
            tested = [result for result in self.results if result.generated is not None]
            lines.append(
                f"the generated dataset ({self.dataset['documents']} documents, {self.dataset['tokens']} tokens) kills "
                f"{sum(bool(result.generated) for result in tested)} of {len(tested)} faults that data can show"
            )
        if self.survivors:
            lines += ["", "survivors:"]
            lines += columns(
                [(r.fault, r.configuration, _predicted(r), _remedy(r)) for r in self.survivors],
                ("fault", "configuration", "predicted", "smallest change that kills it"),
            )
        if self.disagreements:
            lines += ["", "prediction and measurement differ:"]
            lines += columns(
                [(r.fault, r.configuration, _predicted(r), r.verdict, r.why) for r in self.disagreements],
                ("fault", "configuration", "predicted", "measured", "why"),
            )
        else:
            lines += ["", "every prediction agrees with its measurement"]
        if self.gates:
            lines += ["", "other gates on the same faults:"]
            lines += columns(
                [(gate.name, f"{gate.killed} of {gate.admissible}", _share(gate.share)) for gate in self.gates],
                ("gate", "killed", "score"),
            )
        return lines


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _predicted(result: FaultResult) -> str:
    return f"hidden: {'; '.join(result.missing)}" if result.missing else "killed"


def _remedy(result: FaultResult) -> str:
    if result.remedy is not None:
        return result.remedy.change
    return "none of those tried" if result.remedies else ""


def _finite(value: Any) -> Any:
    """JSON has no infinities: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _number(value: Any) -> float:
    return float(value)


def _read(content: Mapping[str, Any]) -> Sensitivity:
    kept = {name: content[name] for name in ("ablation", "configurations", "left_out", "inadmissible", "uncounted")}
    return Sensitivity(
        **kept,
        results=tuple(_read_result(each) for each in content["results"]),
        seconds=_number(content["seconds"]),
        steps=int(content["steps"]),
        dataset=content["dataset"],
        gates=tuple(GateScore(**(each | {"survivors": tuple(each["survivors"])})) for each in content["gates"]),
        command=content["command"],
    )


def _read_result(content: Mapping[str, Any]) -> FaultResult:
    distances = content["distances"]
    return FaultResult(
        **{
            **content,
            "missing": tuple(content["missing"]),
            "remedies": tuple(Remedy(**each) for each in content["remedies"]),
            "distances": None if distances is None else _read_distances(distances),
        }
    )


def _read_distances(content: Mapping[str, Any]) -> Distances:
    def numbers(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        return kind(**{name: _number(value) for name, value in values.items()})

    return Distances(
        tuple(numbers(Change, each) for each in content["loss"]),
        tuple(numbers(Change, each) for each in content["gradient_norm"]),
        tuple(numbers(Apart, each) for each in content["logprobs"]),
        None if content["weights"] is None else numbers(Apart, content["weights"]),
    )
