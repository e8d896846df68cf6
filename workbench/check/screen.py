"""A sample of the documents of a long step, on which most mistakes are excluded before they are tried on all of it.

A mistake that leaves a token of the sample different is no cause of that token's stage. The sample is evaluated under
the weights of the whole step, so that denominators are exact. Losses that look beyond a document (a share of the
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
        """Return the sample of a long step; None if the step is short, or if nothing can be excluded on a sample."""
        dump = reading.dump
        if len(dump.document_ids_T) < LONG or dump.num_documents < 2 * SHARE:
            return None
        tokens = [name for name in null.differing if isinstance(null.recorded[name], Tensor) and name != "advantages"]
        stages = {stage_of(name) for name, mismatch in null.differing.items() if mismatch is not None} - {"advantages"}
        groups = [[name for name in tokens if stage_of(name) == stage] for stage in STAGES if stage in stages]
        needed = [names for names in (groups if stages else [tokens]) if names]
        if not needed:
            return None
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
        own = tolerances(expected, (), reading.dump.dtype)
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
