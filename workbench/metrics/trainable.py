"""Training signal of a rollout batch, before training: tokens and documents whose advantage is not zero.

A token trains if the loss mask is set and its advantage is not zero. Advantages are the recorded ones, or come from
rewards, by the estimator that a spec names (``data.advantages``). Of the latter, group estimators are considered
(grpo, rloo and their relatives): a document has an advantage if its reward is not the mean of its group, so groups of
one document, and groups that were solved by all completions or by none, have none.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.metrics.evidence import SPARSE
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.losses import LossSpec

_EQUAL = 1e-9
"""A reward within this distance of its group's mean, relative to the largest reward, is the mean: sums round."""


@dataclass(frozen=True)
class Trainable:
    """The part of a batch on which a policy-gradient loss can train.

    Attributes:
        documents: in it.
        tokens: in it.
        trained_documents: documents with a trained token.
        trained_tokens: tokens under the loss mask.
        advantage_documents: trained documents whose recorded advantage is not zero on some trained token.
        advantage_tokens: such tokens.
        groups: of documents; None if the batch has no group ids or no rewards.
        mixed_groups: groups of which two trained documents have different rewards.
        single_groups: groups of one trained document, or none.
        group_documents: trained documents to which a group estimator gives an advantage that is not zero.
        trained_groups: groups with a trained document.
        pairs: groups of two trained documents with different rewards, as a loss on preference pairs needs them.

    Example:
        >>> batch = RolloutBatch.from_documents([{"tokens": [5, 6], "loss_mask": [0, 1], "advantages": 0.0,
        ...                                       "old_logprobs": [0.0, -1.0]}], temperature=1.0)
        >>> Trainable.of(batch).nothing
        'all recorded advantages are zero, and there are no groups with rewards to compute others from'
    """

    documents: int
    tokens: int
    trained_documents: int
    trained_tokens: int
    advantage_documents: int
    advantage_tokens: int
    groups: int | None = None
    mixed_groups: int = 0
    single_groups: int = 0
    group_documents: int = 0
    trained_groups: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, batch: RolloutBatch) -> Trainable:
        """Count a batch."""
        trained_T = batch.loss_mask_T & (batch.document_ids_T >= 0)
        nonzero_T = trained_T & (batch.advantages_T != 0)
        trained_N = _documents(trained_T, batch)
        sets = (batch.document_ids_T >= 0, trained_N, trained_T, _documents(nonzero_T, batch), nonzero_T)
        counts = (batch.num_documents, *(int(each.sum()) for each in sets))
        if batch.group_ids_N is None or batch.rewards_N is None:
            return cls(*counts)
        mixed = single = documents = trained = pairs = 0
        ids = batch.group_ids_N.unique()
        for group in ids:
            rewards = batch.rewards_N[trained_N & (batch.group_ids_N == group)].double()
            trained += bool(len(rewards))
            if len(rewards) < 2:
                single += 1
                continue
            off = (rewards - rewards.mean()).abs() > _EQUAL * rewards.abs().max()
            mixed, documents = mixed + bool(off.any()), documents + int(off.sum())
            pairs += len(rewards) == 2 and bool(rewards[0] != rewards[1])
        return cls(*(*counts, len(ids), mixed, single, documents, trained, pairs))

    @property
    def nothing(self) -> str:
        """The reason why a policy-gradient loss has nothing to train on; "" if it has something."""
        if not self.trained_tokens:
            return "no token is trained: the loss mask is empty"
        if self.advantage_documents or self.mixed_groups:
            return ""
        if self.groups is None:
            others = "there are no groups with rewards to compute others from"
        elif self.single_groups == self.groups:
            others = "every group has one document"
        else:
            others = "no group has different rewards"
        return f"all recorded advantages are zero, and {others}"

    def nothing_for(self, loss: LossSpec) -> str:
        """Return the reason why this loss has nothing to train on; "" if it has something.

        Supervised fine-tuning and distillation need no advantage, a loss on preference pairs needs groups of two; all
        others are treated as policy gradients.
        """
        if not self.trained_tokens or loss.surrogate.reads_advantages:
            return self.nothing
        if not loss.needs_pairs or (self.pairs and self.pairs == self.trained_groups):
            return ""
        if self.groups is None:
            return "a loss on preference pairs needs groups with rewards, and there are none"
        return (
            f"{self.trained_groups - self.pairs} of {self.trained_groups} groups are not two trained documents with "
            "different rewards, which a loss on preference pairs refuses"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why a comparison on this batch is weak evidence; () if there are none, or no training signal."""
        if self.nothing:
            return ()
        notes = []
        if self.trained_documents < SPARSE * self.documents:
            notes.append(f"only {_part(self.trained_documents, self.documents)} documents have a trained token")
        if self.advantage_documents < SPARSE * self.documents:
            notes.append(
                f"recorded advantages are zero on all but {_part(self.advantage_documents, self.documents)} documents"
            )
        if self.groups is not None and self.group_documents < SPARSE * self.documents:
            notes.append(
                f"group estimators give an advantage to only {_part(self.group_documents, self.documents)} "
                f"documents{self._reason()}"
            )
        return tuple(notes)

    def _reason(self) -> str:
        if self.single_groups == self.groups:
            return ": every group has one document"
        return "" if self.mixed_groups else ": no group has different rewards"

    def lines(self) -> list[str]:
        """Return the counts as text."""
        groups = "none, without group ids and rewards"
        if self.groups is not None:
            groups = (
                f"not zero on {_part(self.group_documents, self.documents)} documents; {self.mixed_groups} of "
                f"{self.groups} groups have different rewards"
            )
            groups += f", {self.single_groups} of one document" if self.single_groups else ""
        return [
            f"trained: {_part(self.trained_tokens, self.tokens)} tokens, "
            f"in {_part(self.trained_documents, self.documents)} documents",
            f"recorded advantages: not zero on {_part(self.advantage_documents, self.documents)} documents, "
            f"{_part(self.advantage_tokens, self.trained_tokens)} trained tokens",
            f"advantages of group estimators (grpo, rloo, ...): {groups}",
        ]


def _documents(tokens_T: Tensor, batch: RolloutBatch) -> Tensor:
    """[N] bool, documents with a token in the mask."""
    documents_N = torch.zeros(batch.num_documents, dtype=torch.bool, device=tokens_T.device)
    documents_N[batch.document_ids_T[tokens_T]] = True
    return documents_N


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.1%})" if whole else "")
