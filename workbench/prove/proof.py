"""What a proof is: a verdict on every law, and for each that is broken the smallest case that breaks it. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.errors import SpecError
from workbench.prove.documents import Document, to_batch
from workbench.rollouts.batch import RolloutBatch

Verdict = Literal["holds", "broken", "declared", "declared, but holds", "not tried", "skipped"]
"""declared: broken, and the spec says so. not tried: wanted, and no case was held against it. skipped: left out because
it follows from others; `LawResult.why` says why."""


@dataclass(frozen=True)
class Counterexample:
    """The smallest case that was found to break a law.

    Attributes:
        plain: the arrangement that is taken for right, in words.
        changed: the other one.
        documents: a line of text for each document: its length, which tokens count (#), its group and reward.
        words: what differs, in a sentence.
        source: the documents as plain data.
    """

    plain: str
    changed: str
    documents: tuple[str, ...]
    words: str
    source: tuple[Document, ...]

    @property
    def batch(self) -> RolloutBatch:
        """The documents as a batch."""
        return to_batch(self.source)

    def __str__(self) -> str:
        lines = [self.words, f"plain:    {self.plain}", f"changed:  {self.changed}"]
        return "\n".join([*lines, *(f"document {number}: {line}" for number, line in enumerate(self.documents))])


@dataclass(frozen=True)
class LawResult:
    """What became of one law.

    Attributes:
        name: of the law.
        says: what may be changed.
        verdict: see `Verdict`.
        cases: how many were held against it.
        worst: greatest difference of any number from the plain arrangement's, in parts of it; NaN if there was no case.
        what: what differs in the counterexample: "gradient", "loss", "metric KEY"; or "not a number"; or "error".
        factor: what the gradient (or the loss, where the gradient is right) is multiplied with in the counterexample;
            None where it is not multiplied but another one.
        factor_name: what the factor equals, such as "1 / cp"; "" if nothing simple.
        counterexample: None where the law holds.
        why: of a verdict that needs words.
    """

    name: str
    says: str
    verdict: Verdict
    cases: int = 0
    worst: float = float("nan")
    what: tuple[str, ...] = ()
    factor: float | None = None
    factor_name: str = ""
    counterexample: Counterexample | None = None
    why: str = ""


@dataclass(frozen=True)
class Proof:
    """A verdict on every law for one loss.

    It is a proof by trying: a law that holds was held against generated cases, each in float64 and exact, and none of
    them broke it.

    Attributes:
        subject: the loss.
        laws: in the order of `workbench.prove.laws.LAWS`.
        seed: what the cases were drawn from.
        seconds: that it took.
    """

    subject: str
    laws: tuple[LawResult, ...]
    seed: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Every law that was wanted was tried, and each that is broken was declared."""
        return not self.broken and not self.untried

    @property
    def broken(self) -> tuple[str, ...]:
        """Laws that are broken, and nobody declared it."""
        return self._of("broken")

    @property
    def declared(self) -> tuple[str, ...]:
        """Laws that are broken as declared."""
        return self._of("declared")

    @property
    def untried(self) -> tuple[str, ...]:
        """Laws for which time or documents did not suffice."""
        return self._of("not tried")

    @property
    def kept(self) -> tuple[str, ...]:
        """Laws that hold."""
        return tuple(law.name for law in self.laws if law.verdict in ("holds", "declared, but holds"))

    @property
    def verdict(self) -> str:
        """All of it in a clause."""
        words = [f"breaks {', '.join(self.broken)}"] if self.broken else []
        words += [f"breaks {', '.join(self.declared)}, as declared"] if self.declared else []
        everything = len(self.kept) == len([law for law in self.laws if law.verdict != "skipped"])
        words += [f"keeps {'all ' if everything else ''}{len(self.kept)} law{'s' * (len(self.kept) != 1)}"]
        words += [f"{len(self.untried)} not tried"] if self.untried else []
        return "; ".join(words)

    def __getitem__(self, name: str) -> LawResult:
        """A law by its name.

        Raises:
            SpecError: it is not in this proof.
        """
        for law in self.laws:
            if law.name == name:
                return law
        raise SpecError(
            f"law {name!r} of a proof",
            rule=f"one of {', '.join(law.name for law in self.laws)}",
            fix="correct the name, or prove with that law",
        )

    def __str__(self) -> str:
        """A table of laws, then each counterexample."""
        lines = [
            (law.name, law.verdict, f"{law.cases}", f"{law.worst:.1e}" if law.cases else "", _said(law))
            for law in self.laws
        ]
        table = _columns([("law", "verdict", "cases", "worst", ""), *lines])
        shown = [
            f"{law.name}: {law.counterexample}"
            for law in self.laws
            if law.counterexample is not None and law.verdict == "broken"
        ]
        return "\n\n".join([f"{self.subject}: {self.verdict} ({self.seconds:.1f} s, seed {self.seed})", table, *shown])

    __repr__ = __str__

    def _of(self, verdict: Verdict) -> tuple[str, ...]:
        return tuple(law.name for law in self.laws if law.verdict == verdict)


def _said(law: LawResult) -> str:
    return law.why or (law.counterexample.words if law.counterexample else "")


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
