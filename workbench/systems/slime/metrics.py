"""Metrics of slime, by its definitions. See `workbench.systems.metrics`.

Every number is a sum over samples of the sample's token mean, or a sum over tokens (calculate_per_token_loss), of one
micro-batch; slime divides by samples, or tokens, of the step when it logs. Read from THUDM/slime 624b824a.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.losses.terms import LossInputs
from workbench.metrics.definitions import Weight
from workbench.metrics.quantities import KL, Column, Extra, LogRatio, PolicyCut, Ratio, TermValue, Truncated
from workbench.metrics.values import Reducer, Share, Sum
from workbench.systems.metrics import Alias, PeerSettings, document_metric, ratio_of, reduced, token_metric

LEFT_OUT = {"tis_abs": "slime reports |weight - 1| as well; here weight/raw/* show the distance of weights from 1"}


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield sums over samples of token means, divided by the samples of the step if these are known."""
    by_token = s.spec is not None and s.spec.denominator == "token"
    over: Reducer = Sum() if by_token else Share(1 if s.num_documents is None else s.num_documents)
    weight: Weight = "token" if by_token else "document"
    reduction = "sum over tokens" if by_token else "sum over samples of the mean"

    def total(name: str, meaning: str, unit: str, column: Column, note: str = "") -> Alias:
        return token_metric(name, f"{reduction} of {meaning}", unit, column, over, weight, note=note)

    if s.kind == "cispo":
        yield total("pg_clipfrac", "1 where the ratio lies outside the clip", "1", Extra("ratio_truncated"))
    else:
        meaning = "1 where the clip acts, by the sign of the advantage"
        yield total("pg_clipfrac", meaning, "1", PolicyCut(), "not where the dual clip acts")
    anchor = "old" if s.clip is None else s.clip.anchor
    yield total("ppo_kl", "old - policy", "nats", KL("k1", anchor, "policy"))
    yield total("kl_loss", "the KL estimate, without its coefficient", "nats", TermValue("kl"))
    if s.spec is not None and s.spec.correction.ratio != "none":
        if s.of_documents:
            make, reduce = (_on_tokens, "sum") if by_token else (ratio_of, "mean")
            read = functools.partial(reduced, make, reduce, s.num_documents)
            meaning = f"{reduction} of the sample's ratio policy / old"
            yield document_metric("ois", meaning, "1", (LogRatio("policy", anchor),), read)
        else:
            yield total("ois", "the ratio policy / old", "1", Ratio("policy", anchor))
        yield total("tis", "the correction weight before truncation", "1", Extra("raw_weight"))
        yield total("tis_clipfrac", "1 where truncation changed the weight", "1", Truncated())


def _on_tokens(tokens_N: Tensor, *sums_N: Tensor) -> Tensor:
    return tokens_N * ratio_of(tokens_N, *sums_N)


def opsm_clipfrac(inputs: LossInputs, advantages_T: Tensor, threshold: float, anchor: str = "old") -> float:
    """Return the clipped fraction of off-policy sequence masking, as slime defines it.

    Formula: sum over documents whose mean of (anchor - policy) is above the threshold of
             (tokens of the document with a negative advantage, trained or not) / (its trained tokens)
    Units:   documents, but more than 1 for a document that has untrained tokens.
    """
    with torch.no_grad():
        far_T = -inputs.document_mean(inputs.log_ratio(anchor)) > threshold
        return float(torch.where(far_T & (advantages_T < 0), 1 / inputs.document_lengths_T, 0.0).sum())
