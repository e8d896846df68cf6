"""Check the invariants of an engine, and cut down what breaks one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.columns import columns
from workbench.engines.case import EngineCase, EngineStep, Text, check_step
from workbench.engines.invariants import INVARIANTS, EngineInvariant, Outcome, Trial
from workbench.engines.script import Engine
from workbench.errors import SpecError, VerdictError, did_you_mean

DOCUMENTS = (
    Text((5, 9, 14), (20,), 1.0),
    Text((5, 9, 14), (7, 30, 11, 4, 18, 25, 3), 0.0),
    Text((12, 3), (8, 8, 21), 0.25),
    Text((12, 3), (29, 6), 2.0),
    Text((17, 2, 26, 10), (13, 31, 5, 16, 22), -1.0),
    Text((17, 2, 26, 10), (9,), 0.5),
    Text((6, 28), (24, 15, 19, 2, 27, 10, 3, 12, 8, 21, 5), 3.0),
    Text((6, 28), (23, 7, 14, 30), 1.5),
)
"""Four pairs of one prompt each. Lengths are unequal within pairs, between pairs and between halves, so that every mean
over a part of the step differs from the mean over the step."""


@dataclass(frozen=True)
class Counterexample:
    """The smallest documents that were found to break an invariant.

    Attributes:
        description: the difference, one sentence.
        cases: descriptions of the arrangements that differ, the plain one first.
        documents: a line for each: a dot for a token of the prompt, # for a trained one.
    """

    description: str
    cases: tuple[str, ...]
    documents: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.description, *(f"case: {case}" for case in self.cases)]
        return "\n".join([*lines, *(f"document {number}: {text}" for number, text in enumerate(self.documents))])


@dataclass(frozen=True)
class EngineResult:
    """Result for one invariant.

    Attributes:
        verdict: "holds", "broken", "not offered" (the engine refuses the case) or "failed" (it raised).
        worst: greatest relative distance; of "effect" the least.
        factor: multiplier of the update in the counterexample; None if it is no multiple.
        why: of a verdict without a counterexample.
        counterexample: of a broken invariant.
    """

    name: str
    verdict: str
    worst: float
    factor: float | None = None
    why: str = ""
    counterexample: Counterexample | None = None


@dataclass(frozen=True)
class EngineProof:
    """A verdict on every invariant for one engine.

    Attributes:
        engine: its title.
        results: in the order of `INVARIANTS`.
        seconds: wall time.
    """

    engine: str
    results: tuple[EngineResult, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if at least one invariant holds and none is broken or failed."""
        return any(r.verdict == "holds" for r in self.results) and not self.broken and not self.failed

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of broken invariants."""
        return tuple(result.name for result in self.results if result.verdict == "broken")

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of invariants whose cases the engine raised in."""
        return tuple(result.name for result in self.results if result.verdict == "failed")

    def __getitem__(self, name: str) -> EngineResult:
        return next(result for result in self.results if result.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return the proof as JSON data."""
        return {
            "engine": self.engine,
            "seconds": self.seconds,
            "invariants": {
                r.name: {"verdict": r.verdict, "worst": r.worst, "factor": r.factor, "why": r.why}
                | (
                    {}
                    if r.counterexample is None
                    else {
                        "description": r.counterexample.description,
                        "cases": list(r.counterexample.cases),
                        "documents": list(r.counterexample.documents),
                    }
                )
                for r in self.results
            },
        }

    def __str__(self) -> str:
        rows = [
            (
                result.name,
                result.verdict,
                f"{result.worst:.1e}",
                result.counterexample.description if result.counterexample else result.why,
            )
            for result in self.results
        ]
        shown = [f"{result.name}: {result.counterexample}" for result in self.results if result.counterexample]
        head = f"{self.engine} ({self.seconds:.0f} s)"
        return "\n\n".join([head, "\n".join(columns(rows, ("invariant", "verdict", "distance", ""))), *shown])


class _Runner:
    """Runs generators of cases in lockstep; equal cases run once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: dict[EngineCase, EngineStep] = {}

    def run(self, judged: Sequence[tuple[EngineInvariant, Trial]]) -> list[Outcome]:
        """Return the outcome of each pair of invariant and trial."""
        running = {number: invariant.judge(trial) for number, (invariant, trial) in enumerate(judged)}
        requests = {number: next(each) for number, each in running.items()}
        outcomes: dict[int, Outcome] = {}
        while requests:
            self._take([case for cases in requests.values() for case in cases])
            following: dict[int, list[EngineCase]] = {}
            for number, cases in requests.items():
                try:
                    following[number] = running[number].send([self._steps[case] for case in cases])
                except StopIteration as done:
                    outcomes[number] = done.value
            requests = following
        return [outcomes[number] for number in range(len(judged))]

    def _take(self, cases: Sequence[EngineCase]) -> None:
        missing = [case for case in dict.fromkeys(cases) if case not in self._steps]
        if not missing:
            return
        steps = self._engine(missing)
        for case, step in zip(missing, steps, strict=True):
            if not step.refused and not step.error:
                check_step(step, f"{case}")
            self._steps[case] = step


def prove_engine(
    engine: Engine,
    *,
    title: str = "",
    invariants: Sequence[str] | None = None,
    documents: Sequence[Text] = DOCUMENTS,
    shrink: bool = True,
    report_progress: Callable[[str], None] = lambda line: None,
) -> EngineProof:
    """Check the invariants of an engine from outside, by weights before and after, reported losses and norms.

    Args:
        engine: a callable from cases to steps, or a `Script` that runs a driver in an environment of its own.
        title: display name.
        invariants: names; None: all of `INVARIANTS`.
        documents: of a step; a multiple of four, and documents 2k and 2k + 1 share their prompt.
        shrink: search smaller documents that break an invariant in the same way.
        report_progress: called with a line after each invariant.

    Raises:
        SpecError: an unknown invariant, or documents that do not divide.
        RecordError: a step without weights.

    Example:
        >>> proof = prove_engine(Script(python, "of_my_trainer.py"), invariants=["ranks"])   # doctest: +SKIP
        >>> print(proof["ranks"].counterexample)                                             # doctest: +SKIP
    """
    began = time.monotonic()
    chosen = _selected(invariants)
    texts = tuple(documents)
    if not texts or len(texts) % 4 or any(texts[at].prompt != texts[at + 1].prompt for at in range(0, len(texts), 2)):
        raise SpecError(
            f"prove an engine on {len(texts)} documents",
            rule="a multiple of four, of which each two neighbours share their prompt",
            fix="use workbench.engines.proof.DOCUMENTS",
        )
    runner = _Runner(engine)
    with tempfile.TemporaryDirectory() as name:
        whole = Trial(texts, _folder(Path(name), 0))
        outcomes = runner.run([(invariant, whole) for invariant in chosen])
        results = []
        for invariant, outcome in zip(chosen, outcomes, strict=True):
            kept, judged = texts, outcome
            if shrink and outcome.description:
                kept, judged = _shrunk(runner, invariant, outcome, texts, Path(name))
            results.append(_result(invariant, kept, judged))
            report_progress(f"{title}: {invariant.name} {results[-1].verdict}")
    return EngineProof(title or getattr(engine, "__name__", "engine"), tuple(results), time.monotonic() - began)


def assert_engine_proved(engine: Engine, **settings: Any) -> EngineProof:
    """Fail unless no invariant of an engine is broken; see `prove_engine` for the settings.

    Raises:
        VerdictError: an AssertionError with the table and the counterexamples.
    """
    proof = prove_engine(engine, **settings)
    if not proof.ok:
        raise VerdictError(
            f"prove {proof.engine}",
            found=str(proof),
            rule="a step does not depend on how its documents are split, and reported numbers are those of the update",
            fix="begin with the first counterexample",
        ).about(proof)
    return proof


def _selected(names: Sequence[str] | None) -> list[EngineInvariant]:
    for name in names or ():
        if name not in INVARIANTS:
            raise SpecError(
                f"invariant {name!r} of an engine",
                found=did_you_mean(name, INVARIANTS),
                rule=f"one of {', '.join(INVARIANTS)}",
                fix="correct the name",
            )
    return [each for each in INVARIANTS.values() if names is None or each.name in names]


def _folder(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir(exist_ok=True)
    return folder


def smaller(texts: tuple[Text, ...]) -> list[tuple[Text, ...]]:
    """Return smaller documents to try: a half of them, and completions of at most two tokens, or one and two."""
    short = tuple(Text(text.prompt[:2], text.completion[:2], text.reward) for text in texts)
    uneven = tuple(
        Text(text.prompt[:1], text.completion[: 1 + number // 2 % 2], text.reward) for number, text in enumerate(texts)
    )
    halves = [texts[: len(texts) // 2], texts[len(texts) // 2 :]] if len(texts) > 4 else []
    return sorted({*halves, short, uneven} - {texts}, key=_tokens)


def _tokens(texts: Sequence[Text]) -> int:
    return sum(len(text.tokens) for text in texts)


def _shrunk(
    runner: _Runner, invariant: EngineInvariant, outcome: Outcome, texts: tuple[Text, ...], scratch: Path
) -> tuple[tuple[Text, ...], Outcome]:
    """The smallest documents of two rounds that still break an invariant, and their outcome."""
    for number in range(2):
        tried = smaller(texts)
        trials = [Trial(each, _folder(scratch, 10 * (number + 1) + at)) for at, each in enumerate(tried)]
        outcomes = runner.run([(invariant, trial) for trial in trials])
        broken = [(each, of) for each, of in zip(tried, outcomes, strict=True) if of.description]
        if not broken:
            break
        texts, outcome = broken[0]
    return texts, outcome


def _result(invariant: EngineInvariant, texts: tuple[Text, ...], outcome: Outcome) -> EngineResult:
    if outcome.failed:
        return EngineResult(invariant.name, "failed", outcome.worst, why=outcome.failed)
    if outcome.skipped:
        return EngineResult(invariant.name, "not offered", outcome.worst, why=outcome.skipped)
    if outcome.holds:
        return EngineResult(invariant.name, "holds", outcome.worst)
    example = Counterexample(outcome.description, tuple(map(str, outcome.cases)), tuple(map(str, texts)))
    return EngineResult(invariant.name, "broken", outcome.worst, outcome.factor, counterexample=example)
