"""Search for counterexamples: case after case until the time is over, then the first failure of each is shrunk."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from workbench.errors import SpecError
from workbench.prove.arrangement import (
    NOTHING,
    Arrangement,
    Difference,
    Outcome,
    difference,
    one_rank_policy,
    one_row,
    perform,
)
from workbench.prove.documents import Document, draw_documents
from workbench.prove.invariants import DECLARED, EMPTY, Case, Invariant, shrink
from workbench.prove.proof import Counterexample, InvariantResult, Proof
from workbench.prove.subject import Subject

DRAWS = 6
"""Number of times documents are drawn for an invariant that does not fit those of a round."""
TRIES = 80
"""Maximum number of cases for shrinking one failure, within the time budget."""
CACHED = 32
"""Outcomes that are cached at a time, each with a gradient of every parameter."""
RESERVED = 0.4
"""Part of the budget reserved for shrinking, once something has failed and every invariant was tried."""

REPEATED = 1e-9
"""Of loss or gradient: allowed difference between two repetitions of a step."""
NEVER_DECLARED = ("error", "not a number")


@dataclass
class _Record:
    """State of one invariant: the first failure, or the first that no declaration excuses."""

    invariant: Invariant
    cases: int = 0
    worst: float = 0.0
    failed: tuple[Case, Difference] | None = None
    excused: bool = False
    why: str = ""


@dataclass
class _Search:
    """State of one proof. Outcomes of a round are cached: invariants share their plain arrangements."""

    subject: Subject
    seed: int
    deadline: float
    together: bool
    trained_only: bool = False
    drawn: dict[str, tuple[Document, ...]] = field(default_factory=dict)
    known: dict[Arrangement, Outcome] = field(default_factory=dict)

    def documents(self, seed: str) -> tuple[Document, ...]:
        if seed not in self.drawn:
            self.drawn[seed] = draw_documents(seed, one_rank_policy(), pairs=self.together)
        drawn = self.drawn[seed]
        return tuple(document for document in drawn if document.trained) if self.trained_only else drawn

    def outcome(self, arrangement: Arrangement) -> Outcome:
        if arrangement not in self.known:
            if len(self.known) == CACHED:
                self.known.clear()
            self.known[arrangement] = perform(self.subject, arrangement)
        return self.known[arrangement]

    def try_case(self, invariant: Invariant, case: Case) -> Difference | None:
        """The difference; None if these documents do not fit the invariant, or if nothing trains."""
        pair = invariant.arrange(case)
        if pair is None:
            return None
        plain = self.outcome(pair[0])
        if plain.error is not None:
            raise plain.error
        if not _finite(plain):
            if self.trained_only:  # padding is a document that trains nothing, too
                return None
            raise SpecError(
                f"prove {self.subject.title}",
                found=f"a loss of {plain.loss} or a gradient that is not a "
                f"number, in the plain arrangement ({pair[0]})",
                rule="one rank has finite numbers",
                fix="look at the loss on one rank first",
            )
        changed = self.outcome(pair[1])
        if (not invariant.idle and changed.idle) or plain.norm < NOTHING:
            return None
        return difference(plain, changed, pair)

    def check_repeatable(self) -> None:
        """Raise for a stateful loss: invariants compare two steps, and all would seem to be broken."""
        plain = one_row(self.documents(f"{self.seed} 0"))
        first = self.outcome(plain)
        if first.error is None and not _finite(first):
            self.trained_only = True  # 0 / 0 of a document that trains nothing is a break of masked_rows, found by it
            plain = one_row(self.documents(f"{self.seed} 0"))
            first = self.outcome(plain)
            self.trained_only = first.error is None and _finite(first)
        if first.error is not None or not (math.isfinite(first.norm) and math.isfinite(first.loss)):
            return  # reported by the first case
        again = perform(self.subject, plain)
        far = REPEATED * max(abs(first.loss), first.norm)
        if not abs(again.loss - first.loss) <= far or not all(
            torch.allclose(again.gradients[name], values, rtol=0.0, atol=far)
            for name, values in first.gradients.items()
        ):
            raise SpecError(
                f"prove {self.subject.title}",
                found=f"a loss of {first.loss:.9g}, and of {again.loss:.9g} of the same step on the same rank",
                rule="the same step has the same numbers each time",
                fix="let the function keep nothing from one call to the next",
            )

    def round(self, record: _Record, number: int) -> None:
        """One more case of an invariant."""
        for draw in range(DRAWS):
            seed = f"{self.seed} {number}" + (f" {draw}" if draw else "")
            case = record.invariant.draw(self.documents(seed), number, seed, together=self.together)
            if (result := self.try_case(record.invariant, case)) is not None:
                break
        else:
            return
        record.cases += 1
        record.worst = max(record.worst, result.worst)
        if result.differing:
            excused = excuses(self.subject.declared, record.invariant, case, result)
            if record.failed is None or not excused:
                record.failed, record.excused = (case, result), excused

    def cut_down(self, invariant: Invariant, case: Case, failure: Difference) -> tuple[Case, Difference]:
        """The smallest case that fails in the same way, and its difference."""
        differences, tries = {case: failure}, itertools.count()

        def fails(smaller: Case) -> bool:
            try:
                again = self.try_case(invariant, smaller)
            except Exception:
                return False  # a case that fails on one rank too is no counterexample
            if again is None or again.signature != failure.signature:
                return False
            if excuses(self.subject.declared, invariant, smaller, again):
                return False
            differences[smaller] = again
            return True

        smallest = shrink(case, invariant, fails, lambda: next(tries) < TRIES and time.process_time() < self.deadline)
        return smallest, differences[smallest]


def _finite(outcome: Outcome) -> bool:
    return math.isfinite(outcome.loss) and all(bool(values.isfinite().all()) for values in outcome.gradients.values())


def search(subject: Subject, invariants: Sequence[Invariant], *, seed: int, rounds: int, budget_s: float) -> Proof:
    """Try invariants on a subject, one case of each in turn, then shrink the failures that are not declared.

    An invariant that is broken and not excused is not tried again. "together" is tried only while all others hold: it
    would find the same failures. See `workbench.prove.prove` for the arguments.

    Raises:
        SpecError: a loss whose values are not finite on one rank, or not reproducible.
    """
    started = time.monotonic()
    together = subject.run_spec.loss.needs_pairs or subject.run_spec.data.keep_groups
    engine = _Search(subject, seed, time.process_time() + budget_s, together)
    records = [_Record(invariant) for invariant in invariants]
    if rounds and budget_s > 0:
        engine.check_repeatable()
    for number in range(rounds):
        for record in records:
            broken = [other for other in records if other.failed is not None and not other.excused]
            if record in broken:
                continue
            if record.invariant.name == "together" and (broken or subject.declared):
                record.why = "it combines invariants of which some do not hold"
                continue
            early = bool(broken) and number
            if time.process_time() < engine.deadline - early * RESERVED * budget_s:
                engine.round(record, number)
    for record in records:
        if record.failed is not None and not record.excused:
            record.failed = engine.cut_down(record.invariant, *record.failed)
    results = tuple(_result(record) for record in records)
    return Proof(subject.title, _idle_declarations(results, subject.declared), seed, time.monotonic() - started)


def excuses(declared: Sequence[str], invariant: Invariant, case: Case, difference: Difference) -> bool:
    """True if the spec declares this failure: other numbers, under a change that it names; never for errors."""
    return difference.differing[0] not in NEVER_DECLARED and any(
        invariant.name in DECLARED.get(entry, ())
        and (invariant.name != "empty_ranks" or case["kind"] == EMPTY.index(entry))
        for entry in declared
    )


def _result(record: _Record) -> InvariantResult:
    invariant = record.invariant
    base = InvariantResult(invariant.name, invariant.says, "holds", record.cases, record.worst)
    if record.why:
        return replace(base, verdict="skipped", why=record.why)
    if not record.cases:
        why = "time was over, or no documents fitted it and had a gradient"
        return replace(base, verdict="not tried", worst=math.nan, why=why)
    if record.failed is None:
        return base
    case, failure = record.failed
    pair = invariant.arrange(case)
    assert pair is not None, "it has failed"
    plain, changed = pair
    documents = changed.documents
    example = Counterexample(str(plain), str(changed), tuple(map(str, documents)), failure.description, documents)
    return replace(
        base,
        verdict="declared" if record.excused else "broken",
        differing=failure.differing,
        factor=failure.factor,
        factor_name=failure.factor_name,
        counterexample=example,
    )


def _idle_declarations(results: tuple[InvariantResult, ...], declared: Sequence[str]) -> tuple[InvariantResult, ...]:
    """Mark invariants that hold although declared, if none of those that the declaration covers was broken."""
    broken = {result.name for result in results if result.verdict == "declared"}
    idle = {name: entry for entry in declared for name in DECLARED.get(entry, ()) if not broken & set(DECLARED[entry])}
    return tuple(
        replace(result, verdict="declared, but holds", why=f"the spec declares {idle[result.name]!r}")
        if result.name in idle and result.verdict == "holds"
        else result
        for result in results
    )
