"""Settings that the bits of a reproducible step depend on, and the error if its integers cannot hold its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.errors import SpecError, WorkbenchError


@dataclass(frozen=True)
class Resolution:
    """Canonical pieces of a step, and resolution of its sums; runs with equal settings have equal bits.

    Attributes:
        block_tokens: tokens of a row that are computed together.
        weight_chunks: pieces that a weight is computed in, a power of two: the largest tp to compare with.
        bits: gradients are summed in multiples of 2^-bits.

    Raises:
        SpecError: a number of pieces that is not a power of two, or a block without tokens.
    """

    block_tokens: int
    weight_chunks: int = 1
    bits: int = 32

    def __post_init__(self) -> None:
        chunks = self.weight_chunks
        if self.block_tokens < 1 or chunks < 1 or chunks & (chunks - 1):
            raise SpecError(
                f"block_tokens = {self.block_tokens}, weight_chunks = {chunks}",
                rule="at least one token per block; the number of pieces of a weight is a power of two, because they "
                "are added in pairs",
                fix="choose block_tokens such as 128, and weight_chunks among 1, 2, 4, 8",
            )


class OutOfRange(WorkbenchError, ArithmeticError):
    """Gradients that the integers of this step cannot hold; raised alike on every rank of every layout.

    Attributes:
        bits: sufficient bits, to recompute the step with. None: the gradients are not finite.
    """

    bits: int | None = None

    @classmethod
    def because(cls, found: str, bits: int | None) -> OutOfRange:
        """Build the error from what was found, and the number of bits that the step needs."""
        fix = (
            "look for the cause: a learning rate, a ratio without a clip"
            if bits is None
            else f"compute the step again after exact.start(bits={bits})"
        )
        error = cls(
            "exact sums of gradients",
            found=found,
            rule="the largest partial gradient fits into 62 bits with all that is added to it, and uses enough of them",
            fix=fix,
        )
        error.bits = bits
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its two arguments."""
        return type(self).because, (self.parts["found"], self.bits)
