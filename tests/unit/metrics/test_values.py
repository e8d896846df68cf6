import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.ranks import reductions_counted, run_ranks
from workbench.errors import SpecError
from workbench.metrics.policy import OfDocuments
from workbench.metrics.values import (
    Count,
    Deviation,
    EffectiveSampleSize,
    LogMeanExp,
    Maximum,
    Mean,
    Minimum,
    Quantile,
    Share,
    SquaredSum,
    Sum,
    Value,
    finish_in_order,
    finish_metrics,
)
from workbench.sharding.mesh import Axis, make_mesh

ALONE = Axis("dp_cp")


def longest(tokens_N, sum_N):
    return float(sum_N.max()) if len(sum_N) else -1.0


REDUCERS = {
    "sum": Sum(),
    "squares": SquaredSum(),
    "count": Count(),
    "mean": Mean(),
    "mean_eps": Mean(epsilon=1e-8),
    "share": Share(of=7.0),
    "std": Deviation(1.0),
    "ess": EffectiveSampleSize(),
    "max": Maximum(),
    "min": Minimum(),
    "log_mean_exp": LogMeanExp(),
    "median": Quantile(0.5),
}


def all_kinds(values, mask, weights=None):
    values = torch.tensor(values, dtype=torch.float64)
    mask = torch.tensor(mask, dtype=torch.bool)
    weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    return {name: reducer.over(values, mask, weights) for name, reducer in REDUCERS.items()}


EXPECTED = {
    "sum": 8.0,
    "squares": 28.0,
    "count": 4.0,
    "mean": 2.0,
    "mean_eps": 8 / (4 + 1e-8),
    "share": 8 / 7,
    "std": math.sqrt(3),
    "ess": 64 / 28,
    "max": 5.0,
    "min": 1.0,
    "log_mean_exp": math.log((3 * math.e + math.exp(5)) / 4),
}


def close(found):
    return {name: pytest.approx(value, rel=1e-12) for name, value in found.items()}


def test_micro_batches_merge_by_count_and_an_empty_one_changes_nothing():
    pieces = [
        all_kinds([1.0], [1]),
        all_kinds([-7.0, math.nan], [0, 0]),
        all_kinds([], []),
        all_kinds([1.0, 1.0, 5.0], [1, 1, 1]),
    ]
    metrics = finish_metrics(pieces, ALONE)
    assert metrics.pop("median") == pytest.approx(1.0, rel=0.01)
    assert metrics == close(EXPECTED)  # a mean of means would be 1.67


def test_an_empty_value_finishes_as_nan_or_its_identity():
    for piece in (all_kinds([3.0], [0]), all_kinds([], [])):
        metrics = finish_metrics([piece], ALONE)
        unknown = {name for name, value in metrics.items() if math.isnan(value)}
        assert unknown == {"mean", "std", "ess", "log_mean_exp", "median"}
        assert (metrics["max"], metrics["min"]) == (-math.inf, math.inf)
        assert [metrics[name] for name in ("sum", "squares", "count", "mean_eps", "share")] == [0.0] * 5


