"""Loss and gradient of a row in one pass over the head, for `workbench.train.step`.

`workbench.policy.logprobs.fused_loss` asks about chunks of a row, so the row is cut here as it asks: data, weights and
sums over documents of the tokens of a chunk, through the same evaluation as a whole row. What the loss must see
together is found out by listening to it:

    asks for no sums               any tokens                                                           3 products
    asks for sums over documents   documents (pairs: groups)                                            3
      on several cp ranks, of data only       any tokens, with the sums of the whole row replayed       3
      on several cp ranks, of the policy      all ranks between forward and backward                    4
    looks across documents         the row: surrogates clip_cov and kl_cov, which select by a statistic
                                   of all tokens of a row, and corrections with population micro_batch  4

Three products always where a row fits into a chunk, or `PolicySpec.keep_bytes` holds it. A loss whose coupling nobody
knows comes out right all the same: see `fused_loss`.

How a row is cut decides the last bits of its log-probabilities, so one function decides it (`plan_head`), for the pass
that trains and for the one without a gradient that makes old and reference log-probabilities (`fused_logprobs`).

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
from workbench.policy.logprobs.fused_pass import Couples, LossOfRows
from workbench.policy.model import CHUNKED, Policy
from workbench.reduction.evaluate import Evaluated
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec

if TYPE_CHECKING:
    from workbench.train.step import LocalRow


Evaluate = Callable[["LocalRow", TokenLogprobs, Tensor | None], Evaluated]
"""Some tokens, what the head says about them, clip decisions taken elsewhere -> the loss on them."""


@dataclass(frozen=True)
class HeadPlan:
    """How the tokens of a row go through the head, the same with and without a gradient.

    Attributes:
        couples: which tokens the loss must see together; None: the loss needs the policy's log-probabilities of other
            cp ranks, so the row goes forward, all ranks evaluate the loss, and the row goes back.
        labels_T: [T] what tokens that belong together share.
        sums: for the tokens of a chunk, the sums of the whole row, where they are data; None: of the chunk itself.
        asked: which sums the loss asks for.
    """

    couples: Couples | None
    labels_T: Tensor | None = None
    sums: RowSums | None = None
    asked: frozenset[str] = frozenset()


def plan_head(
    local: LocalRow,
    frozen_clip_T: Tensor | None,
    evaluate: Evaluate,
    wanted: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> HeadPlan:
    """Decide how a row is cut. Collective over cp where the loss asks for sums; the same on every rank.

    The loss is listened to with placeholders of the policy's log-probabilities, and of those of the reference where the
    row has none yet.

    Args:
        local: the row.
        frozen_clip_T: [T] bool, clip decisions taken elsewhere.
        evaluate: the loss on some tokens.
        wanted: what the head says besides log-probabilities.
        loss_spec: what the loss was made from; None: listening alone says what it couples.
    """
    row, asked = local.row, frozenset(sums_asked_for(local, frozen_clip_T, evaluate, wanted))
    sums = None
    if asked and local.sums.axis.size > 1:
        sums = sums_of_data(local, frozen_clip_T, evaluate, wanted)
        if sums is None:
            return HeadPlan(None, asked=asked)
    if couples_a_row(loss_spec):
        return HeadPlan("row", sums=sums, asked=asked)
    if sums is not None or not asked:
        return HeadPlan("token", sums=sums, asked=asked)
    return HeadPlan("document", row.group_ids_T if "pair" in asked else row.document_ids_T, asked=asked)


def fused_row(
    policy: Policy,
    hidden_TD: Tensor,
    local: LocalRow,
    frozen_clip_T: Tensor | None,
    evaluate: Evaluate,
    wanted: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> tuple[Evaluated, str | None]:
    """The loss of a row whose gradient is there already, and why that took more than three products, or None.

    Backward of its "total" gives every parameter the gradient that it would have without fusion. What is said of tokens
    that do not count is 0: they never went through the head.

    Args:
        policy: as this rank holds it, loaded for `fused_loss`.
        hidden_TD: hidden states of the row.
        local: the row.
        frozen_clip_T: [T] bool, clip decisions taken elsewhere.
        evaluate: the loss on some tokens.
        wanted: what the head says besides log-probabilities.
        loss_spec: what the loss was made from; None: listening alone says what it couples.

    Raises:
        SpecError: a policy whose log-probabilities do not go by chunks.
    """
    plan = plan_head(local, frozen_clip_T, evaluate, wanted, loss_spec)

    def loss_of(said: TokenLogprobs, places_C: Tensor) -> Tensor:
        if not len(places_C):
            return said.logprobs_T.sum()
        frozen_C = None if frozen_clip_T is None else frozen_clip_T[places_C]
        return evaluate(some_tokens(local, places_C, plan.sums), said, frozen_C).scalars["total"].value

    if plan.couples is not None:
        fused = _through_head(policy, hidden_TD, local, plan, loss_of, wanted)
        if plan.sums is None or not plan.sums.differ():
            with torch.no_grad():
                whole = evaluate(local, fused.said, frozen_clip_T)
            total = replace(whole.scalars["total"], value=fused.loss)
            return whole._replace(scalars={**whole.scalars, "total": total}), fused.fallback
    said = _all_at_once(policy, hidden_TD, local, wanted)
    return evaluate(local, said, frozen_clip_T), (
        f"the loss sums over whole {' and '.join(sorted(plan.asked))}s, whose tokens lie on {local.sums.axis.size} cp "
        "ranks: it is evaluated between forward and backward, 4 products less what keep_bytes keeps"
    )


@torch.no_grad()
def fused_logprobs(
    policy: Policy,
    hidden_TD: Tensor,
    local: LocalRow,
    evaluate: Evaluate,
    wanted: Sequence[str],
    loss_spec: LossSpec | None = None,
) -> Tensor:
    """[T] log-probabilities of the trained tokens of a row, bit for bit as `fused_row` computes them; 0 on the others.

    Backward: none.
    Raises:   SpecError: a policy whose log-probabilities do not go by chunks.
    """
    plan = plan_head(local, None, evaluate, wanted, loss_spec)
    if plan.couples is None:
        return _all_at_once(policy, hidden_TD, local, wanted).logprobs_T

    def no_loss(said: TokenLogprobs, places_C: Tensor) -> Tensor:
        return said.logprobs_T.sum()

    return _through_head(policy, hidden_TD, local, plan, no_loss, wanted).said.logprobs_T


def _through_head(
    policy: Policy, hidden_TD: Tensor, local: LocalRow, plan: HeadPlan, loss_of: LossOfRows, wanted: Sequence[str]
) -> FusedLoss:
    row = local.row
    _refuse_other_heads(policy)
    return fused_loss(
        hidden_TD,
        targets_T=row.targets_T,
        loss_fn=loss_of,
        couples=plan.couples,
        document_ids_T=plan.labels_T,
        expected_logprobs_T=row.old_logprobs_T,
        implementation=policy.implementation,
        temperature=row.extensions.get("temperature_T", policy.temperature),
        active_T=row.loss_mask_T,
        wanted=wanted,
        **policy.head_arguments(),
    )


def _all_at_once(policy: Policy, hidden_TD: Tensor, local: LocalRow, wanted: Sequence[str]) -> TokenLogprobs:
    row = local.row
    _refuse_other_heads(policy)
    return policy.token_logprobs(
        hidden_TD, row.targets_T, row.extensions.get("temperature_T"), active_T=row.loss_mask_T, wanted=wanted
    )


def _refuse_other_heads(policy: Policy) -> None:
    """Another implementation here than in the passes without fusion would move the ratio off 1 before any step."""
    if policy.implementation not in CHUNKED:
        raise SpecError(
            f"a fused step of a policy whose log-probabilities are {policy.implementation!r}",
            found="an implementation that holds all logits of a row at once",
            rule=f"the implementation is chosen once, for every pass of a run: one of {', '.join(CHUNKED)} "
            "where one is fused",
            fix="load_policy(..., fused_loss=True), or make_policy of a spec with policy.fused_loss",
        )


def couples_a_row(spec: LossSpec | None) -> bool:
    """Whether a loss takes a statistic over all tokens of a row that depends on the current policy, or on the cut."""
    return spec is not None and bool(spec.surrogate.breaks or spec.correction.breaks)


def sums_asked_for(
    local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate, wanted: Sequence[str] = ("entropy", "logsumexp")
) -> set[str]:
    """Which sums over parts of a row a loss asks for: document, segment, pair. The same on every rank, without one."""
    heard = _Listening()
    with torch.no_grad():
        evaluate(_with_reference(replace(local, sums=heard)), _supposed(local, wanted), frozen_clip_T)
    return heard.asked


def sums_of_data(
    local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate, wanted: Sequence[str] = ("entropy", "logsumexp")
) -> RowSums | None:
    """The sums over parts of a row that a loss asks for, where no current policy enters them; None: one does.

    The loss is asked twice, of two policies that differ at every token. A sum depends on the policy if it carries a
    gradient, or if what is summed is not the same both times. Collective over cp; the same on every rank.
    """
    heard = []
    for moved in (False, True):
        noting = _Noting(local.sums)
        with torch.enable_grad():
            evaluate(_with_reference(replace(local, sums=noting)), _supposed(local, wanted, moved=moved), frozen_clip_T)
        heard.append(noting)
    first, second = heard
    mask_T = local.row.loss_mask_T
    same = first.free and second.free and [call.what for call in first.calls] == [call.what for call in second.calls]
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
    """The part of a row that some of its tokens are: data, weights and sums; documents keep their names.

    Args:
        local: the row.
        places_C: [C] where its tokens lie.
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
    """A row that has reference log-probabilities: its own, or placeholders where they are yet to be computed."""
    row = local.row
    return (
        local if row.ref_logprobs_T is not None else replace(local, row=replace(row, ref_logprobs_T=row.old_logprobs_T))
    )


