"""Importance ratios of a record: of tokens or documents, to an old policy or a sampler, and the kind of noted ones.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.diagnose.record import RecordedStep, whole

NEAR_1 = 1e-3
"""Ratios that differ from 1 by less tell no kind: log-probabilities in float32 are right to some 1e-5."""
WHOLE = 0.05
"""Distance from a whole number of a count that follows from ratios: they leave 1 by `NEAR_1` at least and are right to
some 1e-7, so that a count of 100 tokens is right to 0.01."""


def kinds_of_ratios(step: RecordedStep) -> set[str]:
    """Kinds of ratio that give the noted ratio of every trained token; empty if none was noted, or all are near 1."""
    tokens = whole(step.tokens)
    if not {"ratios", "policy_logprobs", "trained"} <= set(tokens):
        return set()
    trained = tokens["trained"].bool() & torch.isfinite(tokens["ratios"])
    noted = tokens["ratios"].double()[trained]
    if not len(noted) or float((noted - 1).abs().max()) < NEAR_1:
        return set()
    kinds = {kind: values.exp()[trained] for kind, values in log_ratios(tokens).items()}
    known = {kind for kind, ratios in kinds.items() if torch.allclose(noted, ratios, rtol=NEAR_1 / 10, atol=0.0)}
    return known or _over_other_counts(noted.log(), {kind: ratios.log() for kind, ratios in kinds.items()})


def _over_other_counts(noted: Tensor, kinds: Mapping[str, Tensor]) -> set[str]:
    """Kinds whose sum over each document gives its noted log ratio when divided by a whole number."""
    descriptions = set()
    for kind, sums in kinds.items():
        telling = noted.abs() > NEAR_1
        counts = sums[telling] / noted[telling]
        whole_numbers = ((counts - counts.round()).abs() <= WHOLE) & (counts.round() >= 1)
        if "multiplied" in kind and len(counts) and bool(whole_numbers.all()):
            descriptions.add(f"{kind.replace('multiplied', 'summed')} and divided by {_listed_counts(counts)}")
    return descriptions


def _listed_counts(counts: Tensor) -> str:
    numbers = [str(int(each)) for each in counts.round().unique()]
    return " or ".join(numbers[:4]) + ("" if len(numbers) <= 4 else f" and {len(numbers) - 4} more")


def log_ratios(tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logarithms of every kind of ratio that the noted log-probabilities give, [S], by kind."""
    policy, trained = tokens["policy_logprobs"].double(), tokens["trained"].bool()
    kinds = {}
    for anchor, of in (("old_logprobs", ""), ("sampler_logprobs", " to the sampler")):
        if anchor in tokens:
            log_ratios = torch.where(trained, policy - tokens[anchor].double(), 0.0)
            kinds[f"ratios{of}"] = log_ratios
            if "documents" in tokens:
                sums, means = over_documents(log_ratios, tokens["documents"], trained)
                kinds |= {f"ratios of documents{of}": means, f"ratios multiplied over documents{of}": sums}
    return kinds


def over_documents(values: Tensor, documents: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and mean over the trained tokens of each token's document."""
    _, place = torch.unique(documents, return_inverse=True)
    sums = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, values * trained)
    counts = torch.zeros_like(sums).index_add_(0, place, trained.double())
    return sums[place], (sums / counts.clamp_min(1))[place]