def on_ranks():
    mesh = make_mesh(dp=4)
    local = [([1.0], [1]), ([0.0], [0]), ([1.0, 1.0, 77.0], [1, 1, 0]), ([5.0], [1])][mesh["dp"].rank]
    table = OfDocuments(longest, columns=1, documents=2)
    rank = torch.tensor([mesh["dp"].rank // 2])
    metrics = all_kinds(*local) | {"documents": table.table([torch.ones(1)], torch.tensor([True]), rank)}
    with reductions_counted() as sizes:
        result = finish_metrics([metrics], mesh["dp_cp"])
    return result, len(sizes)


def test_ranks_merge_in_two_collectives_and_an_empty_rank_changes_nothing(tmp_path):
    for result, collectives in run_ranks(on_ranks, 4, tmp_path):
        assert result.pop("median") == pytest.approx(1.0, rel=0.01)
        assert result.pop("documents") == 2.0  # each document lies on two ranks
        assert result == close(EXPECTED)
        assert collectives == 2


def test_deviation_does_not_cancel():
    values = 1.0 + 1e-9 * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    deviation = Deviation(1.0).over(values, torch.ones(2, dtype=torch.bool))
    assert deviation.finish() == pytest.approx(1e-9, rel=1e-6)


def test_a_log_mean_is_finite_where_the_mean_overflows():
    values, everywhere = torch.tensor([800.0, 801.0]), torch.ones(2, dtype=torch.bool)
    assert LogMeanExp().over(values, everywhere).finish() == pytest.approx(801 + math.log((1 + math.exp(-1)) / 2))
    impossible = torch.tensor([-math.inf, -math.inf])
    assert LogMeanExp().over(impossible, everywhere).finish() == -math.inf
    assert LogMeanExp().over(torch.tensor([math.inf, 0.0]), everywhere).finish() == math.inf


def test_a_nan_that_counts_is_not_hidden():
    metrics = finish_metrics([all_kinds([1.0, math.nan], [1, 1]), all_kinds([2.0], [1])], ALONE)
    assert all(math.isnan(value) for name, value in metrics.items() if name != "count")
    assert metrics["count"] == 3


def test_a_count_is_an_integer_whatever_its_shares():
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    count = Count().over(torch.zeros(3), torch.ones(3, dtype=torch.bool), thirds)
    sevenths = Count().over(torch.zeros(7), torch.ones(7, dtype=torch.bool), torch.full((7,), 1 / 7).double())
    assert count.merge(sevenths).finish() == 2.0


@pytest.mark.parametrize("q", [0.01, 0.5, 0.99])
def test_a_quantile_is_within_its_accuracy(q):
    values = torch.exp(2 * torch.randn(4001, dtype=torch.float64))
    result = Quantile(q).over(values, torch.ones(4001, dtype=torch.bool)).finish()
    assert result == pytest.approx(float(values.quantile(q, interpolation="lower")), rel=0.0101)


def test_metrics_that_differ_between_micro_batches_are_refused():
    one = torch.ones(1)
    value = Mean().over(one, one.bool())
    with pytest.raises(SpecError, match="b not equal"):
        finish_metrics([{"a": value}, {"a": value, "b": value}], ALONE)
    with pytest.raises(SpecError, match="a not equal"):
        finish_metrics([{"a": value}, {"a": Sum().over(one, one.bool())}], ALONE)
    with pytest.raises(SpecError, match="values of one reducer"):
        value.merge(Sum().over(one, one.bool()))


# ---- the algebra, on generated values ------------------------------------------------------------------

NUMBERS = st.one_of(st.floats(-50, 50, allow_subnormal=False), st.just(-math.inf))
TOKENS = st.lists(st.tuples(NUMBERS, st.booleans(), st.floats(0.01, 3)), max_size=12)


def total(reducer, tokens):
    values, mask, weights = zip(*tokens, strict=True) if tokens else ((), (), ())
    return reducer.over(
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(weights, dtype=torch.float64),
    )


def same(a: Value, b: Value):
    one, other = a.finish(), b.finish()
    return one == pytest.approx(other, rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("name", REDUCERS)
@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_any_split_in_any_order_gives_the_number_of_one_pass(name, data):
    reducer = REDUCERS[name]
    tokens = data.draw(TOKENS)
    if name == "count":  # its weights are shares that add up to whole things
        tokens = [(value, mask, 1.0) for value, mask, _ in tokens]
    if name in ("median", "ess"):
        tokens = [(abs(value) if math.isfinite(value) else 0.0, mask, weight) for value, mask, weight in tokens]
    labels = data.draw(st.lists(st.integers(0, 4), min_size=len(tokens), max_size=len(tokens)))
    pieces = [
        total(reducer, [t for t, label in zip(tokens, labels, strict=True) if label == part]) for part in range(5)
    ]
    order = data.draw(st.permutations(pieces))
    left = right = total(reducer, [])
    for piece in order:
        left = left.merge(piece)
    for piece in reversed(order):
        right = piece.merge(right)
    whole = total(reducer, tokens)
    assert same(left, whole)
    assert same(right, whole)
    assert same(order[0].merge(order[1]), order[1].merge(order[0]))
    assert finish_metrics([{"m": piece} for piece in order], ALONE)["m"] == pytest.approx(
        whole.finish(), rel=1e-9, abs=1e-9, nan_ok=True
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_a_table_of_documents_is_the_same_however_documents_are_cut(data):
    tokens = data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(-5, 5)), max_size=15))
    labels = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens)))
    reducer = OfDocuments(longest, columns=1, documents=4)

    def table(chosen):
        ids, mask, values = zip(*chosen, strict=True) if chosen else ((), (), ())
        return reducer.table(
            [torch.tensor(values, dtype=torch.float64)],
            torch.tensor(mask, dtype=torch.bool),
            torch.tensor(ids, dtype=torch.long),
        )

    sums = {}
    for document, counts, value in tokens:
        if counts:
            sums[document] = sums.get(document, 0.0) + value
    pieces = [table([t for t, label in zip(tokens, labels, strict=True) if label == part]) for part in range(3)]
    merged = table([]).merge(pieces[2]).merge(pieces[0]).merge(pieces[1])
    assert merged.finish() == pytest.approx(max(sums.values(), default=-1.0), abs=1e-12)


