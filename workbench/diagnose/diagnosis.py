"""A diagnosis: ranked causes with their evidence, and the experiment that would separate the likeliest ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.diagnose.causes import CAUSES, Cause
from workbench.diagnose.causes.cause import Judged
from workbench.diagnose.causes.flowed import flowed, spoken_against
from workbench.diagnose.denominators import AXES
from workbench.diagnose.evidence import Evidence, compare_records
from workbench.diagnose.facts import Facts
from workbench.diagnose.record import Record
from workbench.diagnose.sight import Sight, fewest, not_finite, sight_of, unsampled
from workbench.errors import RecordError, SpecError
from workbench.metrics.evidence import Evidence as Counts

REPORTED = 0.1
"""A cause with a lower score is not reported."""
RULED_OUT = 0.05
"""Multiplier of a score if an experiment speaks against the cause, or if a precondition is missing."""
AGAINST = 0.5
"""Multiplier of a score of a cause that would show in weights of predictions, and does not."""
NEAR = 0.5
"""A suspect scores at least this fraction of the first."""

UNTOLD = 0.45
"""Highest score of a cause that takes inputs of the loss for equal which were not recorded: other inputs of it would
look the same."""
_DECIDED = 0.7
"""A higher score rests on more than the direction or the length of a gradient."""
_TAKE_FOR_EQUAL = (
    *("uneven_weights", "term_without_gradient", "ranks_lost", "added_repeatedly", "unnamed_factor", "other_loss"),
    *("some_parameters", "other_count"),
)
_VAGUE = 0.03
"""Relative tolerance of norms beyond which a factor of all of them is no proof of one: that of bfloat16."""
_INPUTS = ("policy_logprobs", "old_logprobs", "advantages", "targets")

EQUAL, DIFFERENT, VACUOUS, UNSOUND = "equal", "different", "vacuous", "unsound baseline"
_VERDICTS = {"no_difference": EQUAL, "nothing_compared": VACUOUS, "unsound_baseline": UNSOUND}
"""First cause -> verdict; any other cause is a difference."""

Runner = Callable[[dict[str, Any]], tuple[Record, Record]]


@dataclass(frozen=True)
class Suspicion:
    """One cause in a diagnosis.

    Attributes:
        score: from 0 to 1.
        missing: parts of a record that it reads, and that one of the two does not have.
        needs: sizes that must exceed 1 for it to act.
    """

    name: str
    description: str
    score: float
    evidence: tuple[str, ...]
    missing: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Experiment:
    """A change of settings under which some suspects cannot act.

    Attributes:
        name: of the removed axis or setting.
        changes: settings to merge into those of both runs.
        excludes: suspects that cannot act then.
        leaves: suspects that still can.
    """

    name: str
    description: str
    changes: dict[str, Any]
    excludes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """An experiment and its outcome.

    Attributes:
        equal: True if the two records agreed under it.
        verdict: on the two records, see `Diagnosis.verdict`.
    """

    experiment: Experiment
    equal: bool
    verdict: str = ""

    @property
    def result(self) -> str:
        """Outcome in one or two words."""
        return "equal" if self.equal else self.verdict if self.verdict in (VACUOUS, UNSOUND) else "still different"


EXPERIMENTS = (
    Experiment("cp", "one context-parallel rank", {"layout": {"cp": 1, "order": "contiguous", "ulysses": 1}}),
    Experiment("dp", "one data-parallel rank", {"layout": {"dp": 1}}),
    Experiment("tp", "one tensor-parallel rank", {"layout": {"tp": 1, "sequence_parallel": False}}),
    Experiment("micro_batches", "one micro-batch", {"data": {"micro_batches": 1}}),
    Experiment(
        "one rank",
        "one rank and one micro-batch",
        {
            "layout": {"dp": 1, "cp": 1, "tp": 1, "order": "contiguous", "ulysses": 1, "sequence_parallel": False},
            "data": {"micro_batches": 1},
        },
    ),
    Experiment("temperature", "temperature 1", {"policy": {"temperature": 1.0}}),
)


@dataclass(frozen=True)
class Diagnosis:
    """Ranked causes of a difference between two records.

    Attributes:
        trusted: name of the record that is taken for right.
        suspect: name of the other.
        causes: those reported, ranked.
        sight: how much of the steps a comparison could have seen, of the record that shows less; None if unknown.
        notes: updates that did not reach a record's sampler; the trainer's own metrics that alone differ.
    """

    trusted: str
    suspect: str
    causes: tuple[Suspicion, ...]
    evidence: Evidence = field(repr=False)
    tried: tuple[Trial, ...] = ()
    sight: Counts | Sight | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the verdict proves less than it seems to, and `notes`."""
        return (*(self.sight.warnings if self.sight else ()), *self.notes)

    @property
    def verdict(self) -> str:
        """`EQUAL`, `DIFFERENT`, `VACUOUS` (nothing to compare) or `UNSOUND` (the trusted record is not finite)."""
        return _VERDICTS.get(self.causes[0].name, DIFFERENT)

    @property
    def equal(self) -> bool:
        """True if nothing differs beyond rounding, and there was something to compare."""
        return self.verdict == EQUAL

    @property
    def suspects(self) -> tuple[str, ...]:
        """Causes that are about as likely as the first."""
        return tuple(cause.name for cause in self.causes if cause.score >= NEAR * self.causes[0].score)

    def next_experiment(self) -> Experiment | None:
        """The change of settings that splits the suspects most evenly; None if none does, or one suspect is left."""
        near = [cause for cause in self.causes if cause.name in self.suspects]
        context, done = self.evidence.suspect.context, {tried.experiment.name for tried in self.tried}
        total, best, chosen = sum(cause.score for cause in near), 0.0, None
        for experiment in EXPERIMENTS:
            if experiment.name in done or _present(experiment.name, context) is not True:
                continue
            out = [cause for cause in near if _excluded(experiment, cause)]
            share = sum(cause.score for cause in out) / total
            if share * (1 - share) > best + 1e-9:  # ties go to the first, which changes least
                best = share * (1 - share)
                excluded = tuple(cause.name for cause in out)
                left = tuple(cause.name for cause in near if cause.name not in excluded)
                chosen = replace(experiment, excludes=excluded, leaves=left)
        return chosen

    def __getitem__(self, name: str) -> Suspicion:
        """A cause by its name.

        Raises:
            SpecError: it is not among those reported.
        """
        for cause in self.causes:
            if cause.name == name:
                return cause
        raise SpecError(
            f"cause {name!r} of a diagnosis",
            found=", ".join(cause.name for cause in self.causes),
            rule="a cause of this diagnosis",
            fix="take one of them",
        )

    @property
    def untold(self) -> tuple[str, ...]:
        """Inputs of the loss that both records would need to tell more."""
        return tuple(self.evidence.not_recorded(_INPUTS))

    @property
    def headline(self) -> str:
        """One-clause summary."""
        first = self.causes[0]
        if self.verdict in (EQUAL, VACUOUS):
            return first.description
        if self.verdict == UNSOUND:
            return f"{UNSOUND}: {first.evidence[0]}"
        if first.score <= UNTOLD and self.untold:
            return (
                f"from step {self.evidence.first.number} on something differs that cannot be told from these records; "
                f"note {', '.join(self.untold)} of each token to decide"
            )
        return f"from step {self.evidence.first.number} on: {first.description}"

    def __str__(self) -> str:
        """The causes with their evidence, then the next experiment."""
        lines = [f"{self.suspect or 'suspect'} against {self.trusted or 'trusted'}: {self.headline}"]
        for cause in self.causes:
            lines.append(f"  {cause.score:.2f}  {cause.name}: {cause.description}")
            lines += [f"        {reason}" for reason in cause.evidence]
            lines += [f"        not recorded: {', '.join(cause.missing)}"] if cause.missing else []
        if self.sight is not None:
            lines.append(f"  could have seen: {self.sight.summary()}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        lines += [f"  tried {tried.experiment.description}: {tried.result}" for tried in self.tried]
        if (experiment := self.next_experiment()) is not None:
            excluded = ", ".join(experiment.excludes)
            lines.append(f"  next: {experiment.description}; it would rule out {excluded}, or leave only these")
        return "\n".join(lines)

    __repr__ = __str__


def diagnose_records(trusted: Record, suspect: Record) -> Diagnosis:
    """Rank the possible causes of a difference between two records.

    Raises:
        RecordError: they have no step in common, or nothing in it that both recorded; or stored gradients are damaged.
    """
    evidence = compare_records(trusted, suspect)
    if not evidence.steps or not any(step.known or step.not_finite for step in evidence.steps):
        raise RecordError(
            f"diagnose {suspect!r} against {trusted!r}",
            found="nothing that both recorded",
            rule="a step with loss, metrics, gradient norms, gradients or tokens in both",
            fix="record the same parts of the same steps",
        )
    steps = [step.number for step in evidence.steps]
    trusted_sight, suspect_sight = (sight_of(record, steps) for record in (trusted, suspect))
    sight = fewest(trusted_sight, suspect_sight)
    notes = tuple(filter(None, (unsampled(record, steps) for record in (trusted, suspect))))
    if (unsound := _unsound(evidence)) is not None:
        return Diagnosis(trusted.name, suspect.name, (unsound,), evidence, sight=sight, notes=notes)
    facts = Facts(evidence)
    found, against = flowed(facts), spoken_against(facts)
    causes = [_with(found.get(cause.name), _suspicion(cause, facts, against), facts) for cause in CAUSES]
    ranked = _ranked(causes)
    if ranked[0].name == "no_difference" and sight.nothing:
        reasons = ("nothing was there to differ, so agreement proves nothing",)
        ranked = (Suspicion("nothing_compared", f"{VACUOUS}: {sight.nothing}", ranked[0].score, reasons),)
    alone = next((step for step in evidence.steps if step.foreign_metrics and not step.differs), None)
    if alone is not None and not evidence.first.differs:
        notes += (f"in step {alone.number} {_apart(alone.foreign_metrics)}: of a micro-batch, or merged otherwise",)
    return Diagnosis(trusted.name, suspect.name, ranked, evidence, sight=sight, notes=notes)


def _apart(metrics: Mapping[str, tuple[float, float]]) -> str:
    texts = [f"{key} is {wrong:.4g}, not {right:.4g}" for key, (right, wrong) in metrics.items()]
    return ", ".join(texts[:3])


def _unsound(evidence: Evidence) -> Suspicion | None:
    """The trusted record's own failure, if it comes no later than the first difference: nothing follows from it.

    A difference in an earlier step, where both were finite, stands.
    """
    numbers = {step.number for step in evidence.steps}
    last = evidence.first.number if evidence.first.differs else max(numbers)
    for step in evidence.trusted.steps:
        if step.number in numbers and step.number <= last and (broken := not_finite(step)):
            reason = f"step {step.number} of {evidence.trusted.name or 'trusted'}: {broken}"
            return Suspicion("unsound_baseline", "the trusted record itself is not finite", 0.99, (reason,))
    return None


def experimented(diagnosis: Diagnosis, run: Runner, *, at_most: int) -> Diagnosis:
    """The diagnosis after up to ``at_most`` experiments, each chosen from the outcomes of those before."""
    for _ in range(at_most):
        experiment = diagnosis.next_experiment()
        if experiment is None:
            break
        after = diagnose_records(*run(experiment.changes))
        causes = [replace(cause, score=cause.score * _weight(cause, experiment, after)) for cause in diagnosis.causes]
        diagnosis = replace(
            diagnosis, causes=_ranked(causes), tried=(*diagnosis.tried, Trial(experiment, after.equal, after.verdict))
        )
    return diagnosis


def _weight(cause: Suspicion, experiment: Experiment, after: Diagnosis) -> float:
    """Multiplier of a cause's score after an experiment.

    A cause is ruled out if the difference vanished although the experiment removed none of its needs, or stayed
    although the cause could not act. If it stayed and the cause could act, the new records must support it too.
    """
    if after.verdict in (VACUOUS, UNSOUND):
        return 1.0  # such an experiment shows nothing
    if after.equal:
        return 1.0 if _touched(experiment, cause) else RULED_OUT
    if _excluded(experiment, cause):
        return RULED_OUT
    return 1.0 if any(other.name == cause.name for other in after.causes) else 0.5


def _removed(experiment: Experiment) -> set[str]:
    return set(AXES) if experiment.name == "one rank" else {experiment.name}


def _excluded(experiment: Experiment, cause: Suspicion) -> bool:
    """True if a cause cannot act in an experiment: it removes one of its needs completely."""
    return any(set(need.split(" * ")) <= _removed(experiment) for need in cause.needs)


def _touched(experiment: Experiment, cause: Suspicion) -> bool:
    """True if an experiment removes any part of a cause's needs."""
    return any(set(need.split(" * ")) & _removed(experiment) for need in cause.needs)


def _with(found: Judged | None, judged: Suspicion, facts: Facts) -> Suspicion:
    """A suspicion, raised by what flowed through the models; what was noted of tokens is not overruled."""
    if found is None or found[0] <= judged.score:
        return judged
    score = found[0] * (RULED_OUT if any(_present(need, facts.context) is False for need in judged.needs) else 1.0)
    return judged if score <= judged.score else replace(judged, score=score, evidence=tuple(found[1]))


def _suspicion(cause: Cause, facts: Facts, against: Collection[str] = ()) -> Suspicion:
    score, reasons = cause.judge(facts)
    score *= AGAINST if cause.name in against else 1.0
    if score and any(_present(need, facts.context, facts.counts) is False for need in cause.needs):
        score *= RULED_OUT
    if score and (untold := _untold(cause, facts, score)):
        score, reasons = min(score * UNTOLD / _DECIDED, UNTOLD), [*reasons, untold]
    lacked = [part for part in cause.uses if part not in facts.step.known]
    return Suspicion(cause.name, cause.description, score, tuple(reasons), tuple(lacked), cause.needs)


def _untold(cause: Cause, facts: Facts, score: float) -> str:
    """Reason why a cause is only possible: unknown inputs of the loss, or numbers too rough; "" if there is none."""
    if facts.evidence.trusted.steps and all(record.of_workbench for record in (facts.evidence.trusted, facts.suspect)):
        return ""
    if cause.name in _TAKE_FOR_EQUAL and score < _DECIDED:
        lacking = facts.not_recorded(_INPUTS)
        return f"not recorded, and may differ as well: {', '.join(lacking)}" if lacking else ""
    rough = facts.step.cosine is None and facts.step.noise.gradient > _VAGUE
    exact = cause.name.startswith(("times_", "over_")) or cause.name in ("loss_alone", "metrics_alone")
    return (
        "norms in this precision tell no factor from another gradient, and no right one from it"
        if exact and rough
        else ""
    )


def _present(need: str, context: Mapping[str, Any], counts: Mapping[str, float] | None = None) -> bool | None:
    """True if a record has more than one of something (or a value other than the default); None if unknown."""
    known = {**context, **(counts or {})}
    if need == "one rank":
        return any((known.get(axis) or 1) > 1 for axis in AXES)
    if need == "packing":
        if "documents" not in known or not {"micro_batches", "input_rows"} & set(known):
            return None
        return known["documents"] > known.get("input_rows", known.get("micro_batches", 1) * known.get("dp", 1))
    if need in ("temperature", "kept_mass"):
        return None if known.get(need) is None else known[need] != 1
    sizes = [known.get(name) for name in need.split(" * ")]
    if any(size is not None and size > 1 for size in sizes):
        return True
    return None if None in sizes else False


def _ranked(causes: Sequence[Suspicion]) -> tuple[Suspicion, ...]:
    reported = sorted((cause for cause in causes if cause.score >= REPORTED), key=lambda cause: -cause.score)
    unknown = Suspicion(
        "unknown", "something that none of the known causes does", REPORTED, ("the records differ, and no cause fits",)
    )
    return tuple(reported) or (unknown,)
