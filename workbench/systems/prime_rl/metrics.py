"""Metrics of prime-rl's loss components, by its definitions. See `workbench.systems.metrics`.

There is one number per document, a mean over some of its tokens and 0 if there are none; prime-rl logs their mean over
documents. Read from PrimeIntellect-ai/prime-rl 559b4477.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.terms import LossInputs, Term
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import KL, Column, LogProb, LogRatio, One, PolicyCut
from workbench.systems.metrics import Alias, Derived, PeerSettings, document_metric, has_sign, negation

TRAINED = One()


@dataclass(frozen=True)
class Number:
    """A metric with one value per document, under its name in prime-rl."""

    name: str
    meaning: str
    unit: str
    value: Column
    where: Column = TRAINED
    """1 on tokens that enter the mean."""
    negative: bool = False
    """The value is minus the mean."""
    flags: bool = False
    """The mean is of flags, and is rounded to single precision as in prime-rl."""

    def read(self, value_N: Tensor, where_N: Tensor) -> Tensor:
        """Return [N] the metric from sums over each document's tokens."""
        mean_N = value_N / where_N.clamp_min(1)
        return -mean_N if self.negative else mean_N.float().double() if self.flags else mean_N


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield means over documents, of a loss that is one of its components."""
    for number in numbers(s.kind):
        yield document_metric(
            number.name,
            f"mean over documents of the {number.meaning}",
            number.unit,
            (_within(number.value, number.where), number.where),
            functools.partial(_mean_of, number, s.num_documents),
            note="0 for a document without such tokens, also where it has no trained token",
        )


def of_documents(inputs: LossInputs, term: Term, kind: str, documents: int, *, empty: bool) -> dict[str, Tensor]:
    """Return the metrics of each document, as a component of the loss returns them, from the term of its surrogate.

    Shapes: name -> [N]; without ``empty``, only the documents in which something counts.
    """
    q = Quantities(inputs, {"policy": term}, inputs.counts_T)
    assert inputs.document_ids_T is not None, "a replayed row names its documents"
    place_T = torch.where(inputs.counts_T, inputs.document_ids_T, 0)

    def total(column: Column) -> Tensor:
        column_T = column.of(q)
        assert column_T is not None, "the component's loss has read the same log-probabilities"
        values_T = torch.where(inputs.counts_T, column_T, 0.0)
        return values_T.new_zeros(documents).index_add(0, place_T, values_T)

    included = torch.ones(documents, dtype=torch.bool) if empty else total(One()) > 0
    return {
        number.name: number.read(total(_within(number.value, number.where)), total(number.where))[included]
        for number in numbers(kind)
    }


def numbers(kind: str) -> list[Number]:
    """Return the metrics of a component with this surrogate; a token is dropped if the surrogate cuts its gradient."""
    if kind == "sft":
        return [Number("nll", "mean negative log-likelihood", "nats", LogProb("policy"), negative=True)]
    prefix = "ref_kl/" if kind == "ref_kl" else ""
    mismatch, dropped, mean = KL("k3", "sampler", "policy"), PolicyCut(), "mean k3 of policy against sampler over"
    entries = [
        Number(f"{prefix}masked_mismatch_kl", f"{mean} dropped tokens", "nats", mismatch, dropped),
        Number(f"{prefix}unmasked_mismatch_kl", f"{mean} kept tokens", "nats", mismatch, negation(dropped)),
        Number(f"{prefix}is_masked", "share of dropped tokens", "1", dropped, flags=True),
    ]
    if kind == "ref_kl":
        return [*entries, Number("ref_kl", "mean of ref - policy", "nats", LogRatio("ref", "policy"))]
    if kind != "dppo_tv":
        return entries
    for side, advantage, sign in (("low", "a negative", -1), ("high", "a positive", 1)):
        meaning, value = f"share of dropped tokens with {advantage} advantage", _within(has_sign(sign), dropped)
        entries.append(Number(f"is_masked_{side}", meaning, "1", value, flags=True))
    for side, sign in (("positive", 1), ("negative", -1)):
        meaning = f"share of the dropped tokens whose advantage is {side}"
        entries.append(Number(f"masked_advantage_{side}", meaning, "1", has_sign(sign), dropped, flags=True))
    return entries


def _mean_of(number: Number, of: int | None, tokens_N: Tensor, value_N: Tensor, where_N: Tensor) -> float:
    count = len(tokens_N) if of is None else of
    return float(number.read(value_N, where_N).sum()) / count if count else float("nan")


def _within(value: Column, where: Column) -> Column:
    """Return a column where another one is 1, and 0 elsewhere."""
    return Derived(lambda value_T, where_T: torch.where(where_T > 0, value_T, 0.0), (value, where))
