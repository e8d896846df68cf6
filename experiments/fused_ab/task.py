"""Arithmetic for a policy whose vocabulary is wider than the task's symbols."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.rollouts.task import ArithmeticTask


class WideArithmetic(ArithmeticTask):
    """`ArithmeticTask` that decodes an id without a symbol as padding, which never ends a right completion."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of vocabulary ids."""
        return super().decode([token if token < self.vocab_size else self.pad_id for token in tokens])
