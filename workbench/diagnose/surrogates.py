"""Recognition of a record's loss: known surrogates of its own log-probabilities, against the loss that it recorded.

A record with log-probabilities, old log-probabilities and advantages determines the value of each token under each
known surrogate. One that gives the recorded loss, to rounding, under one way of dividing is hardly an accident; so two
records that are explained by different ones differ in the surrogate, or in the denominator. Values of one record
explain its own loss: the precision of the run does not enter.

Source: the surrogates of `workbench.losses`, written again here, as a record is explained without their code.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose.denominators import Way, ways
from workbench.diagnose.record import RecordedStep, whole

MARGIN = 2e-5
"""Of the mean absolute value of a token: sums in float32 of some thousand tokens are right to a part of it."""
BOUNDS = ((0.2, 0.2), (0.2, 0.28), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.2, 0.25), (0.28, 0.28), (3e-4, 4e-4))
"""Lower and upper range of a clip: PPO's and GRPO's 0.2, DAPO's 0.28 (arXiv 2503.14476), GSPO's 3e-4 and 4e-4 (arXiv
2507.18071), and others in use; those of the run's context come first."""
Explained = tuple[str, Way]
"""A surrogate, and the way in which its values are divided."""


def explained(step: RecordedStep, context: Mapping[str, Any]) -> list[Explained]:
    """The surrogates and denominators that give the recorded loss of a step; [] if it lacks what they need."""
    tokens = whole(step.tokens)
    if step.loss is None or "losses" in tokens or not {"policy_logprobs", "trained"} <= set(tokens):
        return []
    trained, found = tokens["trained"].bool(), []
    for name, values in _surrogates(tokens, context):
        margin = MARGIN * float(values[trained].abs().mean())
        hits = ways(replace(step, tokens={**tokens, "losses": values}), context)
        found += [(name, way) for way in hits if abs(way.loss - step.loss) <= margin]
    return found


def _surrogates(tokens: Mapping[str, Tensor], context: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Name and per-token values, [S], to be minimised."""
    policy = tokens["policy_logprobs"].double()
    yield "negative log-likelihood", -policy
    if "advantages" not in tokens:
        return
    advantages = tokens["advantages"].double()
    yield "advantage times log-probability", -advantages * policy
    if "old_logprobs" not in tokens:
        return
    trained = tokens["trained"].bool()
    log_ratios = torch.where(trained, policy - tokens["old_logprobs"].double(), 0.0)
    yield "advantage times a ratio of 1", -advantages
    kinds = {"": log_ratios}
    if "documents" in tokens:
        kinds[" of documents"] = _document_means(log_ratios, tokens["documents"], trained)
    for kind, values in kinds.items():
        ratios = values.exp()
        plain = ratios * advantages
        yield f"ratios{kind} without a clip", -plain
        for low, high in dict.fromkeys([*_given(context), *BOUNDS]):
            clipped = ratios.clamp(1 - low, 1 + high) * advantages
            yield f"ratios{kind} clipped at {low:g} and {high:g}", -torch.minimum(plain, clipped)
            yield f"ratios{kind} clipped at {low:g} and {high:g}, the larger objective", -torch.maximum(plain, clipped)


def _document_means(values: Tensor, documents: Tensor, trained: Tensor) -> Tensor:
    """Mean over the trained tokens of each token's document."""
    _, place = torch.unique(documents, return_inverse=True)
    sums = torch.zeros(int(place.max()) + 1, dtype=torch.float64).index_add_(0, place, values * trained)
    counts = torch.zeros_like(sums).index_add_(0, place, trained.double())
    return (sums / counts.clamp_min(1))[place]


def _given(context: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Clip ranges that the context states, under the names of several trainers."""
    both = next((context[name] for name in ("clip", "clip_ratio", "cliprange", "epsilon") if name in context), None)
    low, high = (
        next((context[name] for name in names if name in context), both)
        for names in (
            ("clip_low", "clip_ratio_low", "epsilon_low", "eps_clip"),
            ("clip_high", "clip_ratio_high", "epsilon_high", "eps_clip_high"),
        )
    )
    if isinstance(low, int | float) and isinstance(high, int | float):
        yield float(low), float(high)
