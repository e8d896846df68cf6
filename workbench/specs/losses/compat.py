"""Settings that only losses of other systems need. Formulas: `workbench.reduction.weights` and `.scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from workbench.specs.losses.base import Settings

Size = Literal["dp", "cp", "dp_cp", "micro_batches"]
"""A factor or divisor of a trainer's loss: ranks, or micro-batches of a rank in an optimizer step (gradient
accumulation steps, elsewhere)."""


class ScalingSpec(Settings):
    """The reduction of token sums to one number in a trainer; the defaults are the exact contract.

    The workbench sums over micro-batches and ranks. Factors of another trainer are multiplied into the weights
    (`workbench.reduction.weights`), so that the same sum gives its gradient.
    """

    counts: Literal["step", "pass", "micro_batch"] = "step"
    """The rows that the denominator counts: all of the optimizer step, the micro-batches that all data-parallel ranks
    train on at a time, or each micro-batch by itself."""
    multiplied_by: tuple[Size, ...] = ()
    """Factors of the trainer on the loss of a micro-batch."""
    divided_by: tuple[Size, ...] = ()
    """Divisors of the trainer, in addition to the denominator."""
    replicated: bool = False
    """Every cp rank computes the loss of the whole row, and the adjoint of the gather of its log-probabilities sums the
    gradients: the gradient is cp times that of the row."""
    engine_multiplies: tuple[Size, ...] = ()
    """Factors of the engine on loss or gradient (Megatron's schedule: cp)."""
    engine_divides: tuple[Size, ...] = ()
    """Divisors of the engine: dp_cp if it averages gradients over ranks, micro_batches if it accumulates means."""
    least_tokens: int = Field(0, ge=0)
    """Minimum contribution of a document to the count of the denominator `token`, even without trained tokens."""
    count_epsilon: float = Field(0.0, ge=0)
    """Added to a count of the step (tokens, documents, prompts) in the denominator."""
    length_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length in the denominator `document`."""
    mean_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length in means that the loss itself takes over it (the ratio of a document, a gate)."""

    @property
    def powers(self) -> dict[str, int]:
        """Size -> its power in the factor by which the gradient differs from the plain sum's; exact: 0 everywhere."""
        powers = dict.fromkeys(("dp", "cp", "micro_batches"), 0)
        for names, sign in (
            ((*self.multiplied_by, *self.engine_multiplies), 1),
            ((*self.divided_by, *self.engine_divides), -1),
        ):
            for name in names:
                for size in ("dp", "cp") if name == "dp_cp" else (name,):
                    powers[size] += sign
        powers["cp"] += self.replicated
        return powers

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariants that the contract breaks by definition."""
        powers = self.powers
        local = () if self.counts == "step" else ("micro_batch", "packing", "dp")
        factors = (("dp", powers["dp"]), ("cp", powers["cp"]), ("micro_batch", powers["micro_batches"]))
        empty = ("masked_rows",) if self.least_tokens else ()
        return tuple(dict.fromkeys((*local, *(invariant for invariant, power in factors if power), *empty)))


class CompatSpec(Settings):
    """Counts of another system's loss, and what its trainer and engine do to it; the workbench's own need none."""

    documents_counted: Literal["trained", "all"] = "trained"
    """The documents that a count of documents, prompts or rollouts includes: those with a trained token, or all."""
    entropy_denominator: Literal["penalty", "token", "local_token"] = "penalty"
    """The denominator of the entropy bonus: that of the other penalties, or, as a mean over micro-batches of their own
    means, the tokens of the micro-batch that get it; token: the step's tokens."""
    kl_denominator: Literal["penalty", "token", "document"] = "penalty"
    """The denominator of the KL penalty in the loss: that of the other terms, or, whatever the policy term is divided
    by, the step's tokens (OpenRLHF) or the mean of document means (SkyRL)."""
    gradient_divisor: float = Field(1.0, gt=0)
    """Divides the gradient, not the reported loss: the effect of an engine that averages where it should sum."""
    normalize_by_documents: bool = False
    """Divide the gradient, and not the reported loss, by the documents of the step once more."""
    scaling: ScalingSpec = ScalingSpec()
    """The scaling of a trainer and its engine between the token sums and the optimizer."""


def with_compat(loss: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings of a loss as `LossSpec` has them now.

    Records of before 2026-11-22 have the settings of `CompatSpec` beside the others; a run directory with them is
    refused, and a saved comparison is shown.
    """
    rest = dict(loss)
    older = {name: rest.pop(name) for name in CompatSpec.model_fields if name in rest}
    return {**rest, "compat": older} if older else rest
