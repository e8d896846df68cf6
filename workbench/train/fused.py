"""Loss and gradient of a row in one pass over the head, for `workbench.train.step`.

`workbench.policy.logprobs.fused_loss` requests chunks of a row, so the row is split here on request: data, weights and
document sums of the tokens of a chunk, evaluated as a whole row is. The tokens that a loss must see together are
derived from a trial evaluation, which records the sums that it requests:

    requests no sums               any tokens                                                           3 GEMMs
    requests sums over documents   documents (pairs: groups)                                            3
      on several cp ranks, of data only       any tokens, with the sums of the whole row replayed       3
      on several cp ranks, of the policy      all ranks between forward and backward                    4
    depends on several documents   the row: surrogates clip_cov and kl_cov, which select by a statistic
                                   of all tokens of a row, and corrections with population micro_batch  4

Always three GEMMs if a row fits into a chunk, or into `PolicySpec.keep_bytes`. A loss with an undeclared coupling
is correct all the same: see `fused_loss`.

The chunks of a row decide the last bits of its log-probabilities, so one function chooses them (`plan_head`), for the
training pass and for the pass without gradient that computes old and reference log-probabilities (`fused_logprobs`).

Letters: T packed tokens | C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.fused_loss import FusedLoss, fused_loss
from workbench.policy.logprobs.fused_pass import Couples, RowLoss
from workbench.policy.model import CHUNKED, Policy
from workbench.reduction.evaluate import Evaluated
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec

if TYPE_CHECKING:
    from workbench.train.step import LocalRow


Evaluate = Callable[["LocalRow", TokenLogprobs, Tensor | None], Evaluated]
"""Some tokens, their head outputs, clip decisions of another run -> the loss on them."""


@dataclass(frozen=True)
class HeadPlan:
    """The chunking of a row through the head, the same with and without a gradient.

    Attributes:
        couples: the unit of tokens that the loss must see together; None: the loss needs the policy's log-probabilities
            of other cp ranks, so it is evaluated on all ranks between forward and backward of the row.
        labels_T: [T] a label that the tokens of one unit share.
        sums: the sums of the whole row, for the tokens of a chunk, if they are data; None: sums of the chunk itself.
        requested: the kinds of sums that the loss requests.
    """

    couples: Couples | None
    labels_T: Tensor | None = None
    sums: RowSums | None = None
    requested: frozenset[str] = frozenset()


def plan_head(
    local: LocalRow,
    frozen_clip_T: Tensor | None,
    evaluate: Evaluate,
    outputs: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> HeadPlan:
    """Choose the chunking of a row. Collective over cp if the loss requests sums; the same on every rank.

    The trial evaluation of the loss has placeholders for the policy's log-probabilities, and for those of the
    reference if the row has none yet.

    Args:
        local: the row.
        frozen_clip_T: [T] bool, clip decisions of another run.
        evaluate: the loss on some tokens.
        outputs: head outputs besides log-probabilities.
        loss_spec: the settings of the loss; None: its coupling is derived from the trial evaluation alone.
    """
    row, requested = local.row, frozenset(requested_sums(local, frozen_clip_T, evaluate, outputs))
    sums = None
    if requested and local.sums.axis.size > 1:
        sums = sums_of_data(local, frozen_clip_T, evaluate, outputs)
        if sums is None:
            return HeadPlan(None, requested=requested)
    if couples_a_row(loss_spec):
        return HeadPlan("row", sums=sums, requested=requested)
    if sums is not None or not requested:
        return HeadPlan("token", sums=sums, requested=requested)
    return HeadPlan("document", row.group_ids_T if "pair" in requested else row.document_ids_T, requested=requested)


def fused_row(
    policy: Policy,
    hidden_TD: Tensor,
    local: LocalRow,
    frozen_clip_T: Tensor | None,
    evaluate: Evaluate,
    outputs: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> tuple[Evaluated, str | None]:
    """Return the loss of a row with its gradient computed already, and the reason for more than three GEMMs, or None.

    Backward of its "total" gives every parameter the gradient that it has without fusion. Head outputs of masked
    tokens are 0: they never went through the head.

    Args:
        policy: this rank's shard, loaded for `fused_loss`.
        hidden_TD: hidden states of the row.
        local: the row.
        frozen_clip_T: [T] bool, clip decisions of another run.
        evaluate: the loss on some tokens.
        outputs: head outputs besides log-probabilities.
        loss_spec: the settings of the loss; None: its coupling is derived from the trial evaluation alone.

    Raises:
        SpecError: a policy whose log-probabilities are not computed in chunks.
    """
    plan = plan_head(local, frozen_clip_T, evaluate, outputs, loss_spec)

    def chunk_loss(head_output: TokenLogprobs, places_C: Tensor) -> Tensor:
        if not len(places_C):
            return head_output.logprobs_T.sum()
        frozen_C = None if frozen_clip_T is None else frozen_clip_T[places_C]
        return evaluate(some_tokens(local, places_C, plan.sums), head_output, frozen_C).scalars["total"].value

    if plan.couples is not None:
        fused = _chunked_head(policy, hidden_TD, local, plan, chunk_loss, outputs)
        if plan.sums is None or not plan.sums.differ():
            with torch.no_grad():
                whole = evaluate(local, fused.head_output, frozen_clip_T)
            total = replace(whole.scalars["total"], value=fused.loss)
            return whole._replace(scalars={**whole.scalars, "total": total}), fused.fallback
    head_output = _whole_row_head(policy, hidden_TD, local, outputs)
    return evaluate(local, head_output, frozen_clip_T), (
        f"the loss sums over whole {' and '.join(sorted(plan.requested))}s, whose tokens lie on {local.sums.axis.size} "
        "cp ranks: it is evaluated between forward and backward, 4 GEMMs less those saved by keep_bytes"
    )


@torch.no_grad()
def fused_logprobs(
    policy: Policy,
    hidden_TD: Tensor,
    local: LocalRow,
    evaluate: Evaluate,
    outputs: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> Tensor:
    """[T] log-probabilities of the trained tokens of a row, bitwise equal to `fused_row`; 0 elsewhere.

    Backward: none.
    Raises:   SpecError: a policy whose log-probabilities are not computed in chunks.
    """
    plan = plan_head(local, None, evaluate, outputs, loss_spec)
    if plan.couples is None:
        return _whole_row_head(policy, hidden_TD, local, outputs).logprobs_T

    def no_loss(head_output: TokenLogprobs, places_C: Tensor) -> Tensor:
        return head_output.logprobs_T.sum()

    return _chunked_head(policy, hidden_TD, local, plan, no_loss, outputs).head_output.logprobs_T


def _chunked_head(
    policy: Policy, hidden_TD: Tensor, local: LocalRow, plan: HeadPlan, chunk_loss: RowLoss, outputs: Sequence[str]
) -> FusedLoss:
    row = local.row
    _require_chunked_head(policy)
    return fused_loss(
        hidden_TD,
        targets_T=row.targets_T,
        loss_fn=chunk_loss,
        couples=plan.couples,
        document_ids_T=plan.labels_T,
        expected_logprobs_T=row.old_logprobs_T,
        implementation=policy.implementation,
        temperature=row.extensions.get("temperature_T", policy.temperature),
        active_T=row.loss_mask_T,
        outputs=outputs,
        **policy.head_arguments(),
    )


def _whole_row_head(policy: Policy, hidden_TD: Tensor, local: LocalRow, outputs: Sequence[str]) -> TokenLogprobs:
    row = local.row
    _require_chunked_head(policy)
    return policy.token_logprobs(
        hidden_TD, row.targets_T, row.extensions.get("temperature_T"), active_T=row.loss_mask_T, outputs=outputs
    )


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


def couples_a_row(spec: LossSpec | None) -> bool:
    """True if a loss takes a statistic over all tokens of a row that depends on the current policy or on the split."""
    return spec is not None and bool(spec.surrogate.breaks or spec.correction.breaks)


def requested_sums(
    local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate, outputs: Sequence[str] = ("entropy", "logsumexp")
) -> set[str]:
    """Return the kinds of sums that a loss requests: document, segment, pair. No collective; equal on every rank."""
    probe = _KindsOfSums()
    with torch.no_grad():
        evaluate(_with_reference(replace(local, sums=probe)), _stand_in(local, outputs), frozen_clip_T)
    return probe.requested


def sums_of_data(
    local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate, outputs: Sequence[str] = ("entropy", "logsumexp")
) -> RowSums | None:
    """Return the sums that a loss requests if none depends on the current policy; None: one does.

    The loss is evaluated twice, for two policies that differ at every token. A sum depends on the policy if it carries
    a gradient, or if the summed values differ between the two. Collective over cp; the same on every rank.
    """
    trials = []
    for moved in (False, True):
        probe = _SumRecorder(local.sums)
        with torch.enable_grad():
            evaluate(_with_reference(replace(local, sums=probe)), _stand_in(local, outputs, moved=moved), frozen_clip_T)
        trials.append(probe)
    first, second = trials
    mask_T = local.row.loss_mask_T
    same = first.free and second.free and [call.kind for call in first.calls] == [call.kind for call in second.calls]
    differs = torch.ones((), dtype=torch.bool, device=mask_T.device)
    if same:
        differs = torch.stack(
            [
                torch.zeros_like(differs),
                *(
                    _differ(one.values_T, other.values_T, mask_T)
                    for one, other in zip(first.calls, second.calls, strict=True)
                ),
            ]
        ).any()
    sums = RowSums(tuple(first.calls), mask_T, local.sums.axis, differs)
    return None if sums.differ() else sums


def some_tokens(local: LocalRow, places_C: Tensor, sums: RowSums | None = None) -> LocalRow:
    """Return the part of a row with some of its tokens: data, weights and sums; documents keep their names.

    Args:
        local: the row.
        places_C: [C] positions of the tokens.
        sums: those of the whole row; None: sums over these tokens alone.
    """

    def at(values_T: Tensor) -> Tensor:
        return values_T[places_C]

    return replace(
        local,
        row=local.row.map(at),
        weights={name: pair.map(at) for name, pair in local.weights.items()},
        sums=(sums or local.sums).at(places_C),
    )


def _with_reference(local: LocalRow) -> LocalRow:
    """Return a row with reference log-probabilities: its own, or placeholders if they are yet to be computed."""
    row = local.row
    return (
        local if row.ref_logprobs_T is not None else replace(local, row=replace(row, ref_logprobs_T=row.old_logprobs_T))
    )


def _stand_in(local: LocalRow, outputs: Sequence[str], *, moved: bool = False) -> TokenLogprobs:
    """Stand-in head outputs for a trial evaluation; if ``moved``, shifted irregularly both ways by at least 1/8 nat."""
    old_T = local.row.old_logprobs_T.detach()
    places_T = torch.arange(len(old_T), device=old_T.device)
    shift_T = (1 + places_T % 3) * (1 - 2 * (places_T % 2)) / 8 if moved else torch.zeros_like(old_T)
    fields = {"logprobs_T": old_T + shift_T} | {f"{name}_T": torch.zeros_like(old_T) + shift_T for name in outputs}
    return TokenLogprobs(**{name: value.requires_grad_() for name, value in fields.items()})


def _differ(one_T: Tensor, other_T: Tensor, mask_T: Tensor) -> Tensor:
    """True if two tensors differ in any bit at a trained token; 0-dimensional."""
    return ((one_T != other_T) & ~(one_T.isnan() & other_T.isnan()) & mask_T).any()


class _KindsOfSums:
    """Document sums that return 0 and record the kinds that are requested."""

    def __init__(self) -> None:
        self.requested: set[str] = set()

    def document(self, values_T: Tensor) -> Tensor:
        return self._record("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._record("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._record("pair", values_T)

    def _record(self, kind: str, values_T: Tensor) -> Tensor:
        self.requested.add(kind)
        return torch.zeros_like(values_T)


class _Call(NamedTuple):
    """One sum that a loss requested: its kind, the summed values, and the sum at each token."""

    kind: str
    values_T: Tensor
    sums_T: Tensor


class _SumRecorder:
    """Document sums of a whole row, each recorded.

    Attributes:
        calls: in order.
        free: True if no gradient enters any of them.
    """

    def __init__(self, sums: DocumentSums) -> None:
        self._sums = sums
        self.calls: list[_Call] = []
        self.free = True

    def document(self, values_T: Tensor) -> Tensor:
        return self._record("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._record("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._record("pair", values_T)

    def _record(self, kind: str, values_T: Tensor) -> Tensor:
        self.free &= not values_T.requires_grad
        sums_T = getattr(self._sums, kind)(values_T)
        self.calls.append(_Call(kind, values_T.detach(), sums_T.detach()))
        return sums_T


@dataclass
class RowSums:
    """Sums over parts of a whole row that are data, for evaluations of some of its tokens.

    Attributes:
        calls: the requests of the loss, in order.
        mask_T: [T] bool, the trained tokens.
        axis: the ranks that share the row.
        differs: 0-dimensional bool, True if the loss summed other values on this rank than were recorded.
    """

    calls: tuple[_Call, ...]
    mask_T: Tensor
    axis: Axis
    differs: Tensor

    def at(self, places_C: Tensor) -> _Replayed:
        """Return the sums for one evaluation of the loss on some tokens.

        Args:
            places_C: [C] positions of the tokens.
        """
        return _Replayed(self, places_C)

    def differ(self) -> bool:
        """True if the loss summed other values on any rank, so these are not its sums. Collective over the axis."""
        return bool(all_sum(self.differs.int(), self.axis) > 0)


@dataclass
class _Replayed:
    """The sums of a row for some of its tokens, in the recorded order."""

    row: RowSums
    places_C: Tensor
    taken: int = 0

    def document(self, values_T: Tensor) -> Tensor:
        return self._next("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._next("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._next("pair", values_T)

    def _next(self, kind: str, values_C: Tensor) -> Tensor:
        row, at = self.row, self.places_C
        call = row.calls[self.taken] if self.taken < len(row.calls) else None
        self.taken += 1
        if call is None or call.kind != kind or values_C.requires_grad:
            row.differs = torch.ones_like(row.differs)
            return torch.zeros_like(values_C)
        row.differs = row.differs | _differ(call.values_T[at], values_C, row.mask_T[at])
        return call.sums_T[at]
