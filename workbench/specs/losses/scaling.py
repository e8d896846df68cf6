"""Settings of what a trainer and its engine do between token sums and the optimizer: `workbench.reduction.scaling`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.specs.losses.base import Settings

Size = Literal["dp", "cp", "dp_cp", "micro_batches"]
"""A number that a trainer multiplies or divides a loss by: ranks, or micro-batches of a rank in an optimizer step
(gradient accumulation steps, elsewhere)."""


class ScalingSpec(Settings):
    """How a trainer makes one number out of token sums; the defaults are the exact contract.

    The workbench adds over micro-batches and ranks. What another trainer does instead is written here and multiplied
    into the weights (`workbench.reduction.scaling`), so that its gradient comes out of the same sum.
    """

    counts: Literal["step", "pass", "micro_batch"] = "step"
    """Over which rows the denominator counts: all of the optimizer step, the micro-batches that all data-parallel ranks
    train on at a time, or each micro-batch for itself."""
    multiplied_by: tuple[Size, ...] = ()
    """What the trainer multiplies the loss of a micro-batch by."""
    divided_by: tuple[Size, ...] = ()
    """What the trainer divides it by, beside the denominator."""
    replicated: bool = False
    """Every cp rank computes the loss of the whole row, and what gathered its log-probabilities adds the gradients up:
    the gradient is cp times that of the row."""
    engine_multiplies: tuple[Size, ...] = ()
    """What the engine multiplies loss or gradient by (Megatron's schedule: cp)."""
    engine_divides: tuple[Size, ...] = ()
    """What the engine divides them by: dp_cp where gradients are averaged over ranks, micro_batches where it
    accumulates means."""
    least_tokens: int = Field(0, ge=0)
    """Tokens that a document adds at least to the count of the denominator `token`, whether anything counts in it."""
    count_epsilon: float = Field(0.0, ge=0)
    """Added to a count of the step (tokens, documents, prompts) before it divides."""
    length_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length before it divides, in the denominator `document`."""
    mean_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length in means that the loss itself takes over it (the ratio of a document, a gate)."""

    @property
    def powers(self) -> dict[str, int]:
        """Size -> its power in the factor by which the gradient differs from the plain sum's; exact: 0 everywhere."""
        found = dict.fromkeys(("dp", "cp", "micro_batches"), 0)
        for names, sign in (
            ((*self.multiplied_by, *self.engine_multiplies), 1),
            ((*self.divided_by, *self.engine_divides), -1),
        ):
            for name in names:
                for size in ("dp", "cp") if name == "dp_cp" else (name,):
                    found[size] += sign
        found["cp"] += self.replicated
        return found

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that the contract breaks by definition."""
        powers = self.powers
        local = () if self.counts == "step" else ("micro_batch", "packing", "dp")
        factors = (("dp", powers["dp"]), ("cp", powers["cp"]), ("micro_batch", powers["micro_batches"]))
        empty = ("masked_rows",) if self.least_tokens else ()
        return tuple(dict.fromkeys((*local, *(law for law, power in factors if power), *empty)))
