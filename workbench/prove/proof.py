"""A proof: a verdict on every invariant, and for each broken one the smallest case that breaks it. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.columns import columns
from workbench.errors import SpecError
from workbench.prove.documents import Document, to_batch
from workbench.rollouts.batch import RolloutBatch

Verdict = Literal["holds", "broken", "declared", "declared, but holds", "not tried", "skipped"]
"""declared: broken, as the spec declares. not tried: requested, but no case was tried. skipped: left out because it
follows from others; `InvariantResult.why` has the reason."""


@dataclass(frozen=True)
class Counterexample:
    """The smallest case that was found to break an invariant.

    Attributes:
        plain: description of the arrangement that is taken for right.
        changed: the other one.
        documents: a line of text for each document: its length, trained tokens (#), group and reward.
        description: the difference, one sentence.
        source: the documents as plain data.
    """

    plain: str
    changed: str
    documents: tuple[str, ...]
    description: str
    source: tuple[Document, ...]

    @property
    def batch(self) -> RolloutBatch:
        """The documents as a batch."""
        return to_batch(self.source)

    def __str__(self) -> str:
        lines = [self.description, f"plain:    {self.plain}", f"changed:  {self.changed}"]
        return "\n".join([*lines, *(f"document {number}: {line}" for number, line in enumerate(self.documents))])


@dataclass(frozen=True)
class InvariantResult:
    """Result for one invariant.

    Attributes:
        says: the change that it allows.
        verdict: see `Verdict`.
        worst: greatest relative difference of any number from the plain arrangement's; NaN if there was no case.
        differing: differing parts of the counterexample: "gradient", "loss", "metric KEY"; "not a number"; or "error".
        factor: multiplier of the gradient (or of the loss, where the gradient is right) in the counterexample; None
            where it is no multiple.
        factor_name: expression that equals the factor, such as "1 / cp"; "" if nothing simple.
        counterexample: None where the invariant holds.
        why: explanation, for verdicts that need one.
    """

    name: str
    says: str
    verdict: Verdict
    cases: int = 0
    worst: float = float("nan")
    differing: tuple[str, ...] = ()
    factor: float | None = None
    factor_name: str = ""
    counterexample: Counterexample | None = None
    why: str = ""


@dataclass(frozen=True)
class Proof:
    """A verdict on every invariant for one loss.

    The proof is empirical: an invariant that holds was tried on generated cases, each in float64 and exact, and none
    of them broke it.

    Attributes:
        invariants: results in the order of `workbench.prove.invariants.INVARIANTS`.
        seed: of the generated cases.
    """

    subject: str
    invariants: tuple[InvariantResult, ...]
    seed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if every requested invariant was tried, and each broken one was declared."""
        return not self.broken and not self.untried

    @property
    def broken(self) -> tuple[str, ...]:
        """Invariants that are broken and not declared."""
        return self._of("broken")

    @property
    def declared(self) -> tuple[str, ...]:
        """Invariants that are broken as declared."""
        return self._of("declared")

    @property
    def untried(self) -> tuple[str, ...]:
        """Invariants for which time or documents did not suffice."""
        return self._of("not tried")

    @property
    def kept(self) -> tuple[str, ...]:
        """Invariants that hold."""
        return self._of("holds", "declared, but holds")

    @property
    def verdict(self) -> str:
        """One-line summary."""
        parts = [f"breaks {', '.join(self.broken)}"] if self.broken else []
        parts += [f"breaks {', '.join(self.declared)}, as declared"] if self.declared else []
        everything = len(self.kept) + len(self._of("skipped")) == len(self.invariants)
        parts += [f"keeps {'all ' if everything else ''}{len(self.kept)} invariant{'s' * (len(self.kept) != 1)}"]
        parts += [f"{len(self.untried)} not tried"] if self.untried else []
        return "; ".join(parts)

    def __getitem__(self, name: str) -> InvariantResult:
        """The result for an invariant, by its name.

        Raises:
            SpecError: it is not in this proof.
        """
        for invariant in self.invariants:
            if invariant.name == name:
                return invariant
        raise SpecError(
            f"invariant {name!r} of a proof",
            rule=f"one of {', '.join(invariant.name for invariant in self.invariants)}",
            fix="correct the name, or prove with that invariant",
        )

    def __str__(self) -> str:
        """A table of invariants, then each counterexample."""
        lines = [
            (
                invariant.name,
                invariant.verdict,
                f"{invariant.cases}",
                f"{invariant.worst:.1e}" if invariant.cases else "",
                invariant.why or (invariant.counterexample.description if invariant.counterexample else ""),
            )
            for invariant in self.invariants
        ]
        table = "\n".join(columns(lines, ("invariant", "verdict", "cases", "worst", "")))
        shown = [
            f"{invariant.name}: {invariant.counterexample}"
            for invariant in self.invariants
            if invariant.counterexample is not None and invariant.verdict == "broken"
        ]
        return "\n\n".join([f"{self.subject}: {self.verdict} ({self.seconds:.1f} s, seed {self.seed})", table, *shown])

    __repr__ = __str__

    def _of(self, *verdicts: Verdict) -> tuple[str, ...]:
        return tuple(invariant.name for invariant in self.invariants if invariant.verdict in verdicts)
