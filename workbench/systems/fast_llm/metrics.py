"""Metrics of Fast-LLM, by its definitions. See the package docstring.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from workbench.metrics.definitions import Metric
from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    Column,
    Entropy,
    LogProb,
    One,
    Ratio,
)
from workbench.metrics.values import (
    Count,
    Maximum,
    Mean,
    Minimum,
    Reducer,
    Share,
    SquaredSum,
    Sum,
)
from workbench.systems.alias import Alias, PeerSettings
from workbench.systems.document_metrics import (
    k3_of,
    outside_clip_of,
    per_document,
    ratio_of,
)


def names(s: PeerSettings) -> Iterable[Alias]:
    """Sums of document means over all documents of the step; sums of ratios are not divided."""
    over: Reducer = Mean() if s.num_documents is None else Share(s.num_documents)

    def mean(name: str, meaning: str, unit: str, column: Column, canonical: str | None = None) -> Alias:
        # With empty documents in the step the divisor differs, so the canonical mean is another number.
        same = canonical if s.num_documents is None else None
        return Alias(
            Metric(
                name,
                f"sum over documents of the document's mean {meaning}, divided by the documents of the step",
                unit,
                column,
                over,
                "document",
            ),
            same,
            "documents without trained tokens count in the divisor",
        )

    yield mean("new_logprobs", "log-probability", "nats", LogProb("policy"), "logprob/policy/document_mean")
    yield mean("old_logprobs", "old log-probability", "nats", LogProb("old"), "logprob/old/document_mean")
    yield mean("advantage", "advantage", "reward", Advantage(), "advantage/all/document_mean")
    yield mean("entropy", "entropy", "nats", Entropy(), "entropy/policy/document_mean")
    yield Alias(Metric("max_advantage", "largest advantage", "reward", Advantage(), Maximum()), "advantage/all/max")
    yield Alias(Metric("min_advantage", "smallest advantage", "reward", Advantage(), Minimum()), "advantage/all/min")
    yield Alias(Metric("num_tokens", "tokens that count", "tokens", One(), Sum()), "tokens/trained/sum")
    ratio = Ratio("policy", "old")
    if not s.of_documents:
        yield mean("ratio_new_old", "ratio", "1", ratio, "ratio/policy_old/document_mean")
        yield mean("kl_new_old", "r - 1 - log r", "nats", KL("k3", "old", "policy"), "kl/old_policy/k3_document_mean")
        yield mean(
            "clipped_ratio_fraction",
            "share of tokens outside the clip",
            "1",
            Clip("outside"),
            "clip/region/document_mean",
        )
        yield Alias(Metric("ratio_new_old_sum", "sum of ratios over tokens", "1", ratio, Sum()), "ratio/policy_old/sum")
        yield Alias(
            Metric("ratio_new_old_squared_sum", "sum of squared ratios over tokens", "1", ratio, SquaredSum()),
            "ratio/policy_old/squared_sum",
        )
        return
    for name, meaning, make in (
        ("ratio_new_old", "ratio", ratio_of),
        ("kl_new_old", "r - 1 - log r", k3_of),
        ("clipped_ratio_fraction", "share outside the clip", functools.partial(outside_clip_of, "outside", s.clip)),
    ):
        yield Alias(
            per_document(
                name,
                f"sum over documents of the {meaning} of the document's ratio, divided by the documents of the step",
                make,
                "mean",
                s.num_documents,
            )
        )
    for name, reduce in (("ratio_new_old_sum", "sum"), ("ratio_new_old_squared_sum", "squared_sum")):
        yield Alias(per_document(name, f"{reduce.replace('_', ' ')} of the documents' ratios", ratio_of, reduce))
    yield Alias(
        Metric("num_segments", "documents with tokens that count", "documents", One(), Count(), "document"),
        "documents/trained/sum",
        "a segment is a document there",
    )
