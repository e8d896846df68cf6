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

from workbench.metrics.definitions import DocumentMetric, Metric
from workbench.metrics.quantities import KL, Column, Dropped, Extra, LogProb, LogRatio, Quantities
from workbench.metrics.values import NOTHING, Maximum, Mean, Minimum
from workbench.specs.losses import CorrectionSpec, GateSpec
from workbench.systems.alias import Alias, PeerSettings

PREFIX = "rollout_corr"
EPSILON = 1e-8
"""Added to a count of tokens."""
LIMIT = 20.0
"""Bound of a log ratio before it goes through exp."""
LEVELS = {"token": "token", "document_sum": "seq_sum", "document_mean": "seq_mean", "document_max": "seq_max"}
"""Level of a gate -> verl's name of it."""

RAW, BOUNDED = Extra("raw_weight"), Extra("bounded_weight")
MISMATCH = LogRatio("old", "sampler")

Make = Callable[..., Tensor]
"""[N] one number per document, from its tokens, sums and maxima."""


def mismatch(s: PeerSettings) -> Iterable[Alias]:
    """Yield the distances between sampler and trainer, before any correction."""
    yield Alias(
        Metric(f"{PREFIX}/kl", "mean of sampler - old", "nats", KL("k1", "sampler", "old"), Mean(EPSILON)),
        None,
        "kl/sampler_old/k1_mean up to the 1e-8",
    )
    yield Alias(
        Metric(
            f"{PREFIX}/k3_kl",
            "mean k3 estimate of KL(sampler || old)",
            "nats",
            KL("k3", "sampler", "old"),
            Mean(EPSILON),
        ),
        None,
        "kl/sampler_old/k3_mean up to the 1e-8",
    )
    training, rollout = LogProb("old"), LogProb("sampler")
    for key, meaning, column, make, reduce in (
        ("training_log_ppl", "-mean old log-probability", training, _negated_mean, "mean"),
        ("training_ppl", "exp(-mean old log-probability)", training, _perplexity, "mean"),
        ("rollout_log_ppl", "-mean sampler log-probability", rollout, _negated_mean, "mean"),
        ("rollout_ppl", "exp(-mean sampler log-probability)", rollout, _perplexity, "mean"),
        ("log_ppl_diff", "mean of sampler - old", MISMATCH, _negated_mean, "mean"),
        ("log_ppl_abs_diff", "|mean of sampler - old|", MISMATCH, _absolute_mean, "mean"),
        ("log_ppl_diff_max", "mean of sampler - old", MISMATCH, _negated_mean, "max"),
        ("log_ppl_diff_min", "mean of sampler - old", MISMATCH, _negated_mean, "min"),
        ("ppl_ratio", "exp(mean of sampler - old)", MISMATCH, _perplexity, "mean"),
        (
            "chi2_seq",
            f"exp(2 sum of (old - sampler)), the sum within +-{LIMIT:g}; less 1",
            MISMATCH,
            _squared_product,
            "mean",
        ),
    ):
        unit = "nats" if "log" in key else "1"
        yield Alias(_of_rows(key, meaning, unit, (column,), make, reduce, s.num_documents))
    yield Alias(
        DocumentMetric(
            f"{PREFIX}/chi2_token",
            f"mean over tokens of exp(2 (old - sampler)), the difference within +-{LIMIT:g}; less 1",
            "1",
            (_SquaredRatio(),),
            _mean_less_one,
            weight="its trained tokens",
        )
    )


