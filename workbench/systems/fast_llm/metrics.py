"""Metrics of Fast-LLM, by its definitions. See `workbench.systems.metrics`.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from workbench.metrics.quantities import KL, Advantage, Clip, Column, Entropy, LogProb, One, Ratio
from workbench.metrics.values import Count, Maximum, Mean, Minimum, Reducer, Share, SquaredSum, Sum
from workbench.systems.metrics import Alias, PeerSettings, k3_of, outside_clip_of, per_document, ratio_of, token_metric


def names(s: PeerSettings) -> Iterable[Alias]:
    """Sums of document means over all documents of the step; sums of ratios are not divided."""
    over: Reducer = Mean() if s.num_documents is None else Share(s.num_documents)

    def mean(name: str, meaning: str, unit: str, column: Column, canonical: str | None = None) -> Alias:
        # With empty documents in the step the divisor differs, so the canonical mean is another number.
        same = canonical if s.num_documents is None else None
        meaning = f"sum over documents of the document's mean {meaning}, divided by the documents of the step"
        note = "documents without trained tokens count in the divisor"
        return token_metric(name, meaning, unit, column, over, "document", canonical=same, note=note)

    def plain(name: str, meaning: str, unit: str, column: Column, reducer: Reducer, same: str) -> Alias:
        return token_metric(name, meaning, unit, column, reducer, canonical=same)

    yield mean("new_logprobs", "log-probability", "nats", LogProb("policy"), "logprob/policy/document_mean")
    yield mean("old_logprobs", "old log-probability", "nats", LogProb("old"), "logprob/old/document_mean")
    yield mean("advantage", "advantage", "reward", Advantage(), "advantage/all/document_mean")
    yield mean("entropy", "entropy", "nats", Entropy(), "entropy/policy/document_mean")
    yield plain("max_advantage", "largest advantage", "reward", Advantage(), Maximum(), "advantage/all/max")
    yield plain("min_advantage", "smallest advantage", "reward", Advantage(), Minimum(), "advantage/all/min")
    yield plain("num_tokens", "tokens that count", "tokens", One(), Sum(), "tokens/trained/sum")
    total, squares = "ratio_new_old_sum", "ratio_new_old_squared_sum"
    if not s.of_documents:
        ratio, share = Ratio("policy", "old"), "share of tokens outside the clip"
        yield mean("ratio_new_old", "ratio", "1", ratio, "ratio/policy_old/document_mean")
        yield mean("kl_new_old", "r - 1 - log r", "nats", KL("k3", "old", "policy"), "kl/old_policy/k3_document_mean")
        yield mean("clipped_ratio_fraction", share, "1", Clip("outside"), "clip/region/document_mean")
        yield plain(total, "sum of ratios over tokens", "1", ratio, Sum(), "ratio/policy_old/sum")
        meaning = "sum of squared ratios over tokens"
        yield plain(squares, meaning, "1", ratio, SquaredSum(), "ratio/policy_old/squared_sum")
        return
    assert s.clip is not None, "a loss with ratios of documents clips them"
    for name, meaning, make in (
        ("ratio_new_old", "ratio", ratio_of),
        ("kl_new_old", "r - 1 - log r", k3_of),
        ("clipped_ratio_fraction", "share outside the clip", functools.partial(outside_clip_of, "outside", s.clip)),
    ):
        meaning = f"sum over documents of the {meaning} of the document's ratio, divided by the documents of the step"
        yield per_document(name, meaning, make, "mean", s.num_documents)
    for name, reduce in ((total, "sum"), (squares, "squared_sum")):
        yield per_document(name, f"{reduce.replace('_', ' ')} of the documents' ratios", ratio_of, reduce)
    yield token_metric(
        "num_segments",
        "documents with tokens that count",
        "documents",
        One(),
        Count(),
        "document",
        canonical="documents/trained/sum",
        note="a segment is a document there",
    )
