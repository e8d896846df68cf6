"""A step's dump with one reading of its settings: what a trainer would have computed; a mistake is another reading.

Letters: T tokens | N documents | t tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from workbench.check.memo import Memo
from workbench.dumps.step import StepDump
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.reduction.weights import TokenWeights
from workbench.specs.losses import LossSpec


class Whole(dict[str, Any]):
    """A group of settings that replaces the present one; any other dict changes it key by key."""


Wrong = Callable[[Loss, LossInputs, LossSpec], dict[str, Term]]
"""A loss with a mistake that no setting expresses: the right one, its inputs and settings -> the wrong terms."""


@dataclass(frozen=True)
class Scale:
    """Factors of the weights of tokens.

    Attributes:
        loss_T: [T] of their weight in the reported loss.
        gradient_T: [T] in the gradient; None: the same.
        of: the weights that are scaled: "policy", "penalty" for all others, or "" for all.
    """

    loss_T: Tensor
    gradient_T: Tensor | None = None
    of: str = ""

    def apply(self, by_name: Mapping[str, TokenWeights], index_T: Tensor) -> dict[str, TokenWeights]:
        """Scale the weights of a row, [t] or of one padding token if it is empty."""
        if not len(index_T):
            return dict(by_name)
        loss_t = self.loss_T[index_T]
        gradient_t = loss_t if self.gradient_T is None else self.gradient_T[index_T]

        def scaled(weights: TokenWeights) -> TokenWeights:
            if gradient_t is loss_t:
                return weights.map(lambda weight_T: weight_T * loss_t)
            return TokenWeights(weights.loss_T * loss_t, weights.gradient_T * gradient_t)

        def is_scaled(name: str) -> bool:
            return self.of == "" or (name == "policy") == (self.of == "policy")

        return {name: scaled(weights) if is_scaled(name) else weights for name, weights in by_name.items()}


@dataclass(frozen=True)
class Reading:
    """A step, and one reading of its settings; an alternative is another reading.

    Attributes:
        dump: the step.
        spec: its loss.
        estimator: the advantage estimator and its settings; None: not known.
        of_advantages: a change of the [T] advantages after the estimator; of a mistake that is no estimator.
        factor: of the whole loss, beyond the spec.
        wrong: the loss, if it has a mistake that no setting expresses.
        scale: of the weights of tokens, beyond the spec.
        counts: counts that the trainer would have recorded, by name; others are those of the step.
        memo: results shared with other readings of the step; None: nothing is kept.
    """

    dump: StepDump
    spec: LossSpec
    estimator: tuple[str, Mapping[str, Any]] | None = None
    of_advantages: Callable[[StepDump, Tensor], Tensor] | None = None
    factor: float = 1.0
    wrong: Wrong | None = None
    scale: Scale | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    memo: Memo | None = field(default=None, repr=False, compare=False)

    def changed(self, **settings: Any) -> Reading:
        """Return the reading with other settings of its loss, validated; groups are merged key by key."""
        merged = {
            name: {**getattr(self.spec, name).model_dump(), **value} if type(value) is dict else value
            for name, value in settings.items()
        }
        return replace(self, spec=LossSpec.model_validate({**self.spec.model_dump(), **merged}))

    def with_tokens(self, **values: Tensor | None) -> Reading:
        """Return the reading of a step with other values of tokens; they may break the rules of a dump."""
        return replace(self, dump=self.dump.reread(tokens={**self.dump.tokens, **values}))

    def with_documents(self, **values: Tensor) -> Reading:
        """Return the reading of a step with other values of documents."""
        return replace(self, dump=self.dump.reread(documents={**self.dump.documents, **values}))