def weights(s: PeerSettings) -> Iterable[Alias]:
    """Yield statistics of a correction's importance weights; none without a loss that has them."""
    correction = None if s.spec is None else s.spec.correction
    if correction is None or correction.ratio not in ("token", "document_sum"):
        return
    high = math.inf if correction.ratio_high is None else correction.ratio_high
    low = 1 / high if correction.ratio_low is None else correction.ratio_low
    name = "rollout_is"

    def mean(key: str, meaning: str, column: Column) -> Alias:
        return Alias(Metric(f"{PREFIX}/{name}_{key}", meaning, "1", column, Mean(EPSILON)))

    def rows(
        key: str, meaning: str, columns: tuple[Column, ...], make: Make, reduce: str, share: bool = False
    ) -> Alias:
        return Alias(
            _of_rows(f"{name}_{key}", meaning, "1", columns, make, reduce, s.num_documents, single=share and s.single)
        )

    yield mean("mean", "mean weight within its bounds", BOUNDED)
    if correction.ratio == "document_sum":
        product = "exp(sum of (old - sampler)), before any bound"
        yield rows("max", f"{product}, the sum at most {LIMIT:g}", (MISMATCH,), _capped_product, "max")
        yield rows("min", product, (MISMATCH,), _product, "min")
        for key, side, limit in (("high", "above the upper bound", high), ("low", "below the lower bound", low)):
            yield rows(
                f"ratio_fraction_{key}",
                f"share of sequences {side}",
                (MISMATCH,),
                functools.partial(_sum_beyond, key, math.log(limit)),
                "mean",
                share=True,
            )
    else:
        yield Alias(Metric(f"{PREFIX}/{name}_max", "largest weight within its bounds", "1", BOUNDED, Maximum()))
        yield Alias(Metric(f"{PREFIX}/{name}_min", "smallest weight within its bounds", "1", BOUNDED, Minimum()))
        yield mean("ratio_fraction_high", "share of tokens above the upper bound", _Beyond(RAW, high=high))
        yield mean(
            "ratio_fraction_low",
            "share of tokens below the lower bound, or the upper bound's reciprocal without one",
            _Beyond(RAW, low=low),
        )
    if correction.ratio_low is not None:
        yield mean("oob_ratio", "share of tokens outside the bounds", _Beyond(RAW, low=low, high=high))
    yield Alias(_spread(f"{name}_std", "standard deviation over tokens of the bounded weight", BOUNDED, 0.0, high))
    clamped = _Within(BOUNDED, 0.0, high)
    yield Alias(
        DocumentMetric(
            f"{PREFIX}/{name}_eff_sample_size",
            "1 / mean over tokens of (bounded weight / mean bounded weight)^2",
            "1",
            (clamped, _Squared(clamped)),
            _effective_share,
            weight="its trained tokens",
        ),
        None,
        "a share between 0 and 1",
    )
    for key, reduce in (("mean", "mean"), ("std", "std"), ("max", "max"), ("min", "min")):
        yield rows(f"seq_{key}", "the mean bounded weight", (BOUNDED,), _row_mean, reduce)
    yield rows("seq_max_deviation", "|mean bounded weight - 1|", (BOUNDED,), _off_one, "max")
    for key, limit in (("high", high), ("low", low)):
        yield rows(
            f"seq_fraction_{key}",
            f"1 if the mean weight before any bound is beyond the {key} bound",
            (RAW,),
            functools.partial(_mean_beyond, key, limit),
            "mean",
            share=True,
        )
    if correction.normalize:
        yield Alias(_norm_factor(correction))


def gates(s: PeerSettings) -> Iterable[Alias]:
    """Yield statistics of each gate of a correction; none without a loss that has one."""
    chosen = () if s.spec is None else s.spec.correction.gates
    if not chosen or any(gate.level not in LEVELS or gate.statistic not in ("k1", "k2", "k3") for gate in chosen):
        return
    for gate in chosen:
        yield from _of_gate(gate, s.single)
    rejected = _Rejected()
    yield Alias(
        Metric(
            f"{PREFIX}/rollout_rs_masked_fraction",
            "share of tokens that some gate rejects",
            "1",
            rejected,
            Mean(EPSILON),
        )
    )
    yield Alias(
        _of_rows(
            "rollout_rs_seq_masked_fraction",
            "1 if some gate rejects a token",
            "1",
            (rejected,),
            _any,
            "mean",
            s.num_documents,
            single=s.single,
        )
    )


