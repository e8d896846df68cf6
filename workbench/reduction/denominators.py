"""Denominators: divisors of the token sum of a document, one number for each document of the whole step.

Every denominator in use gives all trained tokens of a document the same weight, so it is a column of a table with one
line per document. The table is data of the whole optimizer step: every row of every rank is in it.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec


@dataclass(frozen=True)
class GivenCounts:
    """Counts of the whole step for a micro-batch, when only the micro-batch is available.

    With them the weights are those of the number that a trainer's loss function returns, before its engine scales the
    gradients. Targets that count (``tokens``) and documents are counted in the micro-batch if they are None;
    ``micro_batches`` are those of a rank in an optimizer step.
    """

    tokens: float | None = None
    documents: float | None = None
    dp: int = 1
    cp: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class StepDocuments:
    """Table with one line for each document of an optimizer step, over all ranks and micro-batches.

    Attributes:
        rows_N: [N] index of the document's row.
        tokens_N: [N] float64, its tokens, prompt included.
        counted_N: [N] float64, its targets that count for the denominator: those that train, or, if the spec counts
            survivors, those of them that survive a correction.
        rewards_N: [N] reward units, or None.
        group_ids_N: [N] its prompt, or None.
        rollout_ids_N: [N] rollout that it is a sample of, or None.
        num_rows: rows of the step, empty ones included.
        with_empty: documents in which nothing counts are counted as documents.
        given: counts that the caller passed.
        group_tokens_N: [N] tokens of the group as recorded with the rollouts (token-level extension "group_tokens"),
            or None.
        truncated_N: [N] bool, the sampler cut the document off (token-level extension "truncated"), or None.
    """

    rows_N: Tensor
    tokens_N: Tensor
    counted_N: Tensor
    rewards_N: Tensor | None
    group_ids_N: Tensor | None
    rollout_ids_N: Tensor | None
    num_rows: int
    with_empty: bool = False
    given: GivenCounts = GivenCounts()
    group_tokens_N: Tensor | None = None
    truncated_N: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[TrainingRow],
        counted: Sequence[Tensor],
        *,
        with_empty: bool = False,
        given: GivenCounts | None = None,
    ) -> StepDocuments:
        """Build the table from all rows of the step, and the targets of each, [T] bool, that count."""
        ids = [row.document_ids_T for row in rows]
        sizes = [int(ids_T.max()) + 1 for ids_T in ids]

        def count(masks: Sequence[Tensor]) -> Tensor:
            of_rows = zip(ids, masks, sizes, strict=True)
            return torch.cat(
                [torch.bincount(ids_T[mask_T], minlength=size).double() for ids_T, mask_T, size in of_rows]
            )

        def column(values: Sequence[Tensor | None]) -> Tensor | None:
            present = [values_T for values_T in values if values_T is not None]
            if len(present) < len(values):
                return None
            return torch.cat(list(map(_greatest_of_document, ids, present, sizes)))

        def extension(name: str) -> Tensor | None:
            values = [row.extensions.get(name) for row in rows]
            return column([None if values_T is None else values_T.double() for values_T in values])

        truncated_N = extension("truncated")
        return cls(
            torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes)),
            count([ids_T >= 0 for ids_T in ids]),
            count(counted),
            column([row.rewards_T for row in rows]),
            column([row.group_ids_T for row in rows]),
            column([row.rollout_ids_T for row in rows]),
            len(rows),
            with_empty,
            given or GivenCounts(),
            extension("group_tokens"),
            None if truncated_N is None else truncated_N > 0,
        )

    @property
    def alive_N(self) -> Tensor:
        """[N] bool: documents that are counted as documents."""
        return torch.ones_like(self.counted_N, dtype=torch.bool) if self.with_empty else self.counted_N > 0

    @property
    def num_tokens(self) -> float:
        """Targets of the step that count."""
        return float(self.counted_N.sum()) if self.given.tokens is None else self.given.tokens

    @property
    def num_documents(self) -> float:
        """Documents that are counted."""
        return float(self.alive_N.sum()) if self.given.documents is None else self.given.documents

    def in_row(self, row: int) -> slice:
        """The lines of one row, in the order of its document ids."""
        lines = torch.nonzero(self.rows_N == row).squeeze(1)
        return slice(int(lines[0]), int(lines[-1]) + 1) if len(lines) else slice(0, 0)


def token(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Trained tokens of the step: ``sum_d L_d``."""
    tokens = step.num_tokens
    if spec.compat.scaling.least_tokens and step.given.tokens is None:
        tokens = float(step.counted_N.clamp_min(spec.compat.scaling.least_tokens).sum())
    return torch.full_like(step.counted_N, tokens + spec.compat.scaling.count_epsilon)


