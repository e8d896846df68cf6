"""The evidence in a record: how much of the step a comparison with it could have seen.

Runs of the workbench count their tokens and documents with a gradient (`workbench.metrics.evidence`), and those counts
are used directly. From records of other trainers the same is read as far as possible: tokens and documents that
train, clipped tokens, whether any gradient is not zero. The rest is reported as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.diagnose.record import Record, RecordedStep, whole
from workbench.metrics.evidence import KEYS, SPARSE
from workbench.metrics.evidence import Evidence as Counts
from workbench.metrics.step import MOST_MOVED, SAMPLER_MOVED


@dataclass(frozen=True)
class Sight:
    """The evidence in a record without the workbench's counts; None where it is unknown.

    Attributes:
        steps: number of steps read.
        trained_tokens: in them.
        trained_documents: documents with a trained token.
        documents: all documents.
        clipped_tokens: trained tokens that a clip cut off.
        zero_steps: steps in which every recorded gradient is zero.
        only_zeros: True if there is a loss, all losses and metrics are zero, and nothing else is recorded.
    """

    steps: int
    trained_tokens: int | None = None
    trained_documents: int | None = None
    documents: int | None = None
    clipped_tokens: int | None = None
    zero_steps: int | None = None
    only_zeros: bool = False

    @property
    def nothing(self) -> str:
        """Reason why there was nothing to compare; "" if there was something, or if it is unknown."""
        if self.zero_steps is not None:
            if self.zero_steps < self.steps:
                return ""  # regardless of the counts, something was back-propagated
            masked = ": no token is trained" if self.trained_tokens == 0 else ""
            return f"every gradient is zero in every step{masked}"
        if self.trained_tokens == 0:
            return "no token is trained in any step"
        return "every loss is zero, and no token or gradient is recorded" if self.only_zeros else ""

    @property
    def clipped_share(self) -> float | None:
        """Share of trained tokens that are clipped; None if unknown."""
        if self.clipped_tokens is None or not self.trained_tokens:
            return None
        return self.clipped_tokens / self.trained_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why a verdict on it proves less than it seems to; () if there are none."""
        if self.nothing:
            return ()
        notes = []
        if self.documents and self.trained_documents is not None and self.trained_documents / self.documents < SPARSE:
            notes.append(
                f"only {self.trained_documents} of {self.documents} documents "
                f"({self.trained_documents / self.documents:.1%}) have a trained token"
            )
        if (share := self.clipped_share) is not None and share > 1 - SPARSE:
            notes.append(f"{share:.1%} of the trained tokens are clipped")
        if self.zero_steps:
            notes.append(f"every gradient is zero in {self.zero_steps} of {self.steps} steps")
        return tuple(notes)

    def summary(self) -> str:
        """One line: known counts, then the names of unknown ones.

        Example:
            >>> Sight(2, 130, 9, 11, 13).summary()
            '130 trained tokens in 9 of 11 documents, clipped 10.0%; unknown: gradients, gradient tokens'
        """
        parts = {}
        if self.trained_tokens is not None:
            parts["trained tokens"] = f"{self.trained_tokens:,} trained tokens"
        if self.trained_documents is not None:
            of = "" if self.documents is None else f" of {self.documents:,}"
            parts["documents"] = f"in {self.trained_documents:,}{of} documents"
        if self.zero_steps is not None:
            parts["gradients"] = f"a gradient in {self.steps - self.zero_steps} of {self.steps} steps"
        if self.clipped_tokens is not None:
            parts["clipped tokens"] = "" if self.clipped_share is None else f"clipped {self.clipped_share:.1%}"
        known = ", ".join(filter(None, parts.values())).replace(" tokens, in ", " tokens in ") or "nothing recorded"
        every = ("trained tokens", "documents", "gradients", "clipped tokens", "gradient tokens")
        return f"{known}; unknown: {', '.join(part for part in every if part not in parts)}"

    def as_json(self) -> dict[str, Any]:
        """The keys of `workbench.metrics.evidence.Evidence.as_json` and of trained documents, null where unknown."""
        return {name: getattr(self, name, None) for name in (*KEYS, "trained_documents", "nothing")} | {
            "warnings": list(self.warnings),
            "summary": self.summary(),
        }


