"""Metrics of verl for the mismatch between sampler and trainer, and for its correction.

Three groups under one prefix: the mismatch itself, the importance weights (``rollout_is_*``), and each gate
(``rollout_rs_*``). Two rules hold for all of them: 1e-8 is added to every count of tokens, and a sequence without
trained tokens counts as one whose mean is 0 (a perplexity of 1), except in the numbers of a gate.

Source: verl-project/verl 1dda039b, rollout correction.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import KL, Column, Dropped, Estimator, Extra, LogProb, LogRatio
from workbench.metrics.values import NOTHING, Maximum, Mean, Minimum, Reducer
from workbench.specs.losses import GateSpec
from workbench.systems.metrics import Alias, Derived, PeerSettings, document_metric, is_outside, outside, token_metric
from workbench.systems.verl.correction import EPSILON, LEVELS, SAFETY

PREFIX = "rollout_corr"
RAW, BOUNDED = Extra("raw_weight"), Extra("bounded_weight")
MISMATCH = LogRatio("old", "sampler")

Make = Callable[..., Tensor]
"""[N] one number per document, from its tokens, sums and maxima."""


def mismatch(s: PeerSettings) -> Iterable[Alias]:
    """Yield the distances between sampler and trainer, before any correction."""
    estimates: tuple[tuple[str, Estimator, str], ...] = (
        ("kl", "k1", "mean of sampler - old"),
        ("k3_kl", "k3", "mean k3 estimate of KL(sampler || old)"),
    )
    for key, estimator, meaning in estimates:
        note = f"kl/sampler_old/{estimator}_mean up to the 1e-8"
        yield _of_tokens(key, meaning, KL(estimator, "sampler", "old"), unit="nats", note=note)
    training, rollout, gap = LogProb("old"), LogProb("sampler"), "mean of sampler - old"
    for key, meaning, column, value, reduce in (
        ("training_log_ppl", "-mean old log-probability", training, _negated_mean, "mean"),
        ("training_ppl", "exp(-mean old log-probability)", training, _perplexity, "mean"),
        ("rollout_log_ppl", "-mean sampler log-probability", rollout, _negated_mean, "mean"),
        ("rollout_ppl", "exp(-mean sampler log-probability)", rollout, _perplexity, "mean"),
        ("log_ppl_diff", gap, MISMATCH, _negated_mean, "mean"),
        ("log_ppl_abs_diff", f"|{gap}|", MISMATCH, _through(_row_mean, torch.abs), "mean"),
        ("log_ppl_diff_max", gap, MISMATCH, _negated_mean, "max"),
        ("log_ppl_diff_min", gap, MISMATCH, _negated_mean, "min"),
        ("ppl_ratio", f"exp({gap})", MISMATCH, _perplexity, "mean"),
    ):
        unit = "nats" if "log" in key else "1"
        yield _of_rows(key, meaning, (column,), value, reduce, s.num_documents, unit=unit)
    meaning = f"exp(2 sum of (old - sampler)), the sum within +-{SAFETY:g}; less 1"
    less_one = _through(_row_sum, lambda sum_N: _bounded_square(sum_N) - 1)
    yield _of_rows("chi2_seq", meaning, (MISMATCH,), less_one, "mean", s.num_documents)
    yield document_metric(
        f"{PREFIX}/chi2_token",
        f"mean over tokens of exp(2 (old - sampler)), the difference within +-{SAFETY:g}; less 1",
        "1",
        (Derived(_bounded_square, (MISMATCH,)),),
        _mean_less_one,
        by_length=True,
    )


def weights(s: PeerSettings) -> Iterable[Alias]:
    """Yield statistics of a correction's importance weights; none without a loss that has them."""
    correction = None if s.spec is None else s.spec.correction
    if correction is None or correction.ratio not in ("token", "document_sum"):
        return
    high = math.inf if correction.ratio_high is None else correction.ratio_high
    low = 1 / high if correction.ratio_low is None else correction.ratio_low
    of_rows, name = correction.ratio == "document_sum", "rollout_is"

    def rows(key: str, meaning: str, column: Column, value: Make, reduce: str, share: bool = False) -> Alias:
        single = share and s.single
        return _of_rows(f"{name}_{key}", meaning, (column,), value, reduce, s.num_documents, single=single)

    yield _of_tokens(f"{name}_mean", "mean weight within its bounds", BOUNDED)
    if of_rows:
        product = "exp(sum of (old - sampler)), before any bound"
        capped = _through(_row_sum, lambda sum_N: sum_N.clamp(max=SAFETY).exp())
        yield rows("max", f"{product}, the sum at most {SAFETY:g}", MISMATCH, capped, "max")
        yield rows("min", product, MISMATCH, _through(_row_sum, torch.exp), "min")
        for key, side, limit in (("high", "above the upper bound", high), ("low", "below the lower bound", low)):
            value = _through(_row_sum, _beyond(key, math.log(limit)))
            yield rows(f"ratio_fraction_{key}", f"share of sequences {side}", MISMATCH, value, "mean", share=True)
    else:
        yield _of_tokens(f"{name}_max", "largest weight within its bounds", BOUNDED, Maximum())
        yield _of_tokens(f"{name}_min", "smallest weight within its bounds", BOUNDED, Minimum())
        meaning, fraction = "share of tokens above the upper bound", f"{name}_ratio_fraction"
        yield _of_tokens(f"{fraction}_high", meaning, outside(RAW, high=high))
        meaning = "share of tokens below the lower bound, or the upper bound's reciprocal without one"
        yield _of_tokens(f"{fraction}_low", meaning, outside(RAW, low=low))
    if correction.ratio_low is not None:
        yield _of_tokens(f"{name}_oob_ratio", "share of tokens outside the bounds", outside(RAW, low=low, high=high))
    yield _spread(f"{name}_std", "standard deviation over tokens of the bounded weight", BOUNDED, 0.0, high)
    yield document_metric(
        f"{PREFIX}/{name}_eff_sample_size",
        "1 / mean over tokens of (bounded weight / mean bounded weight)^2",
        "1",
        _and_square(BOUNDED, 0.0, high),
        _effective_share,
        by_length=True,
        note="a share between 0 and 1",
    )
    for reduce in ("mean", "std", "max", "min"):
        yield rows(f"seq_{reduce}", "the mean bounded weight", BOUNDED, _row_mean, reduce)
    off_one = _through(_row_mean, lambda mean_N: (mean_N - 1).abs())
    yield rows("seq_max_deviation", "|mean bounded weight - 1|", BOUNDED, off_one, "max")
    for key, limit in (("high", high), ("low", low)):
        meaning = f"1 if the mean weight before any bound is beyond the {key} bound"
        yield rows(f"seq_fraction_{key}", meaning, RAW, _through(_row_mean, _beyond(key, limit)), "mean", share=True)
    if correction.normalize:
        meaning = "the mean bounded weight that weights are divided by; 1 where it is 0"
        read = functools.partial(_norm_factor, of_rows)
        yield document_metric(f"{PREFIX}/{name}_batch_norm_factor", meaning, "1", (BOUNDED,), read)