def test_a_document_table_has_sums_and_maxima_and_empty_ranks_change_nothing():
    def read(tokens_N, sum_N, most_N):
        return float((100 * most_N + sum_N).max()) if len(tokens_N) else -1.0

    reducer = OfDocuments(read, columns=1, documents=3, extremes=1)
    values = torch.tensor([-3.0, -1.0, 50.0, -2.0], dtype=torch.float64)
    ids, mask = torch.tensor([0, 0, 1, 2]), torch.tensor([True, True, False, True])
    parts = [reducer.table([values[at]], mask[at], ids[at], [values[at]]) for at in ([0, 3], [1], [2])]
    nothing = reducer.table([values[:0]], mask[:0], ids[:0], [values[:0]])
    for order in ((0, 1, 2), (2, 1, 0)):
        merged = nothing
        for number in order:
            merged = merged.merge(parts[number])
        assert merged.finish() == -104.0  # of document 0: the greatest is -1 and the sum -4
        assert finish_metrics([{"a": parts[number]} for number in order], ALONE) == {"a": -104.0}
    assert nothing.finish() == -1.0
    assert parts[2].finish() == -1.0


def test_rows_in_any_order_finish_to_the_same_bits():
    """The ordinary merge does not promise that, and does not keep it here."""
    draw = torch.Generator().manual_seed(3)
    rows = [
        all_kinds((10.0 ** torch.randn(5, generator=draw, dtype=torch.float64) - 1).tolist(), [1, 1, 0, 1, 1])
        for _ in range(6)
    ]
    expected, ordinary = finish_in_order(rows, torch.arange(6), ALONE), finish_metrics(rows, ALONE)
    assert expected == pytest.approx(ordinary, rel=1e-12)
    merged = []
    for seed in range(8):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        shuffled = [rows[at] for at in order]
        assert finish_in_order(shuffled, order, ALONE) == expected
        merged.append(finish_metrics(shuffled, ALONE))
    assert any(result != merged[0] for result in merged), "the numbers must tell orders apart"


def test_an_empty_row_changes_no_bit():
    draw = torch.Generator().manual_seed(4)
    rows = [all_kinds(torch.randn(5, generator=draw).tolist(), [1] * 5) for _ in range(3)]
    nothing = {name: total(reducer, []) for name, reducer in REDUCERS.items()}
    for place in (-1, 1, 9):
        assert finish_in_order([*rows, nothing], torch.tensor([0, 1, 2, place]), ALONE) == finish_in_order(
            rows, torch.arange(3), ALONE
        )