def _supposed(local: LocalRow, wanted: Sequence[str], *, moved: bool = False) -> TokenLogprobs:
    """What the head might say about a row; irregularly moved both ways, by at least an eighth of a nat."""
    old_T = local.row.old_logprobs_T.detach()
    places_T = torch.arange(len(old_T), device=old_T.device)
    away_T = (1 + places_T % 3) * (1 - 2 * (places_T % 2)) / 8 if moved else torch.zeros_like(old_T)
    fields = {"logprobs_T": old_T + away_T} | {f"{name}_T": torch.zeros_like(old_T) + away_T for name in wanted}
    return TokenLogprobs(**{name: value.requires_grad_() for name, value in fields.items()})


def _differ(one_T: Tensor, other_T: Tensor, mask_T: Tensor) -> Tensor:
    """Whether two sets of values differ in any bit where something counts, 0-dimensional."""
    return ((one_T != other_T) & ~(one_T.isnan() & other_T.isnan()) & mask_T).any()


class _Listening:
    """Sums over documents that only note what is asked."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def document(self, values_T: Tensor) -> Tensor:
        return self._note("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._note("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._note("pair", values_T)

    def _note(self, what: str, values_T: Tensor) -> Tensor:
        self.asked.add(what)
        return torch.zeros_like(values_T)


class _Call(NamedTuple):
    """One sum that a loss asked for: over which parts, of what, and the sum at each token."""

    what: str
    values_T: Tensor
    sums_T: Tensor


class _Noting:
    """Sums over documents of a whole row, with a note of each.

    Attributes:
        calls: in order.
        free: whether no gradient enters any of them.
    """

    def __init__(self, sums: DocumentSums) -> None:
        self._sums = sums
        self.calls: list[_Call] = []
        self.free = True

    def document(self, values_T: Tensor) -> Tensor:
        return self._note("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._note("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._note("pair", values_T)

    def _note(self, what: str, values_T: Tensor) -> Tensor:
        self.free &= not values_T.requires_grad
        sums_T = getattr(self._sums, what)(values_T)
        self.calls.append(_Call(what, values_T.detach(), sums_T.detach()))
        return sums_T


@dataclass
class RowSums:
    """Sums over parts of a whole row that are data, to be read where only some of its tokens are evaluated.

    Attributes:
        calls: what the loss asks for, in order.
        mask_T: [T] bool, the tokens that count.
        axis: the ranks that share the row.
        differs: 0-dimensional bool, whether the loss summed something else on this rank than was noted.
    """

    calls: tuple[_Call, ...]
    mask_T: Tensor
    axis: Axis
    differs: Tensor

    def at(self, places_C: Tensor) -> _Replayed:
        """The sums as one evaluation of the loss on some tokens asks for them.

        Args:
            places_C: [C] where the tokens lie.
        """
        return _Replayed(self, places_C)

    def differ(self) -> bool:
        """Whether the loss summed something else on any rank: these are then not its sums. Collective over the axis."""
        return bool(all_sum(self.differs.int(), self.axis) > 0)


@dataclass
class _Replayed:
    """The sums of a row for some of its tokens, one after another."""

    row: RowSums
    places_C: Tensor
    taken: int = 0

    def document(self, values_T: Tensor) -> Tensor:
        return self._next("document", values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        return self._next("segment", values_T)

    def pair(self, values_T: Tensor) -> Tensor:
        return self._next("pair", values_T)

    def _next(self, what: str, values_C: Tensor) -> Tensor:
        row, at = self.row, self.places_C
        call = row.calls[self.taken] if self.taken < len(row.calls) else None
        self.taken += 1
        if call is None or call.what != what or values_C.requires_grad:
            row.differs = torch.ones_like(row.differs)
            return torch.zeros_like(values_C)
        row.differs = row.differs | _differ(call.values_T[at], values_C, row.mask_T[at])
        return call.sums_T[at]