def sight_of(record: Record, steps: Iterable[int]) -> Counts | Sight:
    """The evidence in these steps of a record.

    Example:
        >>> record = Record({}, [RecordedStep(0, gradient_norms={"w": 0.0})])
        >>> sight_of(record, [0]).nothing
        'every gradient is zero in every step'
    """
    numbers = set(steps)
    chosen = [step for step in record.steps if step.number in numbers]
    if chosen and all(step.evidence for step in chosen):
        counted = Counts.of_steps({**step.evidence, "gradient/norm/global": _norm(step)} for step in chosen)
        if counted is not None:
            return counted
    return _read(chosen)


def fewest(first: Counts | Sight, second: Counts | Sight) -> Counts | Sight:
    """Of two records, the evidence of the one that shows less: nothing, or fewer tokens."""

    def amount(sight: Counts | Sight) -> tuple[bool, float]:
        tokens = sight.gradient_tokens if isinstance(sight, Counts) else sight.trained_tokens
        return not sight.nothing, math.inf if tokens is None else tokens

    return min((first, second), key=amount)


def sampler_moved(record: Record, steps: Iterable[int]) -> float | None:
    """The share of a half-precision sampler's weights that all updates have changed, in the last of some steps.

    None: unknown, or a sampler that sees every update.
    """
    numbers = set(steps)
    shares = [step.metrics.get(SAMPLER_MOVED) for step in record.steps if step.number in numbers]
    return next((share for share in reversed(shares) if share is not None), None)


def unsampled(record: Record, steps: Iterable[int]) -> str:
    """Sentence on the updates that never reached a record's sampler; "" if most did, or if it is unknown."""
    share = sampler_moved(record, steps)
    if share is None or share >= MOST_MOVED:
        return ""
    return (
        f"{record.name or 'a record'}: only {share:.2g} of the sampler's weights differ from those of the start; "
        "updates below half a unit in the last place of its dtype do not reach it (online.sampler_precision)"
    )


def not_finite(step: RecordedStep) -> str:
    """The loss or the first gradient of a step that is not finite, with its value; "" if all are."""
    if step.loss is not None and not math.isfinite(step.loss):
        return f"the loss is {step.loss}"
    for name, norm in step.gradient_norms.items():
        if not math.isfinite(norm):
            return f"the gradient of {name} has norm {norm}"
    for name, values in {} if step.gradient_norms else whole(step.gradients).items():
        if not bool(values.isfinite().all()):
            return f"the gradient of {name} is not finite"
    return ""


def _norm(step: RecordedStep) -> float | None:
    """A number that is zero exactly if every recorded gradient is; None if none is recorded."""
    if step.gradient_norms:
        return math.sqrt(sum(norm**2 for norm in step.gradient_norms.values()))
    gradients = whole(step.gradients).values()
    return max((float(values.abs().max()) if values.numel() else 0.0 for values in gradients), default=None)


def _read(steps: Sequence[RecordedStep]) -> Sight:
    norms = [_norm(step) for step in steps]
    tokens = [_tokens(step) for step in steps]
    totals = [None if None in column else int(sum(column)) for column in zip(*tokens, strict=True)]
    trained, with_trained, documents, clipped = totals or [None] * 4
    numbers = [number for step in steps for number in (step.loss, *step.metrics.values()) if number is not None]
    known = any(norm is not None for norm in norms) or any(row[0] is not None for row in tokens)
    return Sight(
        len(steps),
        trained,
        with_trained,
        documents,
        clipped,
        None if None in norms or not norms else sum(norm == 0 for norm in norms),
        only_zeros=bool(numbers) and not any(numbers) and not known,
    )


def _tokens(step: RecordedStep) -> tuple[float | None, float | None, float | None, int | None]:
    """Trained tokens, documents with one, all documents, clipped trained tokens."""
    tokens, counts = whole(step.tokens), step.counts
    trained, documents, masked = map(counts.get, ("trained_tokens", "documents", "masked_documents"))
    clipped = None
    if "trained" in tokens:
        trained_S = tokens["trained"].bool()
        trained = int(trained_S.sum())
        if "documents" in tokens:
            ids_S = tokens["documents"]
            documents = len(ids_S[trained_S].unique())
            masked = len(ids_S[ids_S >= 0].unique()) - documents
        if "clipped" in tokens:
            clipped = int((tokens["clipped"].bool() & trained_S).sum())
    return trained, documents, None if documents is None or masked is None else documents + masked, clipped
