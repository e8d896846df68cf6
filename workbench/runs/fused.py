"""Loss and gradient of a row in one pass over the head, for `workbench.runs.step`.

`workbench.policy.logprobs.fused_loss` asks about chunks of a row, so the row is cut here as it asks: data, weights and
sums over documents of the tokens of a chunk, through the same evaluation as a whole row. What the loss must see
together is found out by listening to it:

    asks for no sums               any tokens                                                           3 products
    asks for sums over documents   documents (pairs: groups); straddling cp ranks they need all ranks   3, with cp 4
    looks across documents         the row: surrogates clip_cov and kl_cov, which select by a statistic
                                   of all tokens of a row, and corrections with population micro_batch  4

Three products always where a row fits into a chunk, or `PolicySpec.keep_bytes` holds it. A loss whose coupling nobody
knows comes out right all the same: see `fused_loss`.

Letters: T packed tokens | C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.losses.spec import LossSpec
from workbench.policy.logprobs import TokenLogprobs, fastest
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.policy.model import Policy
from workbench.reduction.evaluate import Evaluated

if TYPE_CHECKING:
    from workbench.runs.step import LocalRow


Evaluate = Callable[["LocalRow", TokenLogprobs, Tensor | None], Evaluated]
"""Some tokens, what the head says about them, clip decisions taken elsewhere -> the loss on them."""


def fused_row(policy: Policy, hidden_TD: Tensor, local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate,
              wanted: Sequence[str], loss_spec: LossSpec | None = None) -> tuple[Evaluated, str | None]:
    """The loss of a row whose gradient is there already, and why that took more than three products, or None.

    Backward of its "total" gives every parameter the gradient that it would have without fusion. What is said of tokens
    that do not count is 0: they never went through the head.

    Args:
        policy: as this rank holds it.
        hidden_TD: hidden states of the row.
        local: the row.
        frozen_clip_T: [T] bool, clip decisions taken elsewhere.
        evaluate: the loss on some tokens.
        wanted: what the head says besides log-probabilities.
        loss_spec: what the loss was made from; None: listening alone says what it couples.
    """
    row, temperature_T = local.row, local.row.extensions.get("temperature_T")
    policy = _with_engine(policy, hidden_TD)
    asked = sums_asked_for(local, frozen_clip_T, evaluate, wanted)
    if asked and local.sums.axis.size > 1:
        said = policy.token_logprobs(hidden_TD, row.targets_T, temperature_T, active_T=row.loss_mask_T,
                                     wanted=wanted)
        return evaluate(local, said, frozen_clip_T), (
            f"the loss sums over whole {' and '.join(sorted(asked))}s, whose tokens lie on {local.sums.axis.size} cp "
            "ranks: it is evaluated between forward and backward, 4 products less what keep_bytes keeps")

    def loss_of(said: TokenLogprobs, places_C: Tensor) -> Tensor:
        if not len(places_C):
            return said.logprobs_T.sum()
        frozen_C = None if frozen_clip_T is None else frozen_clip_T[places_C]
        return evaluate(some_tokens(local, places_C), said, frozen_C).scalars["total"].value

    couples = "row" if couples_a_row(loss_spec) else "document" if asked else "token"
    fused = fused_loss(
        hidden_TD, targets_T=row.targets_T, loss_fn=loss_of, couples=couples,
        document_ids_T=row.group_ids_T if "pair" in asked else row.document_ids_T,
        expected_logprobs_T=row.old_logprobs_T, implementation=policy.implementation,
        temperature=policy.temperature if temperature_T is None else temperature_T, active_T=row.loss_mask_T,
        wanted=wanted, **policy.head_arguments())
    with torch.no_grad():
        whole = evaluate(local, fused.said, frozen_clip_T)
    total = replace(whole.scalars["total"], value=fused.loss)
    return whole._replace(scalars={**whole.scalars, "total": total}), fused.fallback


def couples_a_row(spec: LossSpec | None) -> bool:
    """Whether a loss takes a statistic over all tokens of a row that depends on the current policy, or on the cut."""
    return spec is not None and bool(spec.surrogate.breaks or spec.correction.breaks)


def sums_asked_for(local: LocalRow, frozen_clip_T: Tensor | None, evaluate: Evaluate,
                   wanted: Sequence[str] = ("entropy", "logsumexp")) -> set[str]:
    """Which sums over parts of a row a loss asks for: document, segment, pair. The same on every rank, without one."""
    heard = _Listening()
    zeros_T = torch.zeros_like(local.row.old_logprobs_T)
    said = TokenLogprobs(local.row.old_logprobs_T, **{f"{name}_T": zeros_T for name in wanted})
    with torch.no_grad():
        evaluate(replace(local, sums=heard), said, frozen_clip_T)
    return heard.asked


def some_tokens(local: LocalRow, places_C: Tensor) -> LocalRow:
    """The part of a row that some of its tokens are: data, weights and sums; documents keep their names."""
    def at(values_T: Tensor) -> Tensor:
        return values_T[places_C]

    return replace(local, row=local.row.map(at), weights={name: pair.map(at) for name, pair in local.weights.items()},
                   sums=local.sums.at(places_C))


def _with_engine(policy: Policy, hidden_TD: Tensor) -> Policy:
    """The policy with log-probabilities that go by chunks."""
    if policy.implementation in ("chunked", "triton"):
        return policy
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32) if policy.fp32_head else hidden_TD.dtype
    return replace(policy, implementation=fastest(dtype, hidden_TD.device))


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
