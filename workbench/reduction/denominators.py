"""Denominators: what the token sum of a document is divided by, as a number a document of the whole step.

Every denominator that the field uses gives all trained tokens of a document the same weight, so it is a column of a
table with one line a document. The table is data of the whole optimizer step: every row of every rank is in it.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.spec import LossSpec
from workbench.rollouts.targets import TrainingRow


@dataclass(frozen=True)
class StepDocuments:
    """One line for each document of an optimizer step, over all ranks and micro-batches.

    Attributes:
        rows_N: [N] which row holds the document.
        tokens_N: [N] float64, its tokens, prompt included.
        counted_N: [N] float64, its targets that count for the denominator: those that train, or, where the spec says
            so, those of them that survive a correction.
        rewards_N: [N] reward units, or None.
        group_ids_N: [N] prompt that it answers, or None.
        rollout_ids_N: [N] rollout that it is a sample of, or None.
        num_rows: rows of the step, empty ones too.
        with_empty: documents in which nothing counts are counted as documents.
    """

    rows_N: Tensor
    tokens_N: Tensor
    counted_N: Tensor
    rewards_N: Tensor | None
    group_ids_N: Tensor | None
    rollout_ids_N: Tensor | None
    num_rows: int
    with_empty: bool = False

    @classmethod
    def of(cls, rows: Sequence[TrainingRow], counted: Sequence[Tensor], *, with_empty: bool = False) -> StepDocuments:
        """Read the lines off whole rows.

        Args:
            rows: all rows of the step.
            counted: a [T] bool a row, the targets that count for the denominator.
            with_empty: count documents in which nothing counts.
        """
        sizes = [int(row.document_ids_T.max()) + 1 for row in rows]

        def count(where: Sequence[Tensor]) -> Tensor:
            return torch.cat([torch.bincount(row.document_ids_T[at], minlength=size).double()
                              for row, at, size in zip(rows, where, sizes, strict=True)])

        def column(name: str) -> Tensor | None:
            if any(getattr(row, name) is None for row in rows):
                return None
            return torch.cat([_first_of_document(row, getattr(row, name), size)
                              for row, size in zip(rows, sizes, strict=True)])

        return cls(torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes)),
                   count([row.document_ids_T >= 0 for row in rows]), count(counted),
                   column("rewards_T"), column("group_ids_T"), column("rollout_ids_T"), len(rows), with_empty)

    @property
    def alive_N(self) -> Tensor:
        """[N] bool: documents that are counted as documents."""
        return torch.ones_like(self.counted_N, dtype=torch.bool) if self.with_empty else self.counted_N > 0

    @property
    def num_documents(self) -> int:
        """Documents that are counted."""
        return int(self.alive_N.sum())

    def in_row(self, row: int) -> slice:
        """The lines of one row, in the order of its document ids."""
        at = torch.nonzero(self.rows_N == row).squeeze(1)
        return slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)


def token(step: StepDocuments, _: LossSpec) -> Tensor:
    """Trained tokens of the step: ``sum_d L_d``."""
    return step.counted_N.sum().expand_as(step.counted_N)


def document(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean of document means: ``M L_d``."""
    return step.num_documents * step.counted_N


def document_sum(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean of document sums: ``M``."""
    return torch.full_like(step.counted_N, step.num_documents)


def constant(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Documents times a constant length: ``M C``."""
    if spec.denominator_constant is None:
        raise SpecError("loss.denominator = 'constant'", found="no loss.denominator_constant",
                        rule="the sum is divided by documents * denominator_constant",
                        fix="give the length, for instance the longest completion that the sampler may write")
    return torch.full_like(step.counted_N, step.num_documents * spec.denominator_constant)


def prompt_group(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean over prompts of token means: ``P T_g`` with T_g the trained tokens of all answers to the prompt."""
    return _mean_over("prompt_group", "group_ids", step, step.group_ids_N)


def rollout(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean over rollouts of token means: ``R T_r`` with T_r the trained tokens of all samples of the rollout."""
    return _mean_over("rollout", "the document extension rollout_ids", step, step.rollout_ids_N)


def group_length(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean number of tokens, prompts included, of the answers to the prompt."""
    group = _labels("group_length", "group_ids", step.group_ids_N)
    size = int(group.max()) + 1 if len(group) else 0
    alive = step.alive_N.double()
    tokens_G = alive.new_zeros(size).index_add(0, group, step.tokens_N * alive)
    answers_G = alive.new_zeros(size).index_add(0, group, alive)
    return (tokens_G / answers_G.clamp_min(1))[group]


def raw(step: StepDocuments, _: LossSpec) -> Tensor:
    """Nothing: the plain sum."""
    return torch.ones_like(step.counted_N)


def local_token(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean over micro-batches of their own token means: ``B T_b``. Depends on how the step is cut."""
    tokens_B = step.counted_N.new_zeros(step.num_rows).index_add(0, step.rows_N, step.counted_N)
    return (step.num_rows * tokens_B)[step.rows_N]


def positive_token(step: StepDocuments, _: LossSpec) -> Tensor:
    """Trained tokens of documents with a reward above 0; other documents weigh nothing."""
    if step.rewards_N is None:
        raise SpecError("weights of tokens with a positive reward", found="no rewards",
                        rule="which documents were right is read off rewards_N", fix="give the batch rewards")
    good = step.rewards_N > 0
    return torch.where(good, (step.counted_N * good).sum(), torch.inf)


DENOMINATORS: dict[str, Callable[[StepDocuments, LossSpec], Tensor]] = {
    function.__name__: function
    for function in (token, document, document_sum, constant, prompt_group, rollout, group_length, raw, local_token)}
"""[N] divisor of each document's token sum, by the name that a spec uses."""

ALWAYS: dict[str, Callable[[StepDocuments, LossSpec], Tensor]] = {
    function.__name__: function for function in (token, document, document_sum, raw)}
"""Those that need no setting and no field of the batch: a term may ask for them under any spec."""


def _first_of_document(row: TrainingRow, values_T: Tensor, size: int) -> Tensor:
    real = row.document_ids_T >= 0
    values_N = values_T.new_zeros(size)
    values_N[row.document_ids_T[real]] = values_T[real]  # the same on every token of a document
    return values_N


def _labels(name: str, needed: str, ids_N: Tensor | None) -> Tensor:
    if ids_N is None:
        raise SpecError(f"loss.denominator = {name!r}", found=f"a batch without {needed}",
                        rule=f"{name} is counted over documents that share an id", fix=f"give the batch {needed}")
    return ids_N.unique(return_inverse=True)[1]


def _mean_over(name: str, needed: str, step: StepDocuments, ids_N: Tensor | None) -> Tensor:
    """Number of sets times the counted tokens of the document's own set."""
    label = _labels(name, needed, ids_N)
    size = int(label.max()) + 1 if len(label) else 0
    tokens = step.counted_N.new_zeros(size).index_add(0, label, step.counted_N)
    sets = label[step.alive_N].unique().numel()
    return (sets * tokens)[label]
