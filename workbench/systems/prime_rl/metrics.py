"""Metrics of prime-rl's loss components, by its definitions. See the package docstring.

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
from workbench.metrics.definitions import DocumentMetric
from workbench.metrics.quantities import KL, Advantage, Column, LogProb, LogRatio, One, PolicyCut, Quantities
from workbench.systems.alias import Alias, PeerSettings

TRAINED = One()
"""1 on every token that counts."""


@dataclass(frozen=True)
class Number:
    """A metric with one value per document.

    Attributes:
        name: name in prime-rl.
        meaning: one sentence.
        unit: unit of the value.
        value: value of each token.
        where: 1 on tokens that enter the mean.
        negative: the value is minus the mean.
        flags: the mean is of flags, and is rounded to single precision as in prime-rl.
    """

    name: str
    meaning: str
    unit: str
    value: Column
    where: Column = TRAINED
    negative: bool = False
    flags: bool = False

    def read(self, value_N: Tensor, where_N: Tensor) -> Tensor:
        """Return [N] the metric from sums over each document's tokens."""
        mean_N = value_N / where_N.clamp_min(1)
        return -mean_N if self.negative else mean_N.float().double() if self.flags else mean_N


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield means over documents, of a loss that is one of its components."""
    for number in numbers(s.kind):
        yield Alias(
            DocumentMetric(
                number.name,
                f"mean over documents of the {number.meaning}",
                number.unit,
                (_Within(number.value, number.where), number.where),
                functools.partial(_mean_of, number, s.num_documents),
            ),
            None,
            "0 for a document without such tokens, also where it has no trained token",
        )


def of_documents(inputs: LossInputs, term: Term, kind: str, documents: int, *, empty: bool) -> dict[str, Tensor]:
    """Return the metrics of each document, as a component of the loss returns them.

    Args:
        inputs: inputs of the loss.
        term: term of its surrogate.
        kind: kind of surrogate.
        documents: N.
        empty: documents in which nothing counts are included.

    Shapes: name -> [N], or only the documents in which something counts.
    """
    q = Quantities(inputs, {"policy": term}, inputs.counts_T)
    place_T = torch.where(inputs.counts_T, inputs.document_ids_T, 0)

    def total(column: Column) -> Tensor:
        values_T = torch.where(inputs.counts_T, column.of(q), 0.0)
        return values_T.new_zeros(documents).index_add(0, place_T, values_T)

    included = torch.ones(documents, dtype=torch.bool) if empty else total(One()) > 0
    return {
        number.name: number.read(total(_Within(number.value, number.where)), total(number.where))[included]
        for number in numbers(kind)
    }


def numbers(kind: str) -> list[Number]:
    """Return the metrics of a component with this surrogate; a token is dropped if the surrogate cuts its gradient."""
    if kind == "sft":
        return [Number("nll", "mean negative log-likelihood", "nats", LogProb("policy"), negative=True)]
    prefix = "ref_kl/" if kind == "ref_kl" else ""
    mismatch, dropped, undropped = KL("k3", "sampler", "policy"), PolicyCut(), _Kept()
    entries = [
        Number(
            f"{prefix}masked_mismatch_kl",
            "mean k3 of policy against sampler over dropped tokens",
            "nats",
            mismatch,
            dropped,
        ),
        Number(
            f"{prefix}unmasked_mismatch_kl",
            "mean k3 of policy against sampler over kept tokens",
            "nats",
            mismatch,
            undropped,
        ),
        Number(f"{prefix}is_masked", "share of dropped tokens", "1", dropped, flags=True),
    ]
    if kind == "ref_kl":
        return [*entries, Number("ref_kl", "mean of ref - policy", "nats", LogRatio("ref", "policy"))]
    if kind != "dppo_tv":
        return entries
    for side, advantage, sign in (("low", "a negative", -1), ("high", "a positive", 1)):
        entries.append(
            Number(
                f"is_masked_{side}",
                f"share of dropped tokens with {advantage} advantage",
                "1",
                _Within(_Sign(sign), dropped),
                flags=True,
            )
        )
    for side, sign in (("positive", 1), ("negative", -1)):
        entries.append(
            Number(
                f"masked_advantage_{side}",
                f"share of the dropped tokens whose advantage is {side}",
                "1",
                _Sign(sign),
                dropped,
                flags=True,
            )
        )
    return entries


def _mean_of(number: Number, of: int | None, tokens_N: Tensor, value_N: Tensor, where_N: Tensor) -> float:
    count = len(tokens_N) if of is None else of
    return float(number.read(value_N, where_N).sum()) / count if count else float("nan")


@dataclass(frozen=True)
class _Kept(Column):
    """1 where the policy term did not drop the token."""

    def of(self, q: Quantities) -> Tensor | None:
        dropped_T = PolicyCut().of(q)
        return None if dropped_T is None else 1 - dropped_T


@dataclass(frozen=True)
class _Sign(Column):
    """1 where the advantage has this sign."""

    sign: int

    def of(self, q: Quantities) -> Tensor | None:
        return (torch.sign(Advantage().of(q)) == self.sign).double()


@dataclass(frozen=True)
class _Within(Column):
    """A column where another one is 1, and 0 elsewhere."""

    value: Column
    where: Column

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.value.needs, *self.where.needs)))

    def of(self, q: Quantities) -> Tensor | None:
        value_T, where_T = self.value.of(q), self.where.of(q)
        return None if value_T is None or where_T is None else torch.where(where_T > 0, value_T, 0.0)