def _of_gate(gate: GateSpec, single: bool) -> Iterable[Alias]:
    two_sided = gate.statistic == "k1"
    low, high = (gate.low if two_sided else 0.0), gate.high
    token = KL(gate.statistic, "sampler", "old", LIMIT)
    outside = _Beyond(token, low=low if two_sided else None, high=high)
    name, statistic = f"rollout_rs_{LEVELS[gate.level]}_{gate.statistic}", f"{LEVELS[gate.level]} {gate.statistic}"
    of_rows = gate.level != "token"
    columns, extremes = ((), (token,)) if gate.level == "document_max" else ((token,), ())
    value = {"document_sum": _row_sum, "document_max": _row_sum}.get(gate.level, _row_mean)

    def rows(key: str, meaning: str, make: Make, reduce: str, share: bool = False) -> Alias:
        return Alias(
            _of_rows(
                f"{name}_{key}", meaning, "1", columns, make, reduce, None, extremes=extremes, single=share and single
            )
        )

    def tokens(key: str, meaning: str, make: Make) -> Alias:
        return Alias(
            DocumentMetric(
                f"{PREFIX}/{name}_{key}",
                meaning,
                "1",
                columns,
                functools.partial(_token_mean, functools.partial(_through, value, make)),
                weight="its trained tokens",
                extremes=extremes,
            )
        )

    def plain(key: str, meaning: str, column: Column) -> Alias:
        return Alias(Metric(f"{PREFIX}/{name}_{key}", meaning, "1", column, Mean(EPSILON)))

    above = functools.partial(_beyond, "high", high)
    below = functools.partial(_beyond, "low", low) if two_sided else _none
    sides = (("high", above), ("low", below))
    if of_rows:
        yield tokens("mean", f"mean over tokens of their sequence's {statistic}", _itself)
        for key, reduce in (("max", "max"), ("min", "min")):
            yield rows(key, statistic, value, reduce)
        for key, make in sides:
            yield rows(
                f"fraction_{key}",
                f"1 if {statistic} is beyond the {key} bound",
                functools.partial(_through, value, make),
                "mean",
                share=True,
            )
        yield Alias(
            DocumentMetric(
                f"{PREFIX}/{name}_std",
                f"standard deviation over tokens of their sequence's {statistic} within the bounds",
                "1",
                columns,
                functools.partial(_row_spread, value, low, high),
                weight="its trained tokens",
                extremes=extremes,
            )
        )
        rejects = functools.partial(_through, value, functools.partial(_outside, low if two_sided else None, high))
        yield tokens(
            "masked_fraction",
            "share of tokens that the gate rejects",
            functools.partial(_outside, low if two_sided else None, high),
        )
        yield rows("seq_masked_fraction", "1 if it is rejected", rejects, "mean")
    else:
        yield plain("mean", f"mean {statistic}", token)
        yield Alias(Metric(f"{PREFIX}/{name}_max", f"largest {statistic}", "1", token, Maximum()))
        yield Alias(Metric(f"{PREFIX}/{name}_min", f"smallest {statistic}", "1", token, Minimum()))
        yield plain("fraction_high", "share of tokens beyond the high bound", _Beyond(token, high=high))
        yield plain(
            "fraction_low", "share of tokens beyond the low bound", _Beyond(token, low=low if two_sided else None)
        )
        yield Alias(_spread(f"{name}_std", f"standard deviation of {statistic} within the bounds", token, low, high))
        yield plain("masked_fraction", "share of tokens that the gate rejects", outside)
        yield Alias(
            _of_rows(f"{name}_seq_masked_fraction", "1 if it rejects a token", "1", (outside,), _any, "mean", None)
        )
    for key in ("mean", "std", "max", "min"):
        yield rows(f"seq_{key}", statistic, value, key)
    yield rows("seq_max_deviation", f"|{statistic}|", functools.partial(_through, value, torch.abs), "max")
    for key, make in sides if two_sided else sides[:1]:
        yield rows(
            f"seq_fraction_{key}",
            f"1 if {statistic} is beyond the {key} bound",
            functools.partial(_through, value, make),
            "mean",
            share=True,
        )


# ---- per-token quantities --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SquaredRatio(Column):
    """(old / sampler)^2, the log ratio clamped to +-LIMIT."""

    @property
    def needs(self) -> tuple[str, ...]:
        return MISMATCH.needs

    def of(self, q: Quantities) -> Tensor | None:
        log_T = q.log_ratio("old", "sampler")
        return None if log_T is None else (2 * log_T.clamp(-LIMIT, LIMIT)).exp()


