"""What a policy loss is made of: named per-token terms, and nothing else.

A loss is a sum over tokens and terms, ``sum_k sum_t w_t * coefficient_k * values_k[t]``. This storey computes
the values; the weights are data that `workbench.reduction` computes on the whole optimizer step. Losses know no
ranks, no model and no files, so one written in a notebook cell is the same kind of object as these.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.shapes import check_shapes


@dataclass(frozen=True)
class LossInputs:
    """Everything that a per-token loss may look at, aligned with the token that it is about.

    Attributes:
        policy_logprobs_T: [T] nats, of the policy being trained; the only one with a gradient.
        old_logprobs_T: [T] nats, of the policy at the start of the update.
        advantages_T: [T] reward units.
        sampler_logprobs_T: [T] nats, as the sampler saw them, or None.
        ref_logprobs_T: [T] nats, of the frozen reference, or None.
        entropy_T: [T] nats, of the policy's distribution, or None.
        frozen_clip_T: [T] bool, clip decisions taken elsewhere (True: the clipped branch), or None to decide
            here. Comparing precisions needs it: a decision that flips is an O(1) change of one token.
    """

    policy_logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    sampler_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    frozen_clip_T: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes("LossInputs", **self.__dict__)


@dataclass(frozen=True)
class Term:
    """One term of a loss.

    Attributes:
        values_T: [T] per-token values, to be minimised. May be anything (NaN too) on tokens that do not count.
        coefficient: multiplies the term.
        clipped_T: [T] bool, tokens whose gradient this term cut off; None if it never does.
    """

    values_T: Tensor
    coefficient: float = 1.0
    clipped_T: Tensor | None = None


Loss = Callable[[LossInputs], dict[str, Term]]
"""A policy loss: inputs to named terms."""
