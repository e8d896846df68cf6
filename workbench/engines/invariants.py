"""Invariants of an engine: what its steps must not depend on, and what its reported numbers must be those of.

Each invariant is a generator: it yields cases, is sent their steps, may yield further cases, and returns an `Outcome`.
The runner (`workbench.engines.proof`) runs the cases of all invariants in few starts of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from workbench.atomic import write_tensors
from workbench.engines.case import VOCABULARY, EngineCase, EngineStep, Text, norm

SAME = 1e-3
"""Allowed relative distance of two updates. A gradient of 1e-2, read as the difference of float32 weights of 1, has an
error of 1e-5; two factors more for sums in another order over tiny models."""
SMALL = 1e-2
"""Share of the whole norm below which a parameter's own distance is not judged by its own norm."""
DIGITS = 1e-4
"""Allowed difference of reported losses and norms, relative and absolute: trainers round logs to four decimals."""
SLOPE = 0.02
"""Allowed relative difference of a loss's measured slope from the update: that of its extrapolated differences."""
BOUND = 0.05
"""Bound of the clip, below the norm of any step of the drivers' models."""
RESUMED = 1e-6
"""Allowed distance of weights that were resumed: rounding of sums in another order, over Adam's epsilon of 1e-4, at a
learning rate of 0.01; lost moments or a repeated step are 1e-2 away."""


@dataclass(frozen=True)
class Outcome:
    """Result of one trial of an invariant.

    Attributes:
        holds: True if it was kept.
        worst: greatest relative distance that was judged.
        description: the difference, one sentence; "" if it holds.
        factor: multiplier of the update, where the changed one is a multiple of the plain one; else None.
        cases: those that differ, the plain one first.
        skipped: why there is no judgement; "" if there is one.
        failed: what the engine raised; "" if nothing.
    """

    holds: bool
    worst: float = math.nan
    description: str = ""
    factor: float | None = None
    cases: tuple[EngineCase, ...] = ()
    skipped: str = ""
    failed: str = ""


Steps = Sequence[EngineStep]
Judged = Generator[list[EngineCase], Steps, Outcome]


