"""Arithmetic for a policy whose vocabulary is wider than the task's symbols."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.rollouts.task import ArithmeticTask


class WideArithmetic(ArithmeticTask):
    """`ArithmeticTask`, and an id that is no symbol is read as padding, which no right answer ends in."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of vocabulary ids."""
        return super().decode([token if token < self.vocab_size else self.pad_id for token in tokens])
