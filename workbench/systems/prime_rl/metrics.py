"""What prime-rl reports of its loss components, by its definitions. See the head of this package.

Every number is one a document, a mean over some of its tokens and 0 where there are none; it logs their mean over
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
    """A number of each document.

    Attributes:
        name: as there.
        meaning: one sentence.
        unit: of the number.
        value: of each token.
        where: 1 on tokens that enter the mean.
        negative: it is minus the mean.
        flags: the mean is of flags, and is rounded to single precision as there.
    """

    name: str
    meaning: str
    unit: str
    value: Column
    where: Column = TRAINED
    negative: bool = False
    flags: bool = False

    def read(self, value_N: Tensor, where_N: Tensor) -> Tensor:
        """[N] from the sums over each document's tokens."""
        mean_N = value_N / where_N.clamp_min(1)
        return -mean_N if self.negative else mean_N.float().double() if self.flags else mean_N


def names(s: PeerSettings) -> Iterable[Alias]:
    """Means over documents, of a loss that is one of its components."""
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
    """The numbers of each document, as a component of the loss returns them.

    Args:
        inputs: what the loss saw.
        term: what its surrogate said.
        kind: of surrogate.
        documents: N.
        empty: documents in which nothing counts are in it, too.

    Shapes: name -> [N], or only the documents in which something counts.
    """
    q = Quantities(inputs, {"policy": term}, inputs.counts_T)
    place_T = torch.where(inputs.counts_T, inputs.document_ids_T, 0)

    def total(column: Column) -> Tensor:
        values_T = torch.where(inputs.counts_T, column.of(q), 0.0)
        return values_T.new_zeros(documents).index_add(0, place_T, values_T)

    there = torch.ones(documents, dtype=torch.bool) if empty else total(One()) > 0
    return {
        number.name: number.read(total(_Within(number.value, number.where)), total(number.where))[there]
        for number in numbers(kind)
    }


def numbers(kind: str) -> list[Number]:
    """What is reported of a component with this surrogate; a token whose gradient a surrogate cuts is a dropped one."""
    if kind == "sft":
        return [Number("nll", "mean negative log-likelihood", "nats", LogProb("policy"), negative=True)]
    prefix = "ref_kl/" if kind == "ref_kl" else ""
    mismatch, dropped, kept = KL("k3", "sampler", "policy"), PolicyCut(), _Kept()
    found = [
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
            kept,
        ),
        Number(f"{prefix}is_masked", "share of dropped tokens", "1", dropped, flags=True),
    ]
    if kind == "ref_kl":
        return [*found, Number("ref_kl", "mean of ref - policy", "nats", LogRatio("ref", "policy"))]
    if kind != "dppo_tv":
        return found
    for side, words, sign in (("low", "a negative", -1), ("high", "a positive", 1)):
        found.append(
            Number(
                f"is_masked_{side}",
                f"share of dropped tokens with {words} advantage",
                "1",
                _Within(_Sign(sign), dropped),
                flags=True,
            )
        )
    for side, sign in (("positive", 1), ("negative", -1)):
        found.append(
            Number(
                f"masked_advantage_{side}",
                f"share of the dropped tokens whose advantage is {side}",
                "1",
                _Sign(sign),
                dropped,
                flags=True,
            )
        )
    return found


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
