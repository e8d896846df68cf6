"""A loss and its gradient in one pass over the head: three products a row, and the logits of one chunk at a time.

The gradient of a row's logits needs one number from the loss (one for each thing that the head says), so a chunk that
has gone forward can go back at once, while its logits are still there, if the loss can be asked about the chunk alone:

    forward a chunk -> ask the loss for its coefficients dloss/dlogprob -> back through the head -> next chunk

Which rows a loss must see together is its coupling, and decides how rows are cut:

    token      any rows                                                     3 products
    document   whole documents; one longer than a chunk as below            3 products
    row        everything: forward all, ask once, forward and back again    4 products, 3 if the budget keeps the chunks

A document longer than a chunk goes back with coefficients of a *trial*, its gradient of the head collected apart. When
its last chunk has said its log-probabilities the true coefficients are known. Losses on documents have one number for
each, so truth = s * trial for one s: gradients are scaled, and there was no fourth product. One that wants more (a KL
penalty of tokens beside the ratio of a document) shows it in the first chunk; then such documents go forward twice.

At the end the loss is asked once more, about the whole row. That is its value, and its gradient is the truth that every
coefficient that was used is held against: rows that got another one are computed again with the difference. So
any pure loss comes out right, also one whose coupling was not said; and what it cost is said in words.

Letters: T tokens | A rows that are computed | C rows of a chunk | V vocabulary (this rank's rows of the head)
| D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workbench.errors import SpecError
from workbench.policy.logprobs import fastest
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.driver import Rows, lifted
from workbench.policy.logprobs.engine import Accumulators, Engine, count_products
from workbench.policy.logprobs.fused_pass import Couples, GradientPass, LossOfRows, plan_rows
from workbench.policy.logprobs.head import Head, TokenLogprobs, active_rows, check_rows, make_head
from workbench.policy.logprobs.kept import KeptSets, check_kept, whole_where_empty
from workbench.policy.logprobs.late_scaling import scale_
from workbench.shapes import check_shapes
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class FusedLoss:
    """A loss whose gradient is there already.

    Attributes:
        loss: of the whole row, 0-dimensional; its backward hands out the gradients of hidden states, weight and bias.
        said: [T] what the head says about each token, without a graph; 0 on tokens that were not computed.
        products: with the head, per computed row: 1 is one pass over it, 3 is what a gradient takes.
        fallback: why it was more than 3, or None.
    """

    loss: Tensor
    said: TokenLogprobs
    products: float
    fallback: str | None


def fused_loss(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    loss_fn: LossOfRows,
    *,
    document_ids_T: Tensor | None = None,
    expected_logprobs_T: Tensor | None = None,
    couples: Literal["auto"] | Couples = "auto",
    accumulate: Literal["float32", "weight"] = "float32",
    implementation: str = "auto",
    temperature: float | Tensor = 1.0,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    active_T: Tensor | None = None,
    kept: KeptSets | None = None,
    wanted: Iterable[str] = ("entropy", "logsumexp"),
    fp32_head: bool = False,
    axis: Axis | None = None,
    first_token: int = 0,
    chunk_tokens: int = 4096,
    keep_bytes: int = 0,
) -> FusedLoss:
    """The loss of a row and its gradients, computed together in the forward pass.

    Args:
        hidden_TD: hidden states.
        weight_VD: the output head; on tp this rank's rows.
        targets_T: vocabulary ids; tokens with a negative one are not computed.
        loss_fn: any pure function of what the head says about some rows and of the rows' places in this row; its value
            is their part of the loss. It is asked about chunks, in any order, and then about all computed rows at once:
            ``lambda said, index_C: -(advantages_T[index_C] * said.logprobs_T).sum()``
        document_ids_T: any labels: what the loss must see together (documents, or preference pairs). Rows of one label
            need not lie next to each other.
        expected_logprobs_T: about what the log-probabilities will be, such as the old policy's. Only speed depends on
            it: the trial of a document longer than a chunk takes them for the tokens that are not known yet.
        couples: what the gradient of a token depends on besides itself: "token" nothing, "document" its document,
            "row" anything. "auto": document where ids are given, else token. Said wrong it costs products, no more.
        accumulate: dtype in which chunks add up the gradient of the head: float32 (float64 for float64), or "weight",
            the head's own.
        implementation: chunked, triton, or auto: triton where it can run. This and all that follow mean what they do
            at `workbench.policy.logprobs.token_logprobs`.
        temperature: divides logits; one number, or [T].
        bias_V: of the head.
        logit_scale: multiplies logits.
        soft_cap: bounds logits.
        valid: local rows of the head that exist.
        active_T: bool, the tokens that are computed.
        kept: what the sampler cut its distribution down to.
        wanted: any of entropy, logsumexp, mean_squared_logit.
        fp32_head: lift hidden states and head to float32 first.
        axis: the tensor-parallel axis.
        first_token: vocabulary id of the first local row.
        chunk_tokens: rows whose logits exist at a time.
        keep_bytes: how much may be kept of a document, or a row, that is longer than a chunk.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T] -> loss [], said [T].
    Units:    nats.
    Backward: the stored gradients times what arrives, once. hidden: summed over tp, once; weight and bias: local.
    Raises:   ShapeError: sizes disagree, or loss_fn gives something else than one number.
              SpecError: a setting that does not exist, a loss_fn that is not pure, a second backward.
    Source:   gradient in the forward pass, for cross entropy: Liger Kernel, arXiv 2410.10989.
    """
    _check(couples, accumulate, chunk_tokens, keep_bytes)
    check_shapes(
        "fused_loss", targets_T=targets_T, document_ids_T=document_ids_T, expected_logprobs_T=expected_logprobs_T
    )
    hidden, weight, bias = (None if value is None else value.detach() for value in (hidden_TD, weight_VD, bias_V))
    if fp32_head:
        hidden, weight = lifted(hidden), lifted(weight)
    head = make_head(
        weight, bias_V=bias, logit_scale=logit_scale, soft_cap=soft_cap, valid=valid, axis=axis, first_token=first_token
    )
    if couples == "auto":
        couples = "token" if document_ids_T is None else "document"
    cut = couples == "document" and document_ids_T is not None
    ids_T, computed_T = _queued_for_host(document_ids_T if cut else None, targets_T, active_T)
    count = check_rows(head, hidden, targets_T, temperature=temperature, active_T=active_T, wanted=wanted)
    rows = Rows(targets_T, temperature, kept)
    if kept is not None:
        check_kept(kept, targets_T, head)
    plan = plan_rows(count, chunk_tokens, couples, None if ids_T is None else ids_T[computed_T])
    places_A, everywhere = active_rows(targets_T, active_T, count), plan.order_A is None
    everywhere &= places_A is None
    if places_A is None:
        places_A = torch.arange(count, device=targets_T.device)
    if plan.order_A is not None:
        places_A = places_A[plan.order_A.to(places_A.device)]
    if not everywhere:
        rows, hidden = rows.at(places_A), hidden.index_select(0, places_A)
    needs = [
        torch.is_grad_enabled() and value is not None and value.requires_grad
        for value in (hidden_TD, weight_VD, bias_V)
    ]
    gathered = head.wide if accumulate == "float32" else weight.dtype
    into = (
        Accumulators(
            torch.empty_like(hidden) if needs[0] else None,
            torch.empty_like(weight, dtype=gathered) if needs[1] else None,
            torch.empty_like(bias, dtype=head.wide) if needs[2] else None,
        )
        if any(needs)
        else None
    )
    there = GradientPass(
        _engine(implementation, weight)(head),
        loss_fn,
        hidden.contiguous(),
        rows,
        places_A,
        None if plan.order_A is None else torch.argsort(places_A),
        None if expected_logprobs_T is None else expected_logprobs_T.detach()[places_A],
        couples,
        chunk_tokens,
        keep_bytes,
        _fields(wanted, kept),
        into,
    )
    with torch.no_grad(), count_products(this_thread=True) as count:
        loss = there.run(plan.groups)
        if into is not None and into.hidden_TD is not None and axis is not None:
            into.hidden_TD = all_sum(into.hidden_TD, axis)
        said = _everywhere(there, len(targets_T))
    if into is not None:
        loss = _Stored.apply(hidden_TD, weight_VD, bias_V, loss, _Gradients(into, None if everywhere else places_A))
    return FusedLoss(loss, said, count.rows / max(1, len(places_A)), "; ".join(there.words) or None)


def _check(couples: str, accumulate: str, chunk_tokens: int, keep_bytes: int) -> None:
    known = {"couples": (couples, ("auto", *get_args(Couples))), "accumulate": (accumulate, ("float32", "weight"))}
    for name, (value, allowed) in known.items():
        if value not in allowed:
            raise SpecError(
                f"fused_loss: {name} = {value!r}", rule=f"one of {', '.join(allowed)}", fix="take one of these"
            )
    if chunk_tokens < 1 or keep_bytes < 0:
        raise SpecError(
            f"fused_loss: chunk_tokens = {chunk_tokens}, keep_bytes = {keep_bytes}",
            rule="a chunk has at least one row, and a budget is not negative",
            fix="leave them at 4096 and 0",
        )


def _queued_for_host(ids_T: Tensor | None, targets_T: Tensor, active_T: Tensor | None) -> tuple[Tensor | None, ...]:
    """Labels, and which rows are computed, on their way to the host: there once the device is waited for."""
    if ids_T is None:
        return None, None
    both_T = [ids_T, targets_T >= 0 if active_T is None else (targets_T >= 0) & active_T]
    if not ids_T.is_cuda:
        return tuple(both_T)
    return tuple(torch.empty_like(x_T, device="cpu", pin_memory=True).copy_(x_T, non_blocking=True) for x_T in both_T)


def _fields(wanted: Iterable[str], kept: KeptSets | None) -> tuple[str, ...]:
    """Of `TokenLogprobs`, those that are said."""
    names = ["logprobs", *dict.fromkeys(wanted)]
    if kept is not None:
        names += ["kept_logprobs", "kept_entropy"] if "entropy" in names else ["kept_logprobs"]
    return tuple(f"{name}_T" for name in names)


def _everywhere(there: GradientPass, tokens: int) -> TokenLogprobs:
    """What the head says, 0 where it was not asked."""
    sets = there.rows.kept
    said = whole_where_empty(
        TokenLogprobs(**dict(zip(there.fields, there.said_FA, strict=True))),
        None if sets is None else sets.are_whole(there.places_A.device),
    )
    return TokenLogprobs(
        *(
            None if said_A is None else said_A.new_zeros(tokens).index_copy_(0, there.places_A, said_A)
            for said_A in said
        )
    )


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
        fix="use auto; the others have no chunks to go back from",
    )


@dataclass
class _Gradients:
    """What a pass left behind, until somebody fetches it.

    Attributes:
        found: of computed rows, weight and bias; None once fetched.
        places_A: where the computed rows lie; None: they are all.
    """

    found: Accumulators | None
    places_A: Tensor | None

    def fetch(self) -> Accumulators:
        """The gradients, once."""
        found, self.found = self.found, None
        if found is None:
            raise SpecError(
                "backward of fused_loss, a second time",
                found="gradients that were handed out already",
                rule="they are computed once, in the forward pass, and kept for one backward",
                fix="add up losses before one backward, or call fused_loss again",
            )
        return found


class _Stored(Function):
    """A loss that has its gradients with it."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, loss: Tensor, gradients: _Gradients
    ) -> Tensor:
        ctx.gradients, ctx.tokens = gradients, len(hidden_TD)
        ctx.dtypes = [None if value is None else value.dtype for value in (hidden_TD, weight_VD, bias_V)]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        found, places_A = ctx.gradients.fetch(), ctx.gradients.places_A
        hidden_AD, weight_VD, bias_V = (
            None if value is None else _times(value, cotangent, dtype)
            for value, dtype in zip((found.hidden_TD, found.weight_VD, found.bias_V), ctx.dtypes, strict=True)
        )
        if hidden_AD is not None and places_A is not None:
            hidden_AD = hidden_AD.new_zeros(ctx.tokens, hidden_AD.shape[1]).index_copy_(0, places_A, hidden_AD)
        return hidden_AD, weight_VD, bias_V, None, None


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient times a number of the device, in another dtype: read once and written once, or left as it is."""
    if gradient.dtype == dtype:
        return scale_(gradient, factor)
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))