def document(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Mean of document means: ``M L_d``."""
    return (step.num_documents + spec.compat.scaling.count_epsilon) * (
        step.counted_N + spec.compat.scaling.length_epsilon
    )


def document_sum(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Mean of document sums: ``M``."""
    return torch.full_like(step.counted_N, step.num_documents + spec.compat.scaling.count_epsilon)


def constant(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Documents times a constant length: ``M C``."""
    if spec.denominator_constant is None:
        raise SpecError(
            "loss.denominator = 'constant'",
            found="no loss.denominator_constant",
            rule="the sum is divided by documents * denominator_constant",
            fix="set the length, for instance the longest completion that the sampler may write",
        )
    documents = step.num_documents + spec.compat.scaling.count_epsilon
    return torch.full_like(step.counted_N, documents * spec.denominator_constant)


def prompt_group(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Mean over prompts of token means: ``P T_g`` with T_g the trained tokens of all completions of the prompt."""
    return _mean_over("prompt_group", "group_ids", step, step.group_ids_N, spec)


def rollout(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Mean over rollouts of token means: ``R T_r`` with T_r the trained tokens of all samples of the rollout."""
    return _mean_over("rollout", "the document extension rollout_ids", step, step.rollout_ids_N, spec)


def group_length(step: StepDocuments, _: LossSpec) -> Tensor:
    """Mean number of tokens of the group's documents, prompts included; as recorded if the batch has it."""
    if step.group_tokens_N is not None:
        return step.group_tokens_N
    alive = step.alive_N.double()
    group_N, (tokens, documents) = _set_sums(
        "group_length", "group_ids", step.group_ids_N, step.tokens_N * alive, alive
    )
    return (tokens / documents.clamp_min(1))[group_N]


def raw(step: StepDocuments, _: LossSpec) -> Tensor:
    """No division: the plain sum."""
    return torch.ones_like(step.counted_N)


def local_token(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Mean over micro-batches of their own token means: ``B T_b``. Depends on the split of the step."""
    tokens_B = step.counted_N.new_zeros(step.num_rows).index_add(0, step.rows_N, step.counted_N)
    given, counts = step.given, spec.compat.scaling.counts
    repeats = {"step": given.dp * given.micro_batches, "pass": given.dp, "micro_batch": 1}[counts]
    return (step.num_rows * repeats * tokens_B)[step.rows_N]


def positive_token(step: StepDocuments, spec: LossSpec) -> Tensor:
    """Trained tokens of documents with a reward above 0; other documents get weight 0."""
    if step.rewards_N is None:
        raise SpecError(
            "weights of tokens with a positive reward",
            found="no rewards",
            rule="documents with a positive reward are selected by rewards_N",
            fix="give the batch rewards",
        )
    positive_N = step.rewards_N > 0
    return torch.where(positive_N, (step.counted_N * positive_N).sum() + spec.compat.scaling.count_epsilon, torch.inf)


DENOMINATORS: dict[str, Callable[[StepDocuments, LossSpec], Tensor]] = {
    function.__name__: function
    for function in (token, document, document_sum, constant, prompt_group, rollout, group_length, raw, local_token)
}
"""[N] divisor of each document's token sum, by the name that a spec uses."""

ALWAYS: dict[str, Callable[[StepDocuments, LossSpec], Tensor]] = {
    function.__name__: function for function in (token, document, document_sum, raw, local_token)
}
"""Denominators that need no setting and no field of the batch: a term may name them under any spec."""


def length_shares(lengths_T: Tensor, given_T: Tensor) -> Tensor:
    """Factor that turns a mean over a document into its sum divided by a given length.

    Formula: length / max(given, 1), a factor of the document's token weights.
    Shapes:  [T] each, the same on every token of a document -> [T] float64.
    Source:  slime's sample_denoms: trained tokens of all samples of a rollout.
    """
    return lengths_T.double() / given_T.double().clamp_min(1)


def _greatest_of_document(ids_T: Tensor, values_T: Tensor, size: int) -> Tensor:
    """[N] the greatest of the document's values; 0 for a document without a token."""
    real = ids_T >= 0
    return values_T.new_zeros(size).scatter_reduce(0, ids_T[real], values_T[real], "amax", include_self=False)


def _set_sums(name: str, needed: str, ids_N: Tensor | None, *columns: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[N] number of the set of documents that share an id, and each column's sum over each set."""
    if ids_N is None:
        raise SpecError(
            f"loss.denominator = {name!r}",
            found=f"a batch without {needed}",
            rule=f"{name} is counted over documents that share an id",
            fix=f"add {needed} to the batch",
        )
    ids, set_N = ids_N.unique(return_inverse=True)
    return set_N, [values_N.new_zeros(len(ids)).index_add(0, set_N, values_N) for values_N in columns]


def _mean_over(name: str, needed: str, step: StepDocuments, ids_N: Tensor | None, spec: LossSpec) -> Tensor:
    """Number of sets times the counted tokens of the document's own set."""
    set_N, (tokens,) = _set_sums(name, needed, ids_N, step.counted_N)
    sets = set_N[step.alive_N].unique().numel()
    return ((sets + spec.compat.scaling.count_epsilon) * tokens)[set_N]
