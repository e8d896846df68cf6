"""A sample of the tokens of a step, on which most mistakes are excluded before they are tried on all of it.

A mistake that leaves a token of the sample different is no cause of that token's stage. The sample is evaluated under
the weights of the whole step, so that denominators are exact. It is one micro-batch of a step that has several, whose
values are those of the whole step, or documents of a long step. Losses that look beyond a document (a share of the
tokens of a micro-batch) give other values there: then nothing is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.check.numbers import Numbers
from workbench.check.reading import Reading
from workbench.check.recompute import Quantities, recompute_loss
from workbench.check.stages import STAGES, stage_of, tolerances
from workbench.dumps.step import StepDump

LONG = 65_536
"""Tokens of a step from which on a sample is taken: below, the whole step costs as little; a convention."""
SHARE = 32
"""One document in so many is in the sample, spread over the step; a convention."""


@dataclass(frozen=True)
class Screen:
    """A sample, and the groups of quantities that a cause must reproduce.

    Attributes:
        null: the step under its settings as they are.
        sample_T: [T] its tokens.
        needed: quantities of tokens, of each stage that differs; or, if none does, of all stages together.
    """

    null: Numbers
    sample_T: Tensor
    needed: tuple[tuple[str, ...], ...]

    def decides(self, stage: str) -> bool:
        """Return True if what is excluded is no cause of a stage; not of one with numbers alone, such as the loss."""
        return any(stage_of(name) == stage for names in self.needed for name in names)

    @classmethod
    def of(cls, reading: Reading, null: Numbers) -> Screen | None:
        """Return the sample of a step; None if it is short and in one piece, or if nothing is excluded on a sample."""
        dump = reading.dump
        long = len(dump.document_ids_T) >= LONG and dump.num_documents >= 2 * SHARE
        if not long and dump.documents.get("rows") is None:
            return None
        tokens = [name for name in null.differing if isinstance(null.recorded[name], Tensor) and name != "advantages"]
        stages = {stage_of(name) for name, mismatch in null.differing.items() if mismatch is not None} - {"advantages"}
        groups = [[name for name in tokens if stage_of(name) == stage] for stage in STAGES if stage in stages]
        needed = [names for names in (groups if stages else [tokens]) if names]
        if not needed:
            return None
        of_first = [mismatch for name in needed[0] if (mismatch := null.differing[name]) is not None]
        if not long:
            chosen_N = _micro_batch(dump, of_first[0].token if of_first else None)
            screen = cls(null, chosen_N[dump.document_ids_T], tuple(map(tuple, needed)))
            part = bool(chosen_N.any()) and not bool(chosen_N.all())
            return screen if part else None  # values of a whole micro-batch are those of the step
        chosen = set(range(0, dump.num_documents, SHARE))
        worst = [mismatch.token for mismatch in null.differing.values() if mismatch and mismatch.token is not None]
        chosen |= {int(dump.document_ids_T[token]) for token in worst}
        chosen_N = torch.zeros(dump.num_documents, dtype=torch.bool)
        chosen_N[sorted(chosen)] = True
        screen = cls(null, chosen_N[dump.document_ids_T], tuple(map(tuple, needed)))
        return screen if screen._exact(reading) else None

    def excludes(self, reading: Reading) -> bool:
        """Return True if a reading leaves a token of the sample different in every group.

        Raises:
            SpecError: the loss needs values that the step does not have.
        """
        expected = recompute_loss(reading, metrics=False, sample_T=self.sample_T)
        names = {name for group in self.needed for name in group if name in expected}
        own = tolerances(expected, (), reading.dump.dtype, names)
        return all(any(self._differs(name, expected, own) for name in names) for names in self.needed)

    def _differs(self, name: str, expected: Quantities, own: Quantities) -> bool:
        if name not in expected:
            return True
        where_T = self.sample_T & self.null.reading.dump.loss_mask_T
        recorded_T, expected_T, bound_T, own_T = (
            torch.as_tensor(values[name])[where_T] for values in (self.null.recorded, expected, self.null.bounds, own)
        )
        return bool(((recorded_T - expected_T).abs() > 2 * torch.maximum(bound_T, own_T)).any())

    def _exact(self, reading: Reading) -> bool:
        sampled = recompute_loss(reading, metrics=False, sample_T=self.sample_T)
        for name in {name for names in self.needed for name in names}:
            whole_T, part_T = (torch.as_tensor(values[name])[self.sample_T] for values in (self.null.expected, sampled))
            if not torch.allclose(whole_T, part_T, rtol=1e-9, atol=1e-15):
                return False
        return True


def _micro_batch(dump: StepDump, token: int | None) -> Tensor:
    """[N] documents of the micro-batch of a token; of the one that trains the most, if None."""
    rows_N = dump.documents["rows"]
    if token is not None:
        return rows_N == rows_N[dump.document_ids_T[token]]
    trained = torch.bincount(rows_N[dump.document_ids_T[dump.loss_mask_T]])
    return rows_N == (trained.argmax() if len(trained) else -1)
