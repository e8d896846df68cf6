"""A loss and its gradient in one pass over the head: three GEMMs per row, and the logits of one chunk at a time.

The gradient of a row's logits needs one coefficient from the loss (one for each head output), so a chunk can go
backward right after its forward, while its logits are still there, if the loss can be evaluated on the chunk alone:

    forward a chunk -> evaluate the loss for its coefficients dloss/dlogprob -> backward through the head -> next chunk

The coupling of a loss, the rows that it must see together, decides how rows are chunked:

    token      any rows                                                     3 GEMMs
    document   whole documents; one longer than a chunk as below            3 GEMMs
    row        everything: forward all, one loss, forward and backward      4 GEMMs, 3 if the budget saves the chunks

A document longer than a chunk goes backward with *trial* coefficients, its gradient of the head accumulated separately.
Losses on documents have one factor per document, so truth = s * trial for one s, once all of it is known: gradients are
scaled, without a fourth GEMM. A loss that needs more (a per-token KL penalty next to the ratio of a document) is
detected in the first chunk; then such documents go forward twice.

At the end the loss is evaluated on the whole row: that is its value, and rows with another coefficient than was used
are recomputed with the difference. So any pure loss gets the right gradient, also if its coupling was not declared.

Letters: T tokens | A rows that are computed | C rows of a chunk | V vocabulary (this rank's rows of the head)
| D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workbench.errors import SpecError
from workbench.policy.logprobs import fastest
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.coefficients import RowLoss, scale_
from workbench.policy.logprobs.driver import Rows
from workbench.policy.logprobs.engine import (
    Accumulators,
    Couples,
    Engine,
    check_budgets,
    count_gemms,
    default_chunk,
    plan_rows,
)
from workbench.policy.logprobs.fused_pass import GradientPass
from workbench.policy.logprobs.head import (
    Head,
    TokenLogprobs,
    active_rows,
    check_expected_rows,
    computed_rows,
    make_head,
    queue_row_checks,
    upcast,
)
from workbench.policy.logprobs.host import HostCopy
from workbench.policy.logprobs.row_outputs import RowOutputs
from workbench.policy.logprobs.truncated_support import TruncatedSupport, check_support
from workbench.shapes import check_shapes
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class FusedLoss:
    """A loss whose gradient is already computed.

    Attributes:
        loss: of the whole row, 0-dimensional; its backward returns the gradients of hidden states, weight and bias.
        head_output: [T] head outputs, without a graph; 0 on tokens that were not computed.
        gemms: GEMMs with the head per computed row: 1 is one forward, 3 is forward and gradients.
        fallback: reason for more than 3, or None.
    """

    loss: Tensor
    head_output: TokenLogprobs
    gemms: float
    fallback: str | None


def fused_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    loss_fn: RowLoss,
    *,
    document_ids_T: Tensor | None = None,
    expected_logprobs_T: Tensor | None = None,
    expected_rows: int | None = None,
    couples: Literal["auto"] | Couples = "auto",
    accumulate: Literal["float32", "weight"] = "float32",
    implementation: str = "auto",
    temperature: float | Tensor = 1.0,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    active_T: Tensor | None = None,
    support: TruncatedSupport | None = None,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    fp32_head: bool = False,
    axis: Axis | None = None,
    first_token: int = 0,
    chunk_tokens: int | None = None,
    keep_bytes: int = 0,
) -> FusedLoss:
    """Compute the loss of a row and its gradients together in the forward pass.

    Arguments beside those of `workbench.policy.logprobs.token_logprobs`:
        loss_fn: any pure function of the head outputs of some rows and the indices of these rows in this row; its value
            is their part of the loss. It is called on chunks, in any order, and then on all computed rows at once:
            ``lambda output, index_C: -(advantages_T[index_C] * output.logprobs_T).sum()``
        document_ids_T: any labels of rows that the loss must see together (documents, or preference pairs). Rows of one
            label need not be contiguous.
        expected_logprobs_T: estimates of the log-probabilities, such as the old policy's. Only speed depends on them:
            the trial of a document longer than a chunk uses them for the tokens that are not known yet.
        expected_rows: number of tokens that are computed, if the caller knows it: the host then does not wait for a
            copy of the targets to count them. Only speed depends on it: a wrong number costs a second pass. The host
            needs labels of documents anyway, and waits for them.
        couples: rows that the gradient of a token depends on: "token" only its own, "document" those of its document,
            "row" all. "auto": document if ids are given, else token. A wrong value costs GEMMs, nothing else.
        accumulate: dtype in which chunks accumulate the gradient of the head: float32 (float64 for float64), or
            "weight", the head's own.
        implementation: chunked, triton, or auto: triton where it can run.
        keep_bytes: how much may be saved of a document, or a row, that is longer than a chunk.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T] -> loss [], head output [T].
    Units:    nats.
    Backward: the stored gradients times the incoming one, once. hidden: summed over tp, once; weight and bias: local.
    Raises:   ShapeError: sizes disagree, or loss_fn does not return a 0-dimensional tensor.
              SpecError: an unknown setting, a loss_fn that is not pure, a second backward.
    Source:   gradient in the forward pass, for cross entropy: Liger Kernel, arXiv 2410.10989.
    """
    outputs = tuple(outputs)  # read more than once
    _check(couples, accumulate)
    check_budgets("fused_loss", chunk_tokens, keep_bytes)
    check_shapes(
        "fused_loss", targets_T=targets_T, document_ids_T=document_ids_T, expected_logprobs_T=expected_logprobs_T
    )
    hidden, weight, bias = hidden_TD.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach()
    if fp32_head:
        hidden, weight = upcast(hidden), upcast(weight)
    head = make_head(
        weight, bias_V=bias, logit_scale=logit_scale, soft_cap=soft_cap, valid=valid, axis=axis, first_token=first_token
    )
    if couples == "auto":
        couples = "token" if document_ids_T is None else "document"
    labels = None
    if couples == "document" and document_ids_T is not None:
        labels = HostCopy(document_ids_T, computed_rows(targets_T, active_T))
    counted = queue_row_checks(head, hidden, targets_T, temperature=temperature, active_T=active_T, outputs=outputs)
    check_expected_rows("fused_loss", expected_rows, targets_T)
    if support is not None:
        check_support(support, targets_T, head)
    call = _Call(
        _engine(implementation, weight)(head),
        loss_fn,
        Rows(targets_T, temperature, support),
        active_T,
        labels,
        None if expected_logprobs_T is None else expected_logprobs_T.detach(),
        couples,
        chunk_tokens,
        keep_bytes,
        _fields(outputs, support),
        (hidden_TD, weight_VD, bias_V),
        (hidden, weight, bias),
        (hidden.dtype, head.wide if accumulate == "float32" else weight.dtype, head.wide),
    )
    if labels is not None or expected_rows is None:
        return call.run(counted())
    result = call.run(expected_rows)
    if (count := counted()) == expected_rows:
        return result
    wasted = result.gemms * expected_rows / max(1, count)
    del result  # with its gradients
    again = call.run(count)
    twice = f"{count} tokens are computed, but {expected_rows} were expected: everything was computed again"
    return replace(again, gemms=again.gemms + wasted, fallback="; ".join(filter(None, [twice, again.fallback])))


@dataclass(frozen=True)
class _Call:
    """Checked arguments of one call.

    Attributes:
        rows, active_T, expected_T: of all T tokens.
        labels: document labels, and the tokens that are computed, on their way to the host; None: no documents.
        fields: requested fields of `TokenLogprobs`.
        leaves: hidden states, weight and bias of the caller.
        values: the same in the dtype of the GEMMs, without a graph.
        sum_dtypes: of their gradients.
    """

    engine: Engine
    loss_fn: RowLoss
    rows: Rows
    active_T: Tensor | None
    labels: HostCopy | None
    expected_T: Tensor | None
    couples: Couples
    chunk_tokens: int | None
    keep_bytes: int
    fields: tuple[str, ...]
    leaves: tuple[Tensor, Tensor, Tensor | None]
    values: tuple[Tensor, Tensor, Tensor | None]
    sum_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]

    def run(self, count: int) -> FusedLoss:
        """Compute the loss and its gradients, of a number of computed rows."""
        rows, (hidden, weight, bias), tokens = self.rows, self.values, len(self.rows)
        units_A = None
        if self.labels is not None:
            ids_T, computed_T = self.labels.wait()
            units_A = ids_T[computed_T]
        # documents do not end where chunks of equal length do
        even = None if self.couples == "document" else count
        chunk_tokens = self.chunk_tokens or default_chunk(self.engine.head, even)
        plan = plan_rows(count, chunk_tokens, self.couples, units_A)
        places_A = active_rows(rows.targets_A, self.active_T, count)
        all_in_order = plan.order_A is None and places_A is None
        if places_A is None:
            places_A = torch.arange(count, device=hidden.device)
        if plan.order_A is not None:
            places_A = places_A[plan.order_A.to(places_A.device)]
        if not all_in_order:
            rows, hidden = rows.at(places_A), hidden.index_select(0, places_A)
        sums = [
            None if value is None or leaf is None or not leaf.requires_grad else torch.empty_like(value, dtype=dtype)
            for leaf, value, dtype in zip(self.leaves, (hidden, weight, bias), self.sum_dtypes, strict=True)
            if torch.is_grad_enabled()
        ]
        into = None if all(gradient is None for gradient in sums) else Accumulators(*sums)
        outputs = RowOutputs(
            self.loss_fn,
            self.fields,
            places_A,
            None if plan.order_A is None else torch.argsort(places_A),
            None if self.expected_T is None else self.expected_T[places_A],
            None if rows.support is None else rows.support.untruncated(hidden.device),
            self.engine.head.wide,
        )
        gradient_pass = GradientPass(
            self.engine, outputs, hidden.contiguous(), rows, self.couples, chunk_tokens, self.keep_bytes, into
        )
        axis = self.engine.head.axis
        with torch.no_grad(), count_gemms(this_thread=True) as gemms:
            loss = gradient_pass.run(plan.groups)
            if into is not None and into.hidden_TD is not None and axis is not None:
                into.hidden_TD = all_sum(into.hidden_TD, axis)
            head_output = outputs.head_output()
            if not all_in_order:
                head_output = head_output.map(lambda x_A: x_A.new_zeros(tokens).index_copy_(0, places_A, x_A))
        if into is not None:
            loss = _Stored.apply(*self.leaves, loss, _Gradients(into, None if all_in_order else places_A))
        else:
            loss = loss.clone()  # see `_Stored.forward`
        fallback = "; ".join(gradient_pass.fallbacks) or None
        return FusedLoss(loss, head_output, gemms.rows / max(1, len(places_A)), fallback)


def _check(couples: str, accumulate: str) -> None:
    known = ("couples", couples, ("auto", *get_args(Couples))), ("accumulate", accumulate, ("float32", "weight"))
    for name, value, allowed in known:
        if value not in allowed:
            rule = f"one of {', '.join(allowed)}"
            raise SpecError(f"fused_loss: {name} = {value!r}", rule=rule, fix="use one of these")


def _fields(requested: Iterable[str], support: TruncatedSupport | None) -> tuple[str, ...]:
    """Requested fields of `TokenLogprobs`."""
    names = ["logprobs", *dict.fromkeys(requested)]
    if support is not None:
        names += ["support_logprobs", "support_entropy"] if "entropy" in names else ["support_logprobs"]
    return tuple(f"{name}_T" for name in names)


def _engine(implementation: str, weight_VD: Tensor) -> Callable[[Head], Engine]:
    if implementation == "auto":
        implementation = fastest(weight_VD.dtype, weight_VD.device)
    if implementation == "chunked":
        return ChunkedEngine
    if implementation == "triton":
        from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine

        return ExpEpilogueEngine
    raise SpecError(
        f"fused_loss: implementation = {implementation!r}",
        rule="one of auto, chunked, triton",
        fix="use auto; the other implementations do not work in chunks",
    )


@dataclass
class _Gradients:
    """Gradients of a pass, stored until backward fetches them, and the indices of its rows; None: all rows."""

    stored: Accumulators | None
    places_A: Tensor | None

    def fetch(self) -> Accumulators:
        """Return the gradients, once."""
        gradients, self.stored = self.stored, None
        if gradients is None:
            raise SpecError(
                "backward of fused_loss, a second time",
                found="gradients that were returned already",
                rule="they are computed once, in the forward pass, and stored for one backward",
                fix="add up losses before one backward, or call fused_loss again",
            )
        return gradients


class _Stored(Function):
    """A loss with precomputed gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, loss: Tensor, gradients: _Gradients
    ) -> Tensor:
        ctx.gradients, ctx.tokens = gradients, len(hidden_TD)
        ctx.dtypes = [None if value is None else value.dtype for value in (hidden_TD, weight_VD, bias_V)]
        # The caller's own to change in place: as it is, it would be a view, and may be a head output of a lone token.
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        stored, places_A = ctx.gradients.fetch(), ctx.gradients.places_A
        hidden_AD, weight_VD, bias_V = (
            None if value is None else _times(value, cotangent, dtype)
            for value, dtype in zip((stored.hidden_TD, stored.weight_VD, stored.bias_V), ctx.dtypes, strict=True)
        )
        if hidden_AD is not None and places_A is not None:
            hidden_AD = hidden_AD.new_zeros(ctx.tokens, hidden_AD.shape[1]).index_copy_(0, places_A, hidden_AD)
        return hidden_AD, weight_VD, bias_V, None, None


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a gradient by a device scalar and cast it: read once and written once, or returned unchanged."""
    if gradient.dtype == dtype:
        return scale_(gradient, factor)
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