@dataclass(frozen=True)
class _OfColumn(Column):
    column: Column

    @property
    def needs(self) -> tuple[str, ...]:
        return self.column.needs

    def of(self, q: Quantities) -> Tensor | None:
        value_T = q.column(self.column)
        return None if value_T is None else self.read(value_T)

    def read(self, value_T: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Beyond(_OfColumn):
    """1 where a quantity is below one bound or above the other, else 0."""

    low: float | None = None
    high: float | None = None

    def read(self, value_T: Tensor) -> Tensor:
        return _outside(self.low, self.high, value_T)


@dataclass(frozen=True)
class _Within(_OfColumn):
    """A quantity clamped to two bounds."""

    low: float | None
    high: float | None

    def read(self, value_T: Tensor) -> Tensor:
        return value_T.clamp(self.low, self.high)


@dataclass(frozen=True)
class _Squared(_OfColumn):
    def read(self, value_T: Tensor) -> Tensor:
        return value_T.square()


@dataclass(frozen=True)
class _Rejected(Column):
    """1 where some gate rejects the token."""

    def of(self, q: Quantities) -> Tensor | None:
        passed_T = q.extra("passed")
        return Dropped().of(q) if passed_T is None else 1 - passed_T


# ---- numbers of one document -----------------------------------------------------------------------------------


def _row_sum(_: Tensor, value_N: Tensor) -> Tensor:
    return value_N


def _row_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return sum_N / (tokens_N + EPSILON)


def _negated_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return -_row_mean(tokens_N, sum_N)


def _absolute_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return _row_mean(tokens_N, sum_N).abs()


def _perplexity(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return _negated_mean(tokens_N, sum_N).exp()


def _squared_product(_: Tensor, sum_N: Tensor) -> Tensor:
    return (2 * sum_N.clamp(-LIMIT, LIMIT)).exp() - 1


def _product(_: Tensor, sum_N: Tensor) -> Tensor:
    return sum_N.exp()


def _capped_product(_: Tensor, sum_N: Tensor) -> Tensor:
    return sum_N.clamp(max=LIMIT).exp()


def _off_one(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return (_row_mean(tokens_N, sum_N) - 1).abs()


def _sum_beyond(side: str, limit: float, _: Tensor, sum_N: Tensor) -> Tensor:
    return _beyond(side, limit, sum_N)


def _mean_beyond(side: str, limit: float, tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return _beyond(side, limit, _row_mean(tokens_N, sum_N))


def _any(_: Tensor, sum_N: Tensor) -> Tensor:
    return (sum_N > 0).double()


def _itself(value_N: Tensor) -> Tensor:
    return value_N


def _none(value_N: Tensor) -> Tensor:
    return torch.zeros_like(value_N)


def _through(value: Make, make: Callable[[Tensor], Tensor], tokens_N: Tensor, *columns_N: Tensor) -> Tensor:
    return make(value(tokens_N, *columns_N))


def _beyond(side: str, limit: float, value: Tensor) -> Tensor:
    return (value > limit if side == "high" else value < limit).double()


def _outside(low: float | None, high: float | None, value: Tensor) -> Tensor:
    outside = torch.zeros_like(value, dtype=torch.bool)
    if low is not None:
        outside |= value < low
    if high is not None:
        outside |= value > high
    return outside.double()


# ---- numbers of all documents ----------------------------------------------------------------------------------


def _of_rows(
    key: str,
    meaning: str,
    unit: str,
    columns: tuple[Column, ...],
    make: Make,
    reduce: str,
    number: int | None,
    *,
    extremes: tuple[Column, ...] = (),
    single: bool = False,
) -> DocumentMetric:
    statistic = {"mean": "mean", "max": "largest", "min": "smallest", "std": "standard deviation (n - 1)"}[reduce]
    return DocumentMetric(
        f"{PREFIX}/{key}",
        f"{statistic} over sequences of: {meaning}",
        unit,
        columns,
        functools.partial(_reduced, make, reduce, number, single),
        extremes=extremes,
    )


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
        result = {"mean": values_N.mean, "max": values_N.max, "min": values_N.min}[reduce]()
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


def _spread(key: str, meaning: str, column: Column, low: float | None, high: float | None) -> DocumentMetric:
    clamped = _Within(column, low, high)
    return DocumentMetric(
        f"{PREFIX}/{key}", meaning, "1", (clamped, _Squared(clamped)), _token_spread, weight="its trained tokens"
    )


def _token_spread(tokens_N: Tensor, sum_N: Tensor, squares_N: Tensor) -> float:
    return _deviation(tokens_N.sum(), sum_N.sum(), squares_N.sum())


def _row_spread(value: Make, low: float | None, high: float | None, tokens_N: Tensor, *columns_N: Tensor) -> float:
    clamped_N = value(tokens_N, *columns_N).clamp(low, high)
    return _deviation(tokens_N.sum(), (tokens_N * clamped_N).sum(), (tokens_N * clamped_N.square()).sum())


def _effective_share(tokens_N: Tensor, sum_N: Tensor, squares_N: Tensor) -> float:
    count = tokens_N.sum() + EPSILON
    mean_square = squares_N.sum() / (sum_N.sum() / count + EPSILON).square() / count
    return float(1 / mean_square) if mean_square > 0 else NOTHING


def _norm_factor(correction: CorrectionSpec) -> DocumentMetric:
    return DocumentMetric(
        f"{PREFIX}/rollout_is_batch_norm_factor",
        "the mean bounded weight that weights are divided by; 1 where it is 0",
        "1",
        (BOUNDED,),
        functools.partial(_factor, correction.ratio == "document_sum"),
    )


def _factor(of_rows: bool, tokens_N: Tensor, sum_N: Tensor) -> float:
    mean = _row_mean(tokens_N, sum_N).mean() if of_rows else sum_N.sum() / (tokens_N.sum() + EPSILON)
    return float(mean) if mean > EPSILON else 1.0
