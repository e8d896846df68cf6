"""Loss and gradient of a row in one pass over the head, for `workbench.train.step`.

`workbench.policy.logprobs.fused_loss` requests chunks of a row, so the row is split here on request: data, weights and
document sums of the tokens of a chunk, evaluated as a whole row is. The tokens that a loss must see together are
derived from a trial evaluation, which records the sums that it requests: any tokens if there are none, else whole
documents (pairs: groups), or the row. If documents straddle cp ranks, sums of data are those of the whole row,
replayed, and a loss with sums of the policy is evaluated between forward and backward. README.md has the number of
GEMMs in each case.

The chunks of a row decide the last bits of its log-probabilities, so one function chooses them (`plan_head`), for the
training pass and for the pass without gradient that computes old and reference log-probabilities (`fused_head`).

Letters: T packed tokens | C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.coefficients import RowLoss
from workbench.policy.logprobs.engine import Couples
from workbench.policy.logprobs.fused_loss import FusedLoss, fused_loss
from workbench.policy.model import CHUNKED, Policy
from workbench.reduction.evaluate import Evaluated
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis
from workbench.train.rows import LocalRow

if TYPE_CHECKING:
    from workbench.train.step import StepLoss


@dataclass(frozen=True)
class HeadPlan:
    """The chunking of a row through the head, the same with and without a gradient.

    Attributes:
        couples: the unit of tokens that the loss must see together; None: the loss needs the policy's log-probabilities
            of other cp ranks, so it is evaluated on all ranks between forward and backward of the row.
        labels_T: [T] a label that the tokens of one unit share.
        recorded: the sums of the whole row, for the tokens of a chunk, if they are data; None: sums of the chunk.
        requested: the kinds of sums that the loss requests.
    """

    couples: Couples | None
    labels_T: Tensor | None = None
    recorded: RecordedSums | None = None
    requested: frozenset[str] = frozenset()


def plan_head(local: LocalRow, loss: StepLoss) -> HeadPlan:
    """Choose the chunking of a row. Collective over cp if the loss requests sums; the same on every rank.

    The trial evaluation of the loss has placeholders for the policy's log-probabilities, and for those of the
    reference if the row has none yet. Without settings its coupling is derived from that evaluation alone.
    """
    row, requested, recorded = local.row, frozenset(_requested_sums(local, loss)), None
    if requested and local.sums.axis.size > 1:
        recorded = _sums_of_data(local, loss)
        if recorded is None:
            return HeadPlan(None, requested=requested)
    if loss.spec is not None and (loss.spec.row_at_once or loss.spec.correction.breaks):
        # A statistic over all tokens of a row, which depends on the current policy or on the split.
        return HeadPlan("row", recorded=recorded, requested=requested)
    if recorded is not None or not requested:
        return HeadPlan("token", recorded=recorded, requested=requested)
    return HeadPlan("document", row.group_ids_T if "pair" in requested else row.document_ids_T, requested=requested)


def fused_row_loss(
    policy: Policy, hidden_TD: Tensor, local: LocalRow, loss: StepLoss
) -> tuple[LocalRow, Evaluated, str | None]:
    """Return a row, its loss with the gradient computed already, and the reason for more than three GEMMs, or None.

    Backward of its "total" gives every parameter the gradient that it has without fusion. Head outputs of masked
    tokens are 0: they never went through the head.

    Raises:
        SpecError: a policy whose log-probabilities are not computed in chunks.
    """
    plan = plan_head(local, loss)

    def chunk_loss(head_output: TokenLogprobs, places_C: Tensor) -> Tensor:
        if not len(places_C):
            return head_output.logprobs_T.sum()
        return loss(_some_tokens(local, places_C, plan.recorded), head_output).scalars["total"].value

    if plan.couples is not None:
        fused = _chunked_head(policy, hidden_TD, local, plan, chunk_loss, loss.outputs)
        if plan.recorded is None or not plan.recorded.differ():
            with torch.no_grad():
                whole = loss(local, fused.head_output)
            total = replace(whole.scalars["total"], value=fused.loss)
            return local, whole._replace(scalars={**whole.scalars, "total": total}), fused.fallback
    reason = (
        f"the loss sums over whole {' and '.join(sorted(plan.requested))}s, whose tokens lie on {local.sums.axis.size} "
        "cp ranks: it is evaluated between forward and backward, 4 GEMMs less those saved by keep_bytes"
    )
    return local, loss(local, _whole_row_head(policy, hidden_TD, local, loss.outputs)), reason


@torch.no_grad()
def fused_head(policy: Policy, hidden_TD: Tensor, local: LocalRow, loss: StepLoss) -> tuple[LocalRow, TokenLogprobs]:
    """Return a row and head outputs of its trained tokens, bitwise equal to `fused_row_loss`; 0 elsewhere.

    Backward: none.
    Raises:   SpecError: a policy whose log-probabilities are not computed in chunks.
    """
    plan = plan_head(local, loss)
    if plan.couples is None:
        return local, _whole_row_head(policy, hidden_TD, local, loss.outputs)

    def no_loss(head_output: TokenLogprobs, places_C: Tensor) -> Tensor:
        return head_output.logprobs_T.sum()

    return local, _chunked_head(policy, hidden_TD, local, plan, no_loss, loss.outputs).head_output


def _chunked_head(
    policy: Policy, hidden_TD: Tensor, local: LocalRow, plan: HeadPlan, chunk_loss: RowLoss, outputs: Sequence[str]
) -> FusedLoss:
    row = local.row
    _require_chunked_head(policy)
    assert plan.couples is not None, "without, callers use `_whole_row_head`"
    return fused_loss(
        policy.head_input(hidden_TD),
        targets_T=row.targets_T,
        loss_fn=chunk_loss,
        couples=plan.couples,
        document_ids_T=plan.labels_T,
        expected_logprobs_T=row.old_logprobs_T,
        expected_rows=local.trained,
        implementation=policy.implementation,
        temperature=row.extensions.get("temperature_T", policy.temperature),
        active_T=row.loss_mask_T,
        support=local.support,
        outputs=outputs,
        **policy.head_arguments(),
    )


def _whole_row_head(policy: Policy, hidden_TD: Tensor, local: LocalRow, outputs: Sequence[str]) -> TokenLogprobs:
    _require_chunked_head(policy)
    return local.token_logprobs(policy, hidden_TD, outputs, active_T=local.row.loss_mask_T)


def _require_chunked_head(policy: Policy) -> None:
    """Raise an error if the head differs from that of unfused passes: ratios would not start at exactly 1."""
    if policy.implementation not in CHUNKED:
        raise SpecError(
            f"a fused step of a policy whose log-probabilities are {policy.implementation!r}",
            found="an implementation that holds all logits of a row at once",
            rule=f"the implementation is chosen once, for every pass of a run: one of {', '.join(CHUNKED)} "
            "if one is fused",
            fix="load_policy(..., fused_loss=True), or make_policy of a spec with policy.fused_loss",
        )


def _some_tokens(local: LocalRow, places_C: Tensor, recorded: RecordedSums | None) -> LocalRow:
    """Return the part of a row with the tokens at [C] positions: data, weights and sums; documents keep their names.

    ``recorded`` are the sums of the whole row; None: sums over these tokens alone.
    """

    def at(values_T: Tensor) -> Tensor:
        return values_T[places_C]

    return replace(
        local,
        row=local.row.map(at),
        weights={name: pair.map(at) for name, pair in local.weights.items()},
        sums=local.sums.at(places_C) if recorded is None else recorded.at(places_C),
    )


# -- trial evaluations of a loss, which show the sums that it takes ----------------------------------------------------


def _try(local: LocalRow, loss: StepLoss, sums: Callable[[str, Tensor], Tensor], *, moved: bool = False) -> None:
    """Evaluate a loss with placeholders for head outputs, and for reference log-probabilities if there are none.

    ``sums`` is `DocumentSums.instead`; ``moved`` shifts head outputs irregularly both ways by at least 1/8 nat.
    """
    row, old_T = local.row, local.row.old_logprobs_T.detach()
    if row.ref_logprobs_T is None:
        row = replace(row, ref_logprobs_T=row.old_logprobs_T)
    places_T = torch.arange(len(old_T), device=old_T.device)
    shift_T = (1 + places_T % 3) * (1 - 2 * (places_T % 2)) / 8 if moved else torch.zeros_like(old_T)
    fields = {"logprobs_T": old_T + shift_T}
    fields |= {f"{name}_T": torch.zeros_like(old_T) + shift_T for name in loss.outputs}
    head_output = TokenLogprobs(**{name: value.requires_grad_() for name, value in fields.items()})
    loss(replace(local, row=row, sums=replace(local.sums, instead=sums)), head_output)


def _requested_sums(local: LocalRow, loss: StepLoss) -> set[str]:
    """Return the kinds of sums that a loss requests: document, segment, pair. No collective; equal on every rank."""
    requested = set()

    def note(kind: str, values_T: Tensor) -> Tensor:
        requested.add(kind)
        return torch.zeros_like(values_T)

    with torch.no_grad():
        _try(local, loss, note)
    return requested


class _Call(NamedTuple):
    """One sum that a loss requested: its kind, the summed values, the sum at each token, and if it has a gradient."""

    kind: str
    values_T: Tensor
    sums_T: Tensor
    has_gradient: bool


def _sums_of_data(local: LocalRow, loss: StepLoss) -> RecordedSums | None:
    """Return the sums that a loss requests if none depends on the current policy; None: one does.

    The loss is evaluated twice, for two policies that differ at every token. A sum depends on the policy if it carries
    a gradient, or if the summed values differ between the two. Collective over cp; the same on every rank.
    """
    first: list[_Call] = []
    second: list[_Call] = []
    for calls in (first, second):

        def record(kind: str, values_T: Tensor, calls: list[_Call] = calls) -> Tensor:
            sums_T = getattr(local.sums, kind)(values_T)
            calls.append(_Call(kind, values_T.detach(), sums_T.detach(), values_T.requires_grad))
            return sums_T

        with torch.enable_grad():
            _try(local, loss, record, moved=calls is second)
    mask_T = local.row.loss_mask_T
    of_policy = any(call.has_gradient for call in first + second) or len(first) != len(second)
    of_policy |= any(one.kind != other.kind for one, other in zip(first, second, strict=False))
    differs = torch.full((), of_policy, device=mask_T.device)
    if not of_policy:
        for one, other in zip(first, second, strict=True):
            differs = differs | _differ(one.values_T, other.values_T, mask_T)
    recorded = RecordedSums(tuple(first), local.sums, mask_T, differs)
    return None if recorded.differ() else recorded


@dataclass
class RecordedSums:
    """Sums over parts of a whole row that are data, for evaluations of the loss on some of its tokens.

    Attributes:
        calls: the requests of the loss, in order.
        sums: of the row.
        mask_T: [T] bool, the trained tokens.
        differs: 0-dimensional bool, True if the loss summed other values on this rank than were recorded.
    """

    calls: tuple[_Call, ...]
    sums: DocumentSums
    mask_T: Tensor
    differs: Tensor

    def at(self, places_C: Tensor) -> DocumentSums:
        """Return the sums for one evaluation of the loss on the tokens at [C] positions, in the recorded order."""
        pending: Iterator[_Call] = iter(self.calls)

        def replay(kind: str, values_C: Tensor) -> Tensor:
            call = next(pending, None)
            if call is None or call.kind != kind or values_C.requires_grad:
                self.differs = torch.ones_like(self.differs)
                return torch.zeros_like(values_C)
            self.differs = self.differs | _differ(call.values_T[places_C], values_C, self.mask_T[places_C])
            return call.sums_T[places_C]

        return replace(self.sums, instead=replay)

    def differ(self) -> bool:
        """True if the loss summed other values on any rank, so these are not its sums. Collective over the axis."""
        axis = self.sums.axis
        assert isinstance(axis, Axis), "`plan_head` records sums only where ranks share a row"
        return bool(all_sum(self.differs.int(), axis) > 0)


def _differ(one_T: Tensor, other_T: Tensor, mask_T: Tensor) -> Tensor:
    """True if two tensors differ in any bit at a trained token; 0-dimensional."""
    return ((one_T != other_T) & ~(one_T.isnan() & other_T.isnan()) & mask_T).any()
