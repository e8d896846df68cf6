"""One pass over the head that leaves a loss and its gradients behind: what `fused_loss` does behind its door.

    plan     which rows go together, by coupling                            `plan_rows`
    back     each group forward, the loss asked, and back                   `GradientPass.run`
    settle   the loss asked about everything, and what was wrong mended

Between the first product and the last nothing waits for the device, except once for the first document that is longer
than a chunk. Then it is asked which rows have to be mended, and once more if some were beyond the engine's range.

A coefficient is the gradient of the loss by one thing that the head says about one row: [F, A].

Letters: A rows that are computed, group by group | C rows of a chunk | F fields of `TokenLogprobs` that are wanted
| N documents.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.driver import Rows
from workbench.policy.logprobs.engine import Accumulators, Chunk, Engine, Keep, RowGradients, plan_chunks
from workbench.policy.logprobs.head import WANTED, TokenLogprobs
from workbench.policy.logprobs.kept import KeptChunk, whole_where_empty
from workbench.policy.logprobs.kept import backward as kept_backward
from workbench.policy.logprobs.kept import forward as kept_forward
from workbench.policy.logprobs.late_scaling import add_scaled_, scale_
from workbench.sharding.collectives import all_max, all_sum

Couples = Literal["token", "document", "row"]
Rest = Literal["nothing", "data", "factor", "more"]
"""What the rest of a document does to the coefficients of a chunk: nothing; it must be there, however likely it is (its
data count); it multiplies them by one number; more than that."""
LossOfRows = Callable[[TokenLogprobs, Tensor], Tensor]
"""What the head says about some rows, and their places in the row of T -> their part of the loss, 0-dimensional."""

OF_SETS = ("kept_logprobs_T", "kept_entropy_T")
"""Fields that are no matter of an engine."""

ROUNDING = 512
"""Units in the last place that two evaluations of one coefficient may lie apart, relative to the coefficient and to the
mean of all: sums over other rows are added up in another order."""


@dataclass(frozen=True)
class RowPlan:
    """Which rows go through the head together.

    Attributes:
        order_A: how computed rows are reordered first; None: not at all.
        groups: rows that the loss must see together, each cut into chunks, in that order.
    """

    order_A: Tensor | None
    groups: list[list[slice]]


def plan_rows(rows: int, chunk_tokens: int, couples: Couples, units_A: Tensor | None = None) -> RowPlan:
    """Cut computed rows into chunks at the borders that a coupling asks for.

    Args:
        rows: A.
        chunk_tokens: rows of a chunk at most.
        couples: "token": anywhere; "document": between units, a unit that is too long into even parts, and all of these
            first (the first one then needs no buffer of its own); "row": anywhere, and everything is one group.
        units_A: [A] the label of each row's document, on the CPU.
    """
    if units_A is None or couples != "document":
        chunks = plan_chunks(rows, chunk_tokens)
        return RowPlan(None, [chunks] if couples == "row" and chunks else [[chunk] for chunk in chunks])
    labels_N, sizes_N = units_A.unique_consecutive(return_counts=True)
    order_A = None
    if len(labels_N.unique()) < len(labels_N):  # rows of a label do not lie next to each other
        names, unit_A = units_A.unique(return_inverse=True)
        first_A = torch.full((len(names),), rows).scatter_reduce(0, unit_A, torch.arange(rows), "amin")[unit_A]
        order_A = torch.argsort(first_A, stable=True)
        sizes_N = first_A[order_A].unique_consecutive(return_counts=True)[1]
    groups, ends = [], sizes_N.cumsum(0).tolist()
    start = taken = 0
    while taken < len(ends):
        fits = bisect.bisect_right(ends, start + chunk_tokens)
        end = ends[max(fits, taken + 1) - 1]
        parts = -(-(end - start) // chunk_tokens)
        groups.append(
            [
                slice(start + part.start, start + part.stop)
                for part in plan_chunks(end - start, -(-(end - start) // parts))
            ]
        )
        start, taken = end, max(fits, taken + 1)
    for group in groups if order_A is not None else ():
        some = slice(group[0].start, group[-1].stop)
        order_A[some] = order_A[some].sort().values
    return RowPlan(order_A, sorted(groups, key=lambda group: len(group) == 1))


@dataclass
class GradientPass:
    """One pass, and what it has found so far.

    Attributes:
        engine: of the head.
        loss_fn: asked about rows.
        hidden_AD: rows in the order of the plan.
        rows: what belongs to them.
        places_A: their places in the row of T.
        ascending_A: what puts them in the order of the row; None: they are.
        expected_A: about what the log-probabilities will be, or None.
        couples: of the loss.
        chunk_tokens: rows of a chunk at most.
        keep_bytes: what may be kept of a group of several chunks.
        fields: of `TokenLogprobs` that are wanted; the first is the log-probability.
        into: where gradients go, not filled yet; None: nobody wants them.
        said_FA: what the head says.
        used_FA: the coefficients that rows went back with.
        words: why there were more than three products.
    """

    engine: Engine
    loss_fn: LossOfRows
    hidden_AD: Tensor
    rows: Rows
    places_A: Tensor
    ascending_A: Tensor | None
    expected_A: Tensor | None
    couples: Couples
    chunk_tokens: int
    keep_bytes: int
    fields: tuple[str, ...]
    into: Accumulators | None
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.said_FA = self.hidden_AD.new_zeros(len(self.fields), len(self.rows), dtype=self.engine.head.wide)
        self.used_FA = torch.zeros_like(self.said_FA)
        self._everything = slice(0, len(self.rows))
        sets = self.rows.kept
        self._empty_A = None if sets is None else sets.are_whole(self.places_A.device)
        self._looked_at: set[str] = set()
        self._beyond_A: Tensor | None = None
        self._late: list[slice] = []
        self._rest: Rest | None = None
        self._first_trial_FC: Tensor | None = None
        self._free_FA: Tensor | None = None
        self._apart: Accumulators | None = None
        self._begun = self._is_pure = False

    def run(self, groups: list[list[slice]]) -> Tensor:
        """Forward, and back where gradients are wanted; the loss of all rows, without a graph."""
        if self.into is None:
            for part in (part for group in groups for part in group):
                self._forward(part, "no")
            self._say_exactly(self._beyond_A)
            return self._ask(self._everything)[0]
        alone = len(groups) == 1
        asked = [self._back(group, alone) for group in groups]
        loss, truth_FA = asked[0] if alone else self._ask(self._everything)
        if not self._begun:  # no row at all
            for gradient in (self.into.weight_VD, self.into.bias_V):
                if gradient is not None:
                    gradient.zero_()
        if not alone or self._late or self._beyond_A is not None:
            loss = self._settle(loss, truth_FA)
        return loss

    # ---- a group there and back ----------------------------------------------------------------------------------

    def _back(self, group: list[slice], alone: bool) -> tuple[Tensor, Tensor]:
        """One group forward and back; what the loss said of it."""
        rows = slice(group[0].start, group[-1].stop)
        if len(group) == 1 or self._may_keep(rows.stop - rows.start):
            went = [self._forward(part, "scratch" if len(group) == 1 else "own") for part in group]
            return self._back_at_once(group, rows, went, alone)
        if self.couples == "row":
            for part in group:
                self._forward(part, "no")
            self.words.append(
                f"all {rows.stop - rows.start} tokens, more than {self.chunk_tokens}, went forward "
                "twice: the loss couples the whole row"
            )
            return self._back_at_once(group, rows, None, alone)
        first = self._forward(group[0], "scratch")
        rest = self._what_the_rest_does(rows, group[0])
        if rest == "more":
            for part in group[1:]:
                self._forward(part, "no")
            self.words.append(
                f"a document of {rows.stop - rows.start} tokens, more than {self.chunk_tokens}, went "
                "forward twice: the loss wants more from it than one number times a known one a token"
            )
            return self._back_at_once(group, rows, None, alone)
        self._late.append(rows)
        if rest in ("factor", "data"):
            return self._back_late(group, rows, first)
        for part in group:
            self._back_at_once([part], part, [first if part is group[0] else self._forward(part, "scratch")], False)
        return self._ask(rows)

    def _may_keep(self, rows: int) -> bool:
        """Whether the budget keeps so many rows: those of every tp rank, or of none."""
        if not self.keep_bytes:
            return False
        head, most = self.engine.head, self.engine.bytes_kept(rows)
        if head.axis is not None and head.is_split:
            most = int(all_max(torch.tensor(most, device=head.weight_VD.device), head.axis))
        return most <= self.keep_bytes

    def _back_at_once(
        self, group: list[slice], rows: slice, went: list[_Went] | None, alone: bool
    ) -> tuple[Tensor, Tensor]:
        """Rows of which everything is said, back; what was not kept goes forward again."""
        loss, asked_FC = self._ask(rows)
        # What is no number spoils every gradient. Where it is the truth, settling finds it missing.
        wants_FC = asked_FC if alone and self._beyond_A is None else _finite(asked_FC)
        for number, part in enumerate(group):
            there = self._forward(part, "scratch") if went is None else went[number]
            self._send(there, _cut(wants_FC, rows, part), part, self.into, first=not self._begun)
            self._begun = True
        self.used_FA[:, rows] = wants_FC
        return loss, asked_FC

    def _back_late(self, group: list[slice], rows: slice, first: _Went) -> tuple[Tensor, Tensor]:
        """A document longer than a chunk: back with a trial's coefficients, scaled once its last chunk is known."""
        direct = not self._begun  # nothing lies there that must not be scaled
        into = self.into if direct else self._beside()
        self._begun = True
        for part in group:
            went = first if part is group[0] else self._forward(part, "scratch")
            trial_FC, self._first_trial_FC = self._first_trial_FC, None
            trial_FC = self._trial(rows, part) if trial_FC is None else trial_FC
            self._send(went, trial_FC, part, into, first=part is group[0])
            self.used_FA[:, part] = trial_FC
        loss, truth_FC = self._ask(rows)
        scale = _factor(truth_FC, self.used_FA[:, rows])
        self.used_FA[:, rows] *= scale
        if into.hidden_TD is not None:
            scale_(into.hidden_TD[rows], scale)
        for gathered, whole in ((into.weight_VD, self.into.weight_VD), (into.bias_V, self.into.bias_V)):
            if gathered is not None and direct:
                scale_(gathered, scale)
            elif gathered is not None and whole is not None:
                add_scaled_(whole, gathered, scale)
        return loss, truth_FC

    def _what_the_rest_does(self, rows: slice, part: slice) -> Rest:
        """What a document's other rows do to what is wanted from a chunk of it.

        They are moved down, and up, to see. Found out once a call, from the first document that is too long and that
        the loss wants something from; waits for the device.
        """
        if self._rest is None:
            own_FC = self._ask(part)[1]
            down_FC, up_FC = (_cut(self._ask(rows, self._supposed(rows, part, by))[1], rows, part) for by in (-1, 1))
            gone = (down_FC == 0).all()
            flags = torch.stack(
                [
                    torch.stack([own_FC, down_FC, up_FC]).any(),
                    ~_near(own_FC, down_FC),
                    ~_near(down_FC, up_FC) | gone,
                    ~_near(up_FC, _factor(up_FC, down_FC) * down_FC) & ~gone,
                ]
            )
            if self.expected_A is not None:  # queued before the device is waited for: it is probably what comes next
                self._first_trial_FC = self._trial(rows, part)
            wanted, seen, moved, more = self._anywhere(flags).tolist()
            if not wanted:  # a document without advantages; or, where nothing is expected of the rest, a clip
                self._first_trial_FC = None
                return "factor" if self.expected_A is None else "nothing"
            self._rest = "more" if moved and more else "factor" if moved else "data" if seen else "nothing"
            if self._rest != "factor":
                self._first_trial_FC = None
        return self._rest

    def _trial(self, rows: slice, part: slice) -> Tensor:
        """What the rows of a chunk go back with while the rest of their document is not known; [F, C].

        With expectations: what is wanted if they come true, but 0 where the chunk shows that a row is cut off. Without:
        what the chunk says by itself, made comparable between chunks. The document's one number may be anything, also
        0 (a clip): what is looked for is the shape.
        """
        if self._rest == "data":
            return _finite(_cut(self._ask(rows, self._supposed(rows, part))[1], rows, part))
        if self.expected_A is None:
            own_FC = self._ask(part)[1]
            pivot, even_FC = own_FC.take(own_FC.abs().argmax()), torch.zeros_like(own_FC)
            even_FC[0] = 1
            return _finite(torch.where(pivot == 0, even_FC, own_FC / pivot))
        if self._free_FA is None:
            self._free_FA = self._ask(self._everything, self._supposed(self._everything))[1]
        open_FC = _cut(self._ask(rows, self._supposed(rows, part))[1], rows, part) != 0
        return _finite(torch.where(open_FC | ~open_FC.any(), self._free_FA[:, part], 0.0))

    def _supposed(self, rows: slice, known: slice | None = None, by: int = 0) -> Tensor:
        """[F, C] what the head may say of a document of which one chunk, or nothing, is known; irregularly moved."""
        supposed_FC = torch.zeros_like(self.said_FA[:, rows])
        if self.expected_A is not None:
            supposed_FC[0] = self.expected_A[rows]
        supposed_FC[0] += by * (1 + torch.arange(supposed_FC.shape[1], device=supposed_FC.device) % 3) / 8
        if known is not None:
            _cut(supposed_FC, rows, known).copy_(self.said_FA[:, known])
        return supposed_FC

    # ---- everything seen together --------------------------------------------------------------------------------

    def _settle(self, loss: Tensor, truth_FA: Tensor) -> Tensor:
        """Mend the rows that went back with another coefficient than that of the whole row; the loss."""
        engine, beyond_A = self.engine, torch.zeros_like(self.places_A, dtype=torch.bool)
        if self._beyond_A is not None:
            beyond_A = self._beyond_A
            for used_A, name in zip(self.used_FA, self.fields, strict=True):
                if name not in OF_SETS:
                    used_A.masked_fill_(beyond_A, 0)  # nothing went back for these
        wrong_A, far_A = torch.stack([self._differs(truth_FA), beyond_A]).cpu()
        if beyond := int(far_A.sum()):
            engine = self._say_exactly(beyond_A)
            loss, truth_FA = self._ask(self._everything)
            wrong_A = self._differs(truth_FA).cpu()
        wrong = int(wrong_A.sum())
        if not wrong:
            return loss
        late = sum(int(wrong_A[rows].sum()) for rows in self._late)
        if beyond:
            self.words.append(
                f"{wrong} tokens went through again: {beyond} beyond the exponents of the engine, and "
                "those that the loss ties to them"
            )
        elif late:
            self.words.append(
                f"{late} tokens of documents longer than {self.chunk_tokens} went through again: the "
                "loss wants from them something else than one number times what a trial said"
            )
        if wrong > late and not beyond:
            across = "documents" if self.couples == "document" else "tokens"
            self.words.append(
                f"{wrong - late} tokens went through again: the loss looks across {across}, and wants "
                "something else from them in the whole row than in their chunk"
            )
        self._mend(engine, torch.nonzero(wrong_A)[:, 0].to(self.places_A.device), truth_FA - self.used_FA)
        return loss

    def _differs(self, truth_FA: Tensor) -> Tensor:
        """[A] whether a row went back with something else than it should have; the same on every tp rank."""
        return self._anywhere(~((truth_FA - self.used_FA).abs() <= _slack(truth_FA)).all(0))

    def _mend(self, engine: Engine, wrong_R: Tensor, missing_FA: Tensor) -> None:
        """Add what is missing from the gradients of some rows."""
        for part in plan_chunks(len(wrong_R), self.chunk_tokens):
            some = wrong_R[part]
            there = self._through(engine, some, "scratch")
            hidden_CD = None if self.into.hidden_TD is None else torch.empty_like(there.chunk.hidden_CD)
            into = Accumulators(hidden_CD, self.into.weight_VD, self.into.bias_V)
            self._send(there, missing_FA[:, some], slice(0, len(some)), into, first=False, engine=engine)
            if hidden_CD is not None:
                self.into.hidden_TD.index_add_(0, some, hidden_CD)

    def _say_exactly(self, beyond_A: Tensor | None) -> Engine:
        """Ask an exact engine about the rows that lay beyond this one; the engine that can do them all."""
        if beyond_A is None or not bool(beyond_A.any()):
            return self.engine
        engine, beyond_R = ChunkedEngine(self.engine.head), torch.nonzero(beyond_A)[:, 0]
        for part in plan_chunks(len(beyond_R), self.chunk_tokens):
            self._hear(self._through(engine, beyond_R[part], "no"), beyond_R[part])
        return engine

    def _anywhere(self, flags: Tensor) -> Tensor:
        """Flags that are up on some tp rank: what follows from them are collectives."""
        axis = self.engine.head.axis
        return flags if axis is None else all_sum(flags.int(), axis) > 0

    # ---- the engine and the loss ---------------------------------------------------------------------------------

    def _forward(self, part: slice, keep: Keep) -> _Went:
        went = self._through(self.engine, part, keep)
        self._hear(went, part)
        if went.chunk.overflowed_C is not None:
            if self._beyond_A is None:
                self._beyond_A = torch.zeros_like(self.places_A, dtype=torch.bool)
            self._beyond_A[part] = went.chunk.overflowed_C
        return went

    def _through(self, engine: Engine, some: slice | Tensor, keep: Keep) -> _Went:
        these, hidden_CD = self.rows.at(some), self.hidden_AD[some]
        wanted = frozenset(name for name in WANTED if f"{name}_T" in self.fields)
        chunk = engine.forward(hidden_CD, these.targets_A, these.temperature, wanted=wanted, keep=keep)
        if these.kept is None:
            return _Went(chunk, None)
        return _Went(chunk, kept_forward(engine.head, hidden_CD, these.targets_A, these.temperature, these.kept))

    def _hear(self, went: _Went, some: slice | Tensor) -> None:
        said = went.chunk.said
        if went.kept is not None:
            said = said._replace(kept_logprobs_T=went.kept.logprobs_C, kept_entropy_T=went.kept.entropy_C)
        for said_A, name in zip(self.said_FA, self.fields, strict=True):
            said_A[some] = getattr(said, name)

    def _send(
        self,
        went: _Went,
        wants_FC: Tensor,
        part: slice,
        into: Accumulators,
        *,
        first: bool,
        engine: Engine | None = None,
    ) -> None:
        """A chunk back through the head with its coefficients; of fields that a loss ever looked at."""
        wants = {name: want_C for name, want_C in zip(self.fields, wants_FC, strict=True) if name in self._looked_at}
        of_sets = [wants.pop(name, None) for name in OF_SETS]
        engine = engine or self.engine
        engine.backward(went.chunk, RowGradients(**wants), into, part, first=first)
        if went.kept is not None:
            kept_backward(engine.head, went.kept, *of_sets, into, part)

    def _ask(self, rows: slice, said_FC: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss of some rows and its coefficients [F, C]; everything is shown in the order of the row."""
        said_FC = self.said_FA[:, rows] if said_FC is None else said_FC
        leaves = [said_C.detach().requires_grad_() for said_C in said_FC]
        shown, places, empty = leaves, self.places_A[rows], None if self._empty_A is None else self._empty_A[rows]
        with torch.enable_grad():
            if rows == self._everything and self.ascending_A is not None:
                order = self.ascending_A
                shown, places = [leaf.index_select(0, order) for leaf in leaves], places[order]
                empty = None if empty is None else empty[order]
            said = TokenLogprobs(**dict(zip(self.fields, shown, strict=True)))
            loss = self.loss_fn(whole_where_empty(said, empty), places)
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ShapeError(
                "fused_loss: loss_fn",
                found=found,
                fix="sum over the rows",
                rule="a 0-dimensional tensor, the rows' part of the loss",
            )
        if not loss.requires_grad:
            return loss.detach(), torch.zeros_like(said_FC)
        if not self._is_pure:
            _refuse_other_leaves(loss, leaves)
            self._is_pure = True
        with torch.autograd.set_multithreading_enabled(False):  # a graph this small costs less than another thread
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        self._looked_at |= {name for name, got_C in zip(self.fields, found, strict=True) if got_C is not None}
        return loss.detach(), torch.stack(
            [torch.zeros_like(leaf) if got_C is None else got_C for leaf, got_C in zip(leaves, found, strict=True)]
        )

    def _beside(self) -> Accumulators:
        """The same gradient of hidden, with that of the head gathered apart."""
        if self._apart is None:
            weight_VD, bias_V = self.into.weight_VD, self.into.bias_V
            self._apart = Accumulators(
                self.into.hidden_TD,
                None if weight_VD is None else torch.empty_like(weight_VD),
                None if bias_V is None else torch.empty_like(bias_V),
            )
        return self._apart


class _Went(NamedTuple):
    """A chunk that went forward, and its kept sets."""

    chunk: Chunk
    kept: KeptChunk | None


def _cut(values_FC: Tensor, rows: slice, part: slice) -> Tensor:
    """Of what belongs to some rows, that of a part of them."""
    return values_FC[:, part.start - rows.start : part.stop - rows.start]


def _finite(values_FC: Tensor) -> Tensor:
    return torch.where(values_FC.isfinite(), values_FC, 0.0)


def _slack(values_FC: Tensor) -> Tensor:
    """How far two evaluations of the same coefficients may lie apart."""
    size_FC = values_FC.abs()
    return ROUNDING * torch.finfo(values_FC.dtype).eps * (size_FC + size_FC.mean(-1, keepdim=True))


def _near(one_FC: Tensor, other_FC: Tensor) -> Tensor:
    return ((one_FC - other_FC).abs() <= _slack(one_FC)).all()


def _factor(truth_FC: Tensor, trial_FC: Tensor) -> Tensor:
    """The s for which s * trial is nearest to the truth; [1], 0 where there is none."""
    truth_FC, wide_FC = truth_FC.double(), trial_FC.double()
    scale = (truth_FC * wide_FC).sum() / wide_FC.square().sum()
    return torch.where(scale.isfinite(), scale, 0.0).to(trial_FC.dtype).reshape(1)


def _refuse_other_leaves(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """A loss that reaches anything trained besides what the head said would lose that gradient without a word."""
    known, seen, waiting = {id(leaf) for leaf in leaves}, set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise SpecError(
                "fused_loss: loss_fn",
                found=f"a gradient to another tensor, {list(variable.shape)}",
                rule="a pure loss: it depends on nothing trained but what the head says",
                fix="detach it, or take token_logprobs and call backward on the loss yourself",
            )
        waiting += [function for function, _ in node.next_functions]
