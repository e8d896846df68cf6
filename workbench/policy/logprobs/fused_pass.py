"""One pass over the head that computes a loss and its gradients: the implementation of `fused_loss`.

    plan     group rows by coupling                                         `engine.plan_rows`
    back     each group forward, evaluate the loss, and backward            `GradientPass.run`
    settle   evaluate the loss of the whole row, and correct gradients

Between the first GEMM and the last the host waits for the device only at the first document that is longer than a
chunk, and, with the last group's backward queued, to learn which rows to correct; once more if some were out of the
engine's range. So the device has work until the pass returns, and what comes after it can be queued in time.

Letters: A rows that are computed, group by group | C rows of a chunk | F requested fields of `TokenLogprobs`
| N documents.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.policy.logprobs import truncated_support
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.coefficients import (
    add_scaled_,
    common_factor,
    finite_or_zero,
    on_any_rank,
    scale_,
    slack,
)
from workbench.policy.logprobs.driver import Rows
from workbench.policy.logprobs.engine import Accumulators, Chunk, Couples, Engine, Keep, RowGradients, plan_chunks
from workbench.policy.logprobs.head import OUTPUTS
from workbench.policy.logprobs.host import HostCopy
from workbench.policy.logprobs.row_outputs import RowOutputs
from workbench.policy.logprobs.trial import Trials
from workbench.policy.logprobs.truncated_support import SUPPORT_FIELDS, SupportChunk
from workbench.sharding.collectives import all_max


@dataclass
class GradientPass:
    """One pass and its state.

    Attributes:
        outputs: head outputs of the rows, and their loss.
        hidden_AD, rows: inputs of the rows, in the order of the plan.
        chunk_tokens, keep_bytes: see `fused_loss`.
        into: gradient accumulators, uninitialized; None: not required.
        fallbacks: reasons for more than three GEMMs.
    """

    engine: Engine
    outputs: RowOutputs
    hidden_AD: Tensor
    rows: Rows
    couples: Couples
    chunk_tokens: int
    keep_bytes: int
    into: Accumulators | None
    fallbacks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._everything = self.outputs.everything
        self._trials = Trials(self.outputs, self.engine.head.axis)
        self._overflowed_A: Tensor | None = None
        self._late: list[slice] = []
        self._begun = False

    @cached_property
    def _used_FA(self) -> Tensor:
        """The coefficients used in backward."""
        return self.hidden_AD.new_zeros(len(self.outputs.fields), len(self.rows), dtype=self.outputs.dtype)

    def run(self, groups: list[list[slice]]) -> Tensor:
        """Run forward, and backward if gradients are required; return the loss of all rows, without a graph."""
        if self.into is None:
            for part in itertools.chain(*groups):
                self._forward(part, "no")
            self._recompute_exactly(self._overflowed_A)
            return self.outputs.loss(self._everything)[0]
        if not groups:
            self.into.clear_head_()
            return self.outputs.loss(self._everything)[0]
        *earlier, last = groups
        alone = not earlier
        for group in earlier:
            self._back(group)
        if self._is_kept(last):
            return self._back_last(last, alone)
        own = self._back(last, alone)
        loss, truth_FA = own if alone else self.outputs.loss(self._everything)
        final = alone and not self._late
        if final and self._overflowed_A is None:
            return loss
        return self._settle(loss, truth_FA, self._flags(truth_FA, final), final)

    # ---- forward and backward of a group -------------------------------------------------------------------------

    def _is_kept(self, group: list[slice]) -> bool:
        """True if all chunks of a group may be saved until its loss is known; the same on every tp rank."""
        return len(group) == 1 or self._may_keep(group[-1].stop - group[0].start)

    def _kept(self, group: list[slice]) -> list[_Forward]:
        return [self._forward(part, "scratch" if len(group) == 1 else "own") for part in group]

    def _back_last(self, group: list[slice], alone: bool) -> Tensor:
        """Run the last group, whose chunks may be saved, forward and backward; return the loss of all rows.

        With its outputs those of all rows are known: the loss of the whole row gives the coefficients, and tells which
        rows to correct while the device has this group's backward to do.
        """
        rows, forwards = slice(group[0].start, group[-1].stop), self._kept(group)
        loss, truth_FA = self.outputs.loss(self._everything)
        self._use(truth_FA[:, rows], rows, alone)
        flags = None if alone and self._overflowed_A is None else self._flags(truth_FA, alone)
        self._back_parts(group, forwards)
        return loss if flags is None else self._settle(loss, truth_FA, flags, alone)

    def _back(self, group: list[slice], alone: bool = False) -> tuple[Tensor, Tensor]:
        """Run one group forward and backward; return its loss and coefficients."""
        rows = slice(group[0].start, group[-1].stop)
        if self._is_kept(group):
            return self._back_at_once(group, rows, alone, self._kept(group))
        size = f"{rows.stop - rows.start} tokens, more than {self.chunk_tokens}, went forward twice"
        if self.couples == "row":
            for part in group:
                self._forward(part, "no")
            self.fallbacks.append(f"all {size}: the loss couples the whole row")
            return self._back_at_once(group, rows, alone)
        first = self._forward(group[0], "scratch")
        rest = self._trials.rest_effect(rows, group[0])
        if rest == "more":
            for part in group[1:]:
                self._forward(part, "no")
            self.fallbacks.append(
                f"a document of {size}: its coefficients are not one factor times known values per token"
            )
            return self._back_at_once(group, rows, alone)
        self._late.append(rows)
        if rest in ("factor", "data"):
            return self._back_late(group, rows, first)
        for part in group:
            self._back_at_once([part], part, False, [first if part is group[0] else self._forward(part, "scratch")])
        return self.outputs.loss(rows)

    def _may_keep(self, rows: int) -> bool:
        """True if this many rows fit the budget on every tp rank."""
        if not self.keep_bytes:
            return False
        head, needed = self.engine.head, self.engine.saved_bytes(rows)
        if head.axis is not None and head.is_split:
            needed = int(all_max(torch.tensor(needed, device=head.weight_VD.device), head.axis))
        return needed <= self.keep_bytes

    def _back_at_once(
        self, group: list[slice], rows: slice, alone: bool, forwards: list[_Forward] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Backward of rows whose outputs are all known; chunks that were not saved go forward again."""
        loss, truth_FC = self.outputs.loss(rows)
        self._use(truth_FC, rows, alone)
        self._back_parts(group, forwards)
        return loss, truth_FC

    def _use(self, truth_FC: Tensor, rows: slice, alone: bool) -> None:
        """Choose the coefficients of rows; those of all rows at once (``alone``) are final but for overflowed rows.

        One that is not finite would spoil every gradient. If it is correct, settling adds it later.
        """
        if alone:
            self._used_FA = truth_FC
        else:
            finite_or_zero(truth_FC, out=self._used_FA[:, rows])

    def _back_parts(self, group: list[slice], forwards: list[_Forward] | None) -> None:
        """Backward of chunks with their coefficients in `_used_FA`."""
        for number, part in enumerate(group):
            forward = self._forward(part, "scratch") if forwards is None else forwards[number]
            self._back_chunk(forward, self._used_FA[:, part], part, self._sums, first=not self._begun)
            self._begun = True

    def _back_late(self, group: list[slice], rows: slice, first: _Forward) -> tuple[Tensor, Tensor]:
        """Backward of a document longer than a chunk: trial coefficients, scaled once its last chunk is known."""
        direct = not self._begun  # the accumulators hold nothing yet that must not be scaled
        total = self._sums
        into = total if direct else self._separate_into
        self._begun = True
        for part in group:
            forward = first if part is group[0] else self._forward(part, "scratch")
            trial_FC = self._trials.take(rows, part)
            self._back_chunk(forward, trial_FC, part, into, first=part is group[0])
            self._used_FA[:, part] = trial_FC
        loss, truth_FC = self.outputs.loss(rows)
        scale = common_factor(truth_FC, self._used_FA[:, rows])
        self._used_FA[:, rows] *= scale
        if into.hidden_TD is not None:
            scale_(into.hidden_TD[rows], scale)
        for partial, sums in ((into.weight_VD, total.weight_VD), (into.bias_V, total.bias_V)):
            if partial is not None and direct:
                scale_(partial, scale)
            elif partial is not None and sums is not None:
                add_scaled_(sums, partial, scale)
        return loss, truth_FC

    # ---- the whole row -------------------------------------------------------------------------------------------

    def _flags(self, truth_FA: Tensor, final: bool) -> HostCopy:
        """[A] bool each: rows whose coefficient differs from that of the whole row, and rows beyond the engine.

        The first is left out if the coefficients are those of the whole row (``final``), the second if the engine has
        no such rows. Coefficients of a loss of tokens are equal in any chunk, bit for bit: rounding is allowed for if
        some are not.
        """
        wrong: tuple[Tensor, ...] = ()
        if not final:
            exact = self.couples == "token"
            wrong = (self._on_any_rank((truth_FA != self._used_FA).any(0)) if exact else self._differs(truth_FA),)
        return HostCopy(*wrong, *(() if self._overflowed_A is None else (self._overflowed_A,)))

    def _settle(self, loss: Tensor, truth_FA: Tensor, flags: HostCopy, final: bool) -> Tensor:
        """Correct the rows whose coefficient differs from that of the whole row; return the loss."""
        engine, flagged = self.engine, flags.wait()
        beyond = 0 if self._overflowed_A is None else int(flagged[-1].sum())
        if beyond:
            engine = self._recompute_exactly(self._overflowed_A)
            loss, truth_FA = self.outputs.loss(self._everything)
            spoilt = final and bool(self._on_any_rank(~self._used_FA.isfinite()).any())
            if spoilt:
                self._used_FA = finite_or_zero(truth_FA)
            for used_A, name in zip(self._used_FA, self.outputs.fields, strict=True):
                if name not in SUPPORT_FIELDS:
                    used_A.masked_fill_(self._overflowed_A, 0)  # the engine gives these no gradient
            if spoilt:
                self._back_again()
            wrong_A = self._differs(truth_FA, exact_A=self._overflowed_A).cpu()
        elif final:
            return loss
        else:
            wrong_A = flagged[0]
            if self.couples == "token" and bool(wrong_A.any()):
                wrong_A = self._differs(truth_FA).cpu()
        wrong = int(wrong_A.sum())
        if not wrong:
            if beyond:
                self.fallbacks.append(f"{beyond} tokens beyond the exponents of the engine were computed again")
            return loss
        late = sum(int(wrong_A[rows].sum()) for rows in self._late)
        if beyond:
            self.fallbacks.append(
                f"{wrong} tokens were recomputed: {beyond} beyond the exponents of the engine, and "
                "those that the loss couples to them"
            )
        elif late:
            self.fallbacks.append(
                f"{late} tokens of documents longer than {self.chunk_tokens} were recomputed: "
                "their coefficients are not one factor times the trial's"
            )
        if wrong > late and not beyond:
            across = "documents" if self.couples == "document" else "tokens"
            self.fallbacks.append(
                f"{wrong - late} tokens were recomputed: the loss looks across {across}, and their "
                "coefficients in the whole row differ from those in their chunk"
            )
        self._correct(engine, torch.nonzero(wrong_A)[:, 0].to(self.outputs.places_A.device), truth_FA - self._used_FA)
        return loss

    def _back_again(self) -> None:
        """Run all rows that the engine can represent backward once more: a row beyond it made a coefficient NaN."""
        self.fallbacks.append("all tokens went back again: coefficients were not finite before those beyond the engine")
        for number, part in enumerate(plan_chunks(len(self.rows), self.chunk_tokens)):
            forward = self._run_engine(self.engine, part, "scratch")
            self._back_chunk(forward, self._used_FA[:, part], part, self._sums, first=not number)

    def _differs(self, truth_FA: Tensor, exact_A: Tensor | None = None) -> Tensor:
        """[A] bool: True if a row was sent back with a wrong coefficient; the same on every tp rank.

        Rows that were not sent back at all (``exact_A``) have no rounding: theirs is wrong if it is not 0.
        """
        allowed_FA = slack(finite_or_zero(truth_FA))  # an infinite one would allow every other any difference
        if exact_A is not None:
            allowed_FA.masked_fill_(exact_A, 0)
        return self._on_any_rank(~((truth_FA - self._used_FA).abs() <= allowed_FA).all(0))

    def _correct(self, engine: Engine, wrong_R: Tensor, missing_FA: Tensor) -> None:
        """Add the missing part to the gradients of some rows."""
        total = self._sums
        for part in plan_chunks(len(wrong_R), self.chunk_tokens):
            some = wrong_R[part]
            forward = self._run_engine(engine, some, "scratch")
            hidden_CD = None if total.hidden_TD is None else torch.empty_like(forward.chunk.hidden_CD)
            into = Accumulators(hidden_CD, total.weight_VD, total.bias_V)
            self._back_chunk(forward, missing_FA[:, some], slice(0, len(some)), into, first=False, engine=engine)
            if hidden_CD is not None and total.hidden_TD is not None:
                total.hidden_TD.index_add_(0, some, hidden_CD)

    def _recompute_exactly(self, beyond_A: Tensor | None) -> Engine:
        """Recompute overflowed rows on an exact engine; return the engine that can represent all rows."""
        if beyond_A is None or not bool(beyond_A.any()):
            return self.engine
        engine, beyond_R = ChunkedEngine(self.engine.head), torch.nonzero(beyond_A)[:, 0]
        for part in plan_chunks(len(beyond_R), self.chunk_tokens):
            self._record(self._run_engine(engine, beyond_R[part], "no"), beyond_R[part])
        return engine

    def _on_any_rank(self, flags: Tensor) -> Tensor:
        return on_any_rank(flags, self.engine.head.axis)

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _forward(self, part: slice, keep: Keep) -> _Forward:
        forward = self._run_engine(self.engine, part, keep)
        self._record(forward, part)
        if (beyond_C := forward.chunk.overflowed_C) is not None:
            if part == self._everything:
                self._overflowed_A = beyond_C
                return forward
            if self._overflowed_A is None:
                self._overflowed_A = torch.zeros_like(self.outputs.places_A, dtype=torch.bool)
            self._overflowed_A[part] = beyond_C
        return forward

    def _run_engine(self, engine: Engine, some: slice | Tensor, keep: Keep) -> _Forward:
        these, hidden_CD = self.rows.at(some), self.hidden_AD[some]
        requested = frozenset(name for name in OUTPUTS if f"{name}_T" in self.outputs.fields)
        chunk = engine.forward(hidden_CD, these.targets_A, these.temperature, outputs=requested, keep=keep)
        return _Forward(chunk, these.kept_forward(engine.head, hidden_CD))

    def _record(self, forward: _Forward, some: slice | Tensor) -> None:
        output = forward.chunk.head_output
        if forward.support is not None:
            output = output._replace(
                support_logprobs_T=forward.support.logprobs_C, support_entropy_T=forward.support.entropy_C
            )
        self.outputs.record(output, some)

    def _back_chunk(
        self,
        forward: _Forward,
        gradient_FC: Tensor,
        part: slice,
        into: Accumulators,
        *,
        first: bool,
        engine: Engine | None = None,
    ) -> None:
        """Run a chunk backward through the head with its coefficients, for the fields that the loss has used."""
        fields, used = self.outputs.fields, self.outputs.used_fields
        by_field = {name: g_C for name, g_C in zip(fields, gradient_FC, strict=True) if name in used}
        logprobs_C, entropy_C = (by_field.pop(name, None) for name in SUPPORT_FIELDS)
        engine = engine or self.engine
        engine.backward(forward.chunk, RowGradients(**by_field), into, part, first=first)
        if forward.support is not None:
            truncated_support.backward(engine.head, forward.support, logprobs_C, entropy_C, into, part)

    @property
    def _sums(self) -> Accumulators:
        assert self.into is not None, "without accumulators, `run` does not go backward"
        return self.into

    @cached_property
    def _separate_into(self) -> Accumulators:
        """Accumulators with the same gradient of hidden, and separate ones for weight and bias."""
        head = (self._sums.weight_VD, self._sums.bias_V)
        return Accumulators(self._sums.hidden_TD, *(None if sums is None else torch.empty_like(sums) for sums in head))


class _Forward(NamedTuple):
    """A chunk after its forward pass, and its truncated supports."""

    chunk: Chunk
    support: SupportChunk | None