@dataclass(frozen=True)
class Trial:
    """Subject of an invariant.

    Attributes:
        documents: of one step; a multiple of four.
        scratch: folder for weights.
    """

    documents: tuple[Text, ...]
    scratch: Path

    @property
    def whole(self) -> EngineCase:
        """All documents in one micro-batch on one rank."""
        return EngineCase(self.documents, each=len(self.documents))

    @property
    def halves(self) -> EngineCase:
        """Two micro-batches on one rank."""
        return EngineCase(self.documents, each=len(self.documents) // 2)

    def save(self, name: str, weights: Mapping[str, Tensor]) -> str:
        """Write weights for a case, and return their path."""
        return str(write_tensors(self.scratch / f"{name}.safetensors", dict(weights)))


@dataclass(frozen=True)
class EngineInvariant:
    """An invariant of an engine.

    Attributes:
        says: what must be the same.
        judge: generator of cases, as above.
    """

    name: str
    says: str
    judge: Callable[[Trial], Judged]


def _unjudged(cases: Sequence[EngineCase], steps: Steps) -> Outcome | None:
    """Outcome of steps that the engine refuses or fails to run; None if it ran all."""
    for step in steps:
        if step.refused:
            return Outcome(False, skipped=step.refused)
    for case, step in zip(cases, steps, strict=True):
        if step.error:
            return Outcome(False, failed=step.error, cases=(case,))
        if not all(bool(value.isfinite().all()) for value in step.after.values()):
            return Outcome(False, math.inf, "weights that are not finite", cases=(case,))
    return None


def compared(plain: EngineStep, changed: EngineStep) -> tuple[float, str, float | None]:
    """Compare two steps: the greatest relative distance, the difference in a sentence ("" if none), and its factor."""
    old, new = plain.update, changed.update
    whole = norm(old)
    if set(old) != set(new):
        return math.inf, "other parameters", None
    distances = {
        name: norm({name: new[name] - value}) / max(norm({name: value}), SMALL * whole, 1e-30)
        for name, value in old.items()
    }
    worst_name = max(distances, key=lambda name: distances[name])
    worst = distances[worst_name]
    if worst > SAME:
        dot = float(sum((old[name] * new[name]).sum() for name in old))
        cosine = dot / max(whole * norm(new), 1e-300)
        factor = dot / max(whole**2, 1e-300)
        if cosine > 1 - 1e-5:
            return worst, f"the update is multiplied by {factor:.6g}", factor
        off = norm({name: new[name] - old[name] for name in old}) / max(whole, 1e-300)
        losses = ", ".join(f"{value:.6g}" for step in (plain, changed) for value in step.losses[:1])
        return worst, f"updates are {off:.2g} apart, most in {worst_name} ({worst:.2g}); losses {losses}", None
    for name in ("losses", "norms"):
        for one, other in zip(getattr(plain, name), getattr(changed, name), strict=False):
            if not _close(one, other):
                what = {"losses": "loss", "norms": "gradient norm"}[name]
                off = abs(one - other) / max(abs(one), 1e-30)
                return off, f"the update is the same, the reported {what} is {one:.6g} and {other:.6g}", None
    return worst, "", None


def _same(plain: Callable[[Trial], EngineCase], changed: Callable[[Trial], EngineCase]) -> Callable[[Trial], Judged]:
    """An invariant of two arrangements of the same documents."""

    def judge(trial: Trial) -> Judged:
        cases = [plain(trial), changed(trial)]
        steps = yield cases
        if (unjudged := _unjudged(cases, steps)) is not None:
            return unjudged
        worst, description, factor = compared(*steps)
        return Outcome(not description, worst, description, factor, tuple(cases))

    return judge


def _crossed(trial: Trial) -> EngineCase:
    """Two micro-batches whose pairs of documents have other partners."""
    pairs = [trial.documents[at : at + 2] for at in range(0, len(trial.documents), 2)]
    crossed = [*pairs[::2], *pairs[1::2]] if len(pairs) > 2 else pairs[::-1]
    return replace(trial.halves, documents=tuple(text for pair in crossed for text in pair))


def _loss(trial: Trial) -> Judged:
    """The slope of the reported loss along the update is the update's squared norm."""
    base = trial.halves
    steps = yield [base]
    if (unjudged := _unjudged([base], steps)) is not None:
        return unjudged
    if not steps[0].losses:
        return Outcome(False, skipped="the engine reports no loss")
    update = steps[0].update
    size = norm(update)
    if not size:
        return Outcome(False, skipped="the update is 0")
    length = min(0.05 / size**2, 0.2 / size)
    probes = []
    for share in (1.0, -1.0, 0.5, -0.5):
        moved = {n: (w.double() + share * length * update[n]).to(w.dtype) for n, w in steps[0].before.items()}
        probes.append(replace(base, weights=trial.save(f"probe {share}", moved), only_loss=True))
    steps = yield probes
    if (unjudged := _unjudged(probes, steps)) is not None:
        return unjudged
    far, near = ((steps[a].losses[0] - steps[a + 1].losses[0]) / (2 * length * s) for a, s in ((0, 1.0), (2, 0.5)))
    slope = (4 * near - far) / 3
    allowed = SLOPE + DIGITS / (length * size**2) + abs(near - far) / size**2
    off = abs(slope / size**2 - 1)
    if allowed > 0.2 and off <= allowed:
        return Outcome(False, off, skipped=f"the reported loss has too few digits to judge its slope ({allowed:.1g})")
    ratio = slope / size**2
    description = "" if off <= allowed else f"the reported loss changes {ratio:.6g} times as much as its update says"
    return Outcome(not description, off, description, ratio if description else None, (base,))


def _norm(trial: Trial) -> Judged:
    """The reported norm is that of the update, with micro-batches and ranks; a clip bounds the update by it."""
    base = trial.halves
    cases = [base, replace(base, ranks=2, each=len(trial.documents) // 4)]
    steps = yield cases
    if (unjudged := _unjudged(cases[:1], steps[:1])) is not None:
        return unjudged
    runnable = [(case, step) for case, step in zip(cases, steps, strict=True) if not step.refused and not step.error]
    if not steps[0].norms:
        return Outcome(False, skipped="the engine reports no gradient norm")
    worst = 0.0
    for case, step in runnable:
        size = norm(step.update)
        off = abs(step.norms[0] - size) / max(size, 1e-30)
        worst = max(worst, off)
        if abs(step.norms[0] - size) > SAME * size + DIGITS:
            return Outcome(
                False, off, f"the reported norm is {step.norms[0]:.6g}, the update's {size:.6g}", cases=(case,)
            )
    return Outcome(True, worst)


def _clip(trial: Trial) -> Judged:
    """A clip below the update's norm gives an update of that norm, and leaves the reported norm as it was."""
    base = trial.halves
    clipped = replace(base, clip=BOUND)
    cases = [base, clipped, replace(clipped, ranks=2, each=len(trial.documents) // 4)]
    steps = yield cases
    if (unjudged := _unjudged(cases[:2], steps[:2])) is not None:
        return unjudged
    plain, size, worst = steps[0], norm(steps[0].update), 0.0
    if size <= BOUND:
        return Outcome(False, skipped=f"the update's norm of {size:.2g} is within the clip of {BOUND:g}")
    for case, step in zip(cases[1:], steps[1:], strict=True):
        if step.refused or step.error:
            continue
        own = norm(step.update)
        worst = max(worst, abs(own - BOUND) / BOUND)
        text = ""
        if abs(own - BOUND) > SAME * BOUND:
            text = f"clipped to {BOUND:g}, the update's norm is {own:.6g}"
        elif case.ranks == 1 and plain.norms and step.norms and not _close(plain.norms[0], step.norms[0]):
            text = f"the reported norm is {step.norms[0]:.6g} with a clip, {plain.norms[0]:.6g} without"
        if text:
            return Outcome(False, worst, text, cases=(base, case))
    return Outcome(True, worst)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=DIGITS, abs_tol=DIGITS)


def _effect(trial: Trial) -> Judged:
    """Other tokens in the completions of any pair of documents change the update; the step is not 0."""
    base = trial.halves
    changed = []
    for at in range(0, len(trial.documents), 2):
        texts = list(trial.documents)
        for place in (at, at + 1):
            moved = tuple(2 + (token + 5) % (VOCABULARY - 2) for token in texts[place].completion)
            texts[place] = replace(texts[place], completion=moved)
        changed.append(replace(base, documents=tuple(texts)))
    cases = [base, *changed]
    steps = yield cases
    if (unjudged := _unjudged(cases, steps)) is not None:
        return unjudged
    update = steps[0].update
    size = norm(update)
    if not size:
        return Outcome(False, 0.0, "the step changes no weight", cases=(base,))
    effects = [norm({n: s.update[n] - update[n] for n in update}) / size for s in steps[1:]]
    least = min(effects)
    if least <= SAME:
        number = effects.index(least)
        text = f"documents {2 * number} and {2 * number + 1} do not change the update"
        return Outcome(False, least, text, cases=(base, cases[1 + number]))
    return Outcome(True, least)


def _resume(trial: Trial) -> Judged:
    """A run that is saved after its first step and resumed has the weights of the uninterrupted one."""
    documents = (*trial.documents, *trial.documents[::-1][1::2], *trial.documents[::-1][::2])
    pairs = tuple(documents[: 2 * len(trial.documents)])
    ranks = 2
    plain = EngineCase(
        pairs, steps=2, ranks=ranks, each=len(trial.documents) // 4, optimizer="adamw", learning_rate=0.01
    )
    cases = [plain, replace(plain, resume_after=1)]
    steps = yield cases
    if (unjudged := _unjudged(cases, steps)) is not None:
        return unjudged
    one, other = steps
    worst = max(float((one.after[name] - other.after[name]).abs().max()) for name in one.after)
    text = f"weights of the resumed run are {worst:.2g} away" if worst > RESUMED else ""
    if not text and any(not math.isclose(a, b, rel_tol=DIGITS) for a, b in zip(one.losses, other.losses, strict=False)):
        text = f"reported losses {one.losses} and {other.losses}"
    return Outcome(not text, worst, text, cases=tuple(cases))


INVARIANTS: Mapping[str, EngineInvariant] = {
    each.name: each
    for each in (
        EngineInvariant(
            "accumulation",
            "micro-batches of two documents give the update of one micro-batch",
            _same(lambda t: t.whole, lambda t: replace(t.whole, each=2)),
        ),
        EngineInvariant(
            "partners",
            "a document's gradient does not depend on the other documents of its micro-batch",
            _same(lambda t: t.halves, _crossed),
        ),
        EngineInvariant(
            "ranks",
            "two ranks give the update of one",
            _same(lambda t: t.whole, lambda t: replace(t.halves, ranks=2)),
        ),
        EngineInvariant(
            "padding",
            "more padding changes nothing",
            _same(lambda t: t.halves, lambda t: replace(t.halves, padding=5)),
        ),
        EngineInvariant(
            "packing",
            "documents packed into one row give the update of one row each",
            _same(lambda t: t.halves, lambda t: replace(t.halves, packed=True)),
        ),
        EngineInvariant("loss_of_update", "the reported loss is the one whose gradient the update is", _loss),
        EngineInvariant("norm_of_update", "the reported gradient norm is the update's", _norm),
        EngineInvariant("clip", "a clip bounds the update's norm", _clip),
        EngineInvariant("effect", "the step is not vacuous: every document changes it", _effect),
        EngineInvariant("resume", "a resumed run equals the uninterrupted one", _resume),
    )
}
"""Name -> invariant, in the order of the matrix."""
