"""Sums that no order and no rank changes, and the range in which they are exact."""

import math
import pickle

import pytest
import torch

from workbench.errors import SpecError
from workbench.reproducible.exact_sums import (
    MARGIN,
    MINIMUM_BITS,
    USABLE_BITS,
    Accumulator,
    Leaves,
    OutOfRange,
    Resolution,
    check_range,
    exact_sum,
)
from workbench.reproducible.kernels import plain
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

ALONE = [Axis("dp_cp"), Axis("tp")]


def test_an_exact_sum_does_not_depend_on_order_or_ranks():
    values = torch.randn(1000, dtype=torch.float64) * 10.0 ** torch.randint(-12, 12, (1000,))
    expected = exact_sum(values)
    assert expected == pytest.approx(math.fsum(values.tolist()), rel=1e-12)
    assert exact_sum(values[torch.randperm(1000)]) == expected
    for dp, cp in ((2, 1), (1, 4), (2, 2)):
        dealt = values.view(-1, dp * cp)
        by_rank = simulate(
            lambda mesh, dealt=dealt: exact_sum(dealt[:, mesh["dp_cp"].rank], mesh["dp_cp"]), dp=dp, cp=cp
        )
        assert set(by_rank) == {expected}


def test_an_ordinary_sum_does():
    values = torch.randn(100)
    assert len({float(sum(values[torch.randperm(100)].unbind())) for _ in range(20)}) > 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_value_makes_the_sum_non_finite(bad):
    assert math.isnan(exact_sum(torch.tensor([1.0, bad])))
    by_rank = simulate(lambda mesh: exact_sum(torch.tensor([bad if mesh["dp"].rank else 1.0]), mesh["dp"]), dp=2)
    assert [math.isnan(one) for one in by_rank] == [True, True]


def test_sums_of_zeros_and_of_nothing_are_zero():
    assert exact_sum(torch.zeros(3)) == 0.0
    assert exact_sum(torch.zeros(0)) == 0.0
    assert exact_sum(torch.tensor([1e-300, 1e-300], dtype=torch.float64)) == pytest.approx(2e-300)


def filled(peak, per=None):
    one = Accumulator(torch.Size([2]), torch.device("cpu"), per or Leaves(blocks=1))
    one.start(32)
    one.peak.fill_(peak)
    return one


def test_fitting_partials_report_the_bits_that_they_use():
    three = [filled(1.5), filled(0.0), filled(0.25)]
    assert check_range(three, ["a", "b", "c"], Leaves(10, 5), 32, ALONE) == [33, 0, 31]


@pytest.mark.parametrize("leaves", [Leaves(10, 1), Leaves(10, 5), Leaves(10, 2**20)])
def test_the_bound_is_that_of_the_whole_sum(leaves):
    room = USABLE_BITS - leaves.blocks.bit_length() - 32
    largest = math.ldexp(1.0, room) * (1 - 2.0**-24)
    assert largest * 2.0**32 * leaves.blocks < 2.0**USABLE_BITS
    check_range([filled(largest)], ["a"], leaves, 32, ALONE)
    with pytest.raises(OutOfRange, match=r"a up to(.|\n)*more than fit with 32") as raised:
        check_range([filled(math.ldexp(1.0, room))], ["a"], leaves, 32, ALONE)
    assert raised.value.bits == 31 - MARGIN


def test_partials_of_every_token_are_counted():
    per_token = Leaves(tokens=2)
    peak = math.ldexp(1.0, USABLE_BITS - 32 - 4)
    check_range([filled(peak / 2, per_token)], ["a"], Leaves(7, 1), 32, ALONE)
    with pytest.raises(OutOfRange):
        check_range([filled(peak, per_token)], ["a"], Leaves(7, 1), 32, ALONE)


def test_too_few_bits_request_more_if_available():
    small = math.ldexp(1.0, MINIMUM_BITS - 34)
    with pytest.raises(OutOfRange, match="fewer than 16") as raised:
        check_range([filled(small), filled(1.0)], ["a", "b"], Leaves(10, 1), 32, ALONE)
    assert raised.value.bits == 32 + MARGIN + 1
    large = math.ldexp(0.9, USABLE_BITS - 33)
    assert check_range([filled(small), filled(large)], ["a", "b"], Leaves(10, 1), 32, ALONE)[0] == MINIMUM_BITS - 1


def test_every_rank_reports_a_value_seen_by_one():
    def check(mesh):
        leaves = Leaves(0, 1)
        try:
            check_range([filled(1e12 if mesh["dp"].rank == 1 else 1.0)], ["a"], leaves, 32, [mesh["dp_cp"], mesh["tp"]])
        except OutOfRange as error:
            return error.bits, str(error)
        return None

    by_rank = simulate(check, dp=2, tp=2)
    assert len(set(by_rank)) == 1
    assert by_rank[0][0] == USABLE_BITS - 40 - 2 - MARGIN


def test_flushed_rows_are_those_of_everything():
    one = Accumulator(torch.Size([4, 2]), torch.device("cpu"), Leaves())
    one.total.add_(1)
    one.flush(lambda total: total[:2] * 10)
    one.total.add_(torch.arange(8).view(4, 2))
    assert one.flush(lambda total: total[:2] * 10).tolist() == [[10, 20], [30, 40]]
    assert one.flush(lambda total: total[:2] * 10).tolist() == [[10, 20], [30, 40]]


def test_queued_rows_are_added_on_request_or_above_a_limit():
    rows, index = torch.tensor([[1.0, 2.0], [4.0, -8.0]]), torch.tensor([3, 3])
    for times, waits in ((1, True), (20, False)):
        one = Accumulator(torch.Size([4, 2]), torch.device("cpu"), Leaves())
        one.start(1)
        for _ in range(times):
            one.add_at(plain, rows, index)
        assert (one._total is None) == waits
        assert (float(one.peak) == 0) == waits
        assert one.total.tolist() == [[0, 0], [0, 0], [0, 0], [10 * times, -12 * times]]
        assert float(one.peak) == 8
        one.start(1)
        assert not one.total.any()


def test_the_range_includes_queued_rows():
    one = Accumulator(torch.Size([64, 2]), torch.device("cpu"), Leaves(tokens=1))
    one.start(32)
    one.add_at(plain, torch.tensor([[torch.nan, 0.0]]), torch.tensor([0]))
    with pytest.raises(OutOfRange, match="not finite"):
        check_range([one], ["embedding"], Leaves(1, 1), 32, [Axis("dp_cp")])


@pytest.mark.parametrize(("tokens", "chunks"), [(0, 1), (8, 0), (8, 3), (8, -2), (-1, 1)])
def test_pieces_that_make_no_sense_are_refused(tokens, chunks):
    with pytest.raises(SpecError, match="a power of two"):
        Resolution(tokens, chunks)


def test_an_error_keeps_its_bits_when_it_is_pickled():
    for bits in (27, None):
        error = pickle.loads(pickle.dumps(OutOfRange.because("a peak", bits)))
        assert error.bits == bits
        assert "a peak" in str(error)
    assert "exact.start(bits=27)" in str(OutOfRange.because("a peak", 27))