def gates(s: PeerSettings) -> Iterable[Alias]:
    """Yield statistics of each gate of a correction; none without a loss that has one."""
    chosen = () if s.spec is None else s.spec.correction.gates
    if not chosen or any(gate.level not in LEVELS or gate.statistic not in ("k1", "k2", "k3") for gate in chosen):
        return
    for gate in chosen:
        yield from _of_gate(gate, s.single)
    name, rejected = "rollout_rs", _Rejected()
    yield _of_tokens(f"{name}_masked_fraction", "share of tokens that some gate rejects", rejected)
    key, meaning = f"{name}_seq_masked_fraction", "1 if some gate rejects a token"
    yield _of_rows(key, meaning, (rejected,), _any, "mean", s.num_documents, single=s.single)


def _of_gate(gate: GateSpec, single: bool) -> Iterable[Alias]:
    assert gate.statistic in ("k1", "k2", "k3"), "other gates are left out"
    two_sided = gate.statistic == "k1"
    low, high = (gate.low if two_sided else 0.0), gate.high
    bound = low if two_sided else None
    token = KL(gate.statistic, "sampler", "old", SAFETY)
    name, statistic = f"rollout_rs_{LEVELS[gate.level]}_{gate.statistic}", f"{LEVELS[gate.level]} {gate.statistic}"
    columns, extremes = ((), (token,)) if gate.level == "document_max" else ((token,), ())
    value = _row_sum if gate.level in ("document_sum", "document_max") else _row_mean

    def rows(key: str, meaning: str, value: Make, reduce: str, share: bool = False) -> Alias:
        single_precision = share and single
        return _of_rows(
            f"{name}_{key}", meaning, columns, value, reduce, None, extremes=extremes, single=single_precision
        )

    def weighted(key: str, meaning: str, read: Callable[..., float]) -> Alias:
        return document_metric(f"{PREFIX}/{name}_{key}", meaning, "1", columns, read, extremes=extremes, by_length=True)

    sides = {"high": _beyond("high", high), "low": _beyond("low", low) if two_sided else torch.zeros_like}
    rejects = functools.partial(is_outside, bound, high)
    meaning = "share of tokens that the gate rejects"
    if gate.level != "token":
        mean = functools.partial(_token_mean, value)
        yield weighted("mean", f"mean over tokens of their sequence's {statistic}", mean)
        for reduce in ("max", "min"):
            yield rows(reduce, statistic, value, reduce)
        for key, beyond in sides.items():
            beyond_bound = f"1 if {statistic} is beyond the {key} bound"
            yield rows(f"fraction_{key}", beyond_bound, _through(value, beyond), "mean", share=True)
        spread = functools.partial(_row_spread, value, low, high)
        yield weighted(
            "std", f"standard deviation over tokens of their sequence's {statistic} within the bounds", spread
        )
        yield weighted("masked_fraction", meaning, functools.partial(_token_mean, _through(value, rejects)))
        yield rows("seq_masked_fraction", "1 if it is rejected", _through(value, rejects), "mean")
    else:
        rejected = outside(token, low=bound, high=high)
        yield _of_tokens(f"{name}_mean", f"mean {statistic}", token)
        yield _of_tokens(f"{name}_max", f"largest {statistic}", token, Maximum())
        yield _of_tokens(f"{name}_min", f"smallest {statistic}", token, Minimum())
        for key, column in (("high", outside(token, high=high)), ("low", outside(token, low=bound))):
            yield _of_tokens(f"{name}_fraction_{key}", f"share of tokens beyond the {key} bound", column)
        yield _spread(f"{name}_std", f"standard deviation of {statistic} within the bounds", token, low, high)
        yield _of_tokens(f"{name}_masked_fraction", meaning, rejected)
        key = f"{name}_seq_masked_fraction"
        yield _of_rows(key, "1 if it rejects a token", (rejected,), _any, "mean", None)
    for reduce in ("mean", "std", "max", "min"):
        yield rows(f"seq_{reduce}", statistic, value, reduce)
    yield rows("seq_max_deviation", f"|{statistic}|", _through(value, torch.abs), "max")
    for key in ("high", "low") if two_sided else ("high",):
        beyond_bound = f"1 if {statistic} is beyond the {key} bound"
        yield rows(f"seq_fraction_{key}", beyond_bound, _through(value, sides[key]), "mean", share=True)


