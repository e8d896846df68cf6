"""The evidence of a comparison: the tokens and documents of a step that have a gradient, and those that are clipped.

Two runs whose advantages are all zero agree in every bit, and so do two with empty loss masks: nothing could differ.
Every step therefore counts, at every metrics level, the tokens to which its loss sends a gradient: those for which the
derivative of the total loss with respect to the head outputs (log-probability, entropy, log normaliser) is not zero.
Every verdict quotes these counts. They are merged together with the metrics, so they cost no collective of their own.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read-only CLI verbs use the counts of a record, and load no torch
    from torch import Tensor

    from workbench.losses.terms import LossInputs, Term
    from workbench.metrics.quantities import DocumentSlots
    from workbench.metrics.values import Value
    from workbench.rollouts.targets import TrainingRow

SPARSE = 0.5
"""Below this share of documents or tokens with a gradient a verdict warns: fewer than half of the step were compared.

The share is a convention, not a measurement. In GRPO the documents without a gradient are those of groups that were
solved by all completions or by none; runs that filter such groups (DAPO, arXiv 2503.14476, section 3.2) are
far above it.
"""

PREFIX = "evidence/"
KEYS = (
    *("steps", "documents", "gradient_documents", "trained_tokens", "gradient_tokens", "policy_gradient_tokens"),
    *("clipped_tokens", "zero_steps"),
    *("gradient_document_share", "gradient_token_share", "policy_token_share", "clipped_share"),
)
"""Counts and shares of `Evidence` in JSON."""
_TRAINED, _POLICY, _CLIPPED = "trained_tokens/sum", "policy_gradient_tokens/sum", "clipped_tokens/sum"
_REACHED, _DOCUMENTS, _REACHED_DOCUMENTS = "gradient_tokens/sum", "documents/sum", "gradient_documents/sum"


class GradientTokens:
    """The tokens of a row, or of a part of one, that receive a gradient, recorded in backward: ``mask_T``."""

    def __init__(self, row: TrainingRow, inputs: LossInputs) -> None:
        import torch

        from workbench.losses.terms import HEAD_OUTPUTS

        self.row = row
        self.mask_T = torch.zeros_like(row.loss_mask_T)
        # Hooks, not advantages: clips, corrections and KL terms decide where gradients are zero (DECISIONS.md, 108).
        for values_T in (inputs.policy_logprobs_T, *(getattr(inputs, name) for name in HEAD_OUTPUTS)):
            if values_T is not None and values_T.requires_grad:
                values_T.register_hook(self._record)

    def _record(self, gradient_T: Tensor | None) -> None:
        if gradient_T is None:  # autograd's zero
            return
        # NaN != 0: a gradient of NaN counts as a gradient
        self.mask_T = self.mask_T | ((gradient_T.detach() != 0) & self.row.loss_mask_T)


def count_evidence(
    inputs: LossInputs,
    terms: Mapping[str, Term],
    row: TrainingRow,
    slots: DocumentSlots,
    reached: GradientTokens | None,
) -> dict[str, Value]:
    """Count one micro-batch on one rank; `finish_metrics` merges the values with the metrics of the step.

    ``reached`` is the last evaluation that was back-propagated; None if no token of the row was evaluated.
    """
    import torch

    from workbench.metrics.policy import Quantities
    from workbench.metrics.quantities import NoGradient

    mask_T = row.loss_mask_T
    q = Quantities(inputs, terms, mask_T, slots=slots)
    with torch.no_grad():
        silent_T = NoGradient().of(q)
        clipped = [term.clipped_T for term in terms.values() if term.clipped_T is not None]
        gradient_T, documents_T = (
            (mask_T.new_zeros(0), row.document_ids_T.new_zeros(0))
            if reached is None
            else (reached.mask_T, slots.first + reached.row.document_ids_T)
        )
        counts = {
            _TRAINED: _sum(q.one_T, mask_T),
            _REACHED: _sum(gradient_T.double(), torch.ones_like(gradient_T)),
            _DOCUMENTS: _documents(slots, row.document_ids_T >= 0, slots.first + row.document_ids_T),
            _REACHED_DOCUMENTS: _documents(slots, gradient_T, documents_T),
        }
        if silent_T is not None:
            counts[_POLICY] = _sum((1 - silent_T).double(), mask_T)
        if clipped:
            counts[_CLIPPED] = _sum(torch.stack(clipped).any(0).double(), mask_T)
    return {PREFIX + name: value for name, value in counts.items()}


def _sum(values_T: Tensor, mask_T: Tensor) -> Value:
    from workbench.metrics.values import Sum

    return Sum().over(values_T, mask_T)


def _documents(slots: DocumentSlots, mask_T: Tensor, documents_T: Tensor) -> Value:
    """Number of documents of the step with a token in the mask."""
    from workbench.metrics.policy import OfDocuments

    return OfDocuments(lambda tokens_N: float(len(tokens_N)), 0, slots.number).table((), mask_T, documents_T)


@dataclass(frozen=True)
class Evidence:
    """The evidence that a run, or some of its steps, gives a comparison: counts, summed over ``steps``.

    ``gradient_documents`` have a token with a gradient; ``gradient_tokens`` are trained tokens with one from any term
    of the loss, ``policy_gradient_tokens`` from the policy term (None for a loss without one). ``clipped_tokens`` have
    their gradient clipped to zero (None for a loss without a clip). In ``zero_steps`` every gradient was zero.
    """

    steps: int
    documents: int
    gradient_documents: int
    trained_tokens: int
    gradient_tokens: int
    policy_gradient_tokens: int | None = None
    clipped_tokens: int | None = None
    zero_steps: int = 0

    @classmethod
    def of_steps(cls, records: Iterable[Mapping[str, Any]]) -> Evidence | None:
        """Return the evidence of step records; None if they have no counts, as in earlier versions."""
        counted = [record for record in records if PREFIX + _TRAINED in record]
        if not counted:
            return None

        def total(name: str) -> int:
            return round(sum(record[PREFIX + name] for record in counted))

        def known(name: str) -> int | None:
            return total(name) if all(PREFIX + name in record for record in counted) else None

        return cls(
            len(counted),
            total(_DOCUMENTS),
            total(_REACHED_DOCUMENTS),
            total(_TRAINED),
            total(_REACHED),
            known(_POLICY),
            known(_CLIPPED),
            sum(record.get("gradient/norm/global") == 0 for record in counted),
        )

    @property
    def gradient_document_share(self) -> float | None:
        """Share of documents with a gradient; None without documents."""
        return _share(self.gradient_documents, self.documents)

    @property
    def gradient_token_share(self) -> float | None:
        """Share of trained tokens with a gradient; None without trained tokens."""
        return _share(self.gradient_tokens, self.trained_tokens)

    @property
    def policy_token_share(self) -> float | None:
        """Share of trained tokens with a gradient from the policy term; None if unknown."""
        return _share(self.policy_gradient_tokens, self.trained_tokens)

    @property
    def clipped_share(self) -> float | None:
        """Share of trained tokens that are clipped; None if unknown."""
        return _share(self.clipped_tokens, self.trained_tokens)

    @property
    def nothing(self) -> str:
        """The reason why there is nothing to compare; "" if there is something."""
        everywhere = " in every step" if self.steps > 1 else ""
        if not self.trained_tokens:
            return f"no token is trained: the loss mask is empty{everywhere}"
        if not self.gradient_documents:
            reason = ": every trained token is clipped" if self.clipped_tokens == self.trained_tokens else ""
            return f"no document has a gradient{reason}"
        if self.zero_steps == self.steps:
            return f"every gradient is zero{everywhere}"
        return ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why a verdict on this evidence is weak; () if there are none."""
        if self.nothing:
            return ()
        notes = []
        if (share := self.gradient_document_share) is not None and share < SPARSE:
            notes.append(f"only {self.gradient_documents} of {self.documents} documents ({share:.1%}) have a gradient")
        if (share := self.clipped_share) is not None and share > 1 - SPARSE:
            notes.append(f"{share:.1%} of the trained tokens are clipped")
        if (share := self.gradient_token_share) is not None and share < SPARSE:
            notes.append(f"only {share:.1%} of the trained tokens have a gradient")
        if self.policy_gradient_tokens == 0:
            notes.append("the policy term gives no token a gradient: only the other terms of the loss were compared")
        if self.zero_steps:
            notes.append(f"every gradient is zero in {self.zero_steps} of {self.steps} steps")
        return tuple(notes)

    def summary(self) -> str:
        """Return the shares in one line.

        Example:
            >>> Evidence(1, 8, 6, 100, 75, 75, 25).summary()
            'gradient on 6 of 8 documents (75.0%), 75 of 100 trained tokens (75.0%); clipped 25.0%'
        """
        text = (
            f"gradient on {_part(self.gradient_documents, self.documents)} documents"
            f"{_in_percent(self.gradient_document_share)}, {_part(self.gradient_tokens, self.trained_tokens)} "
            f"trained tokens{_in_percent(self.gradient_token_share)}"
        )
        text += "" if self.clipped_share is None else f"; clipped {self.clipped_share:.1%}"
        return text if self.steps == 1 else f"{text}; counted over {self.steps} steps"

    def as_json(self) -> dict[str, Any]:
        """Return counts, shares and warnings as JSON data, for a saved comparison."""
        return {name: getattr(self, name) for name in KEYS} | {
            "nothing": self.nothing,
            "warnings": list(self.warnings),
            "summary": self.summary(),
        }


def split_evidence(numbers: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Split the final values of a step into its metrics and the counts of `count_evidence`."""
    counts = {key: value for key, value in numbers.items() if key.startswith(PREFIX)}
    return {key: value for key, value in numbers.items() if key not in counts}, counts


def weaker(first: Evidence | None, second: Evidence | None) -> Evidence | None:
    """Return the evidence of the run with fewer tokens that have a gradient, of two that are compared."""
    return min(filter(None, (first, second)), key=lambda each: each.gradient_tokens, default=None)


def _share(part: int | None, whole: int) -> float | None:
    return part / whole if part is not None and whole else None


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"


def _in_percent(share: float | None) -> str:
    return "" if share is None else f" ({share:.1%})"