@dataclass(frozen=True)
class _Rejected(Column):
    """1 where some gate rejects the token."""

    def of(self, q: Quantities) -> Tensor | None:
        passed_T = q.extra("passed")
        return Dropped().of(q) if passed_T is None else 1 - passed_T


def _bounded_square(log_ratio: Tensor) -> Tensor:
    """Return the squared ratio, its log clamped to +-SAFETY."""
    return (2 * log_ratio.clamp(-SAFETY, SAFETY)).exp()


def _beyond(side: str, limit: float | None) -> Callable[[Tensor], Tensor]:
    """Return a function that is 1 above an upper limit, or below a lower one; None: nowhere."""
    return functools.partial(is_outside, *((None, limit) if side == "high" else (limit, None)))


# ---- numbers of one document -----------------------------------------------------------------------------------


def _row_sum(_: Tensor, value_N: Tensor) -> Tensor:
    return value_N


def _row_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return sum_N / (tokens_N + EPSILON)


def _negated_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return -_row_mean(tokens_N, sum_N)


def _perplexity(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return _negated_mean(tokens_N, sum_N).exp()


def _any(_: Tensor, sum_N: Tensor) -> Tensor:
    return (sum_N > 0).double()


def _through(value: Make, make: Callable[[Tensor], Tensor]) -> Make:
    """Return a function of a document's value."""
    return lambda tokens_N, *columns_N: make(value(tokens_N, *columns_N))


# ---- numbers of all documents ----------------------------------------------------------------------------------


def _of_tokens(
    key: str, meaning: str, column: Column, reducer: Reducer | None = None, unit: str = "1", note: str = ""
) -> Alias:
    return token_metric(f"{PREFIX}/{key}", meaning, unit, column, reducer or Mean(EPSILON), note=note)


def _of_rows(
    key: str,
    meaning: str,
    columns: tuple[Column, ...],
    value: Make,
    reduce: str,
    number: int | None,
    *,
    unit: str = "1",
    extremes: tuple[Column, ...] = (),
    single: bool = False,
) -> Alias:
    statistic = {"mean": "mean", "max": "largest", "min": "smallest", "std": "standard deviation (n - 1)"}[reduce]
    read = functools.partial(_reduced, value, reduce, number, single)
    meaning = f"{statistic} over sequences of: {meaning}"
    return document_metric(f"{PREFIX}/{key}", meaning, unit, columns, read, extremes=extremes)


def _reduced(make: Make, reduce: str, number: int | None, single: bool, tokens_N: Tensor, *columns_N: Tensor) -> float:
    """Return a statistic over ``number`` sequences, those without tokens as zeros; None: those with tokens."""
    missing = 0 if number is None else number - len(tokens_N)
    padded = [torch.cat([value_N, value_N.new_zeros(missing)]) for value_N in (tokens_N, *columns_N)]
    values_N = make(*padded)
    if not len(values_N):
        return NOTHING
    if reduce == "std":
        result = values_N.std() if len(values_N) > 1 else values_N.new_zeros(())
    else:
        statistics: dict[str, Callable[[], Tensor]] = {"mean": values_N.mean, "max": values_N.max, "min": values_N.min}
        result = statistics[reduce]()
    return float(result.float() if single else result)


def _token_mean(make: Make, tokens_N: Tensor, *columns_N: Tensor) -> float:
    return float((tokens_N * make(tokens_N, *columns_N)).sum() / (tokens_N.sum() + EPSILON))


def _mean_less_one(tokens_N: Tensor, sum_N: Tensor) -> float:
    return float(sum_N.sum() / (tokens_N.sum() + EPSILON)) - 1


def _deviation(tokens: Tensor, total: Tensor, squares: Tensor) -> float:
    if not tokens > 1:
        return 0.0
    variance = squares / (tokens + EPSILON) - (total / (tokens + EPSILON)).square()
    return float(variance.clamp(min=0).sqrt())


def _and_square(column: Column, low: float | None, high: float | None) -> tuple[Column, Column]:
    """Return a quantity clamped to two bounds, and its square."""
    clamped = Derived(lambda value_T: value_T.clamp(low, high), (column,))
    return clamped, Derived(torch.square, (clamped,))


def _spread(key: str, meaning: str, column: Column, low: float | None, high: float | None) -> Alias:
    columns = _and_square(column, low, high)
    return document_metric(f"{PREFIX}/{key}", meaning, "1", columns, _token_spread, by_length=True)


def _token_spread(tokens_N: Tensor, sum_N: Tensor, squares_N: Tensor) -> float:
    return _deviation(tokens_N.sum(), sum_N.sum(), squares_N.sum())


def _row_spread(value: Make, low: float | None, high: float | None, tokens_N: Tensor, *columns_N: Tensor) -> float:
    clamped_N = value(tokens_N, *columns_N).clamp(low, high)
    return _deviation(tokens_N.sum(), (tokens_N * clamped_N).sum(), (tokens_N * clamped_N.square()).sum())


def _effective_share(tokens_N: Tensor, sum_N: Tensor, squares_N: Tensor) -> float:
    count = tokens_N.sum() + EPSILON
    mean_square = squares_N.sum() / (sum_N.sum() / count + EPSILON).square() / count
    return float(1 / mean_square) if mean_square > 0 else NOTHING


def _norm_factor(of_rows: bool, tokens_N: Tensor, sum_N: Tensor) -> float:
    mean = _row_mean(tokens_N, sum_N).mean() if of_rows else sum_N.sum() / (tokens_N.sum() + EPSILON)
    return float(mean) if mean > EPSILON else 1.0
