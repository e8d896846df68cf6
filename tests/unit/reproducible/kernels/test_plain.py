"""The plain kernels: the same bits for a block wherever and with whomever it is computed."""

import math

import pytest
import torch

from workbench.reproducible.kernels import plain


def moved(values):
    """The same numbers at an odd place in memory."""
    room = torch.empty(values.numel() + 1, dtype=values.dtype)
    room[1:] = values.flatten()
    return room[1:].view(values.shape)


def test_canonical_tensors_are_contiguous_and_aligned():
    values = torch.randn(3, 5)
    assert plain.canonical(values).data_ptr() == values.data_ptr()
    for other in (moved(values), values.T.contiguous().T):
        result = plain.canonical(other)
        assert torch.equal(result, values)
        assert result.is_contiguous()
        assert result.data_ptr() % plain.ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_gemms_of_a_block_do_not_depend_on_other_blocks_or_pieces(dtype, out_dtype):
    x, weight = torch.randn(12, 33).to(dtype), torch.randn(10, 33).to(dtype)
    y = plain.matmul(x, weight, 4, 5, out_dtype)
    assert y.dtype == (out_dtype or dtype)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=2e-2, atol=5e-2)
    assert torch.equal(plain.matmul(moved(x[8:]), moved(weight[5:]), 4, 5, out_dtype), y[8:, 5:])
    dx = plain.matmul_backward(y.to(dtype), weight, 4, 11, out_dtype)
    torch.testing.assert_close(dx.double(), y.to(dtype).double() @ weight.double(), rtol=2e-2, atol=0.2)
    assert torch.equal(plain.matmul_backward(y[4:8].to(dtype), weight[:, 11:], 4, 11, out_dtype), dx[4:8, 11:])


def test_every_product_has_the_shape_of_a_piece(monkeypatch):
    shapes, multiply = set(), plain._multiplied

    def noted(left, right, dtype):
        shapes.add((*left.shape, right.shape[1]))
        return multiply(left, right, dtype)

    monkeypatch.setattr(plain, "_multiplied", noted)
    plain.matmul(torch.randn(12, 6), torch.randn(10, 6), 4, 5)
    assert shapes == {(4, 6, 5)}
    shapes.clear()
    plain.matmul_backward(torch.randn(12, 10), torch.randn(10, 6), 4, 3)
    assert shapes == {(4, 10, 3)}
    shapes.clear()
    total = torch.zeros(10, 6, dtype=torch.int64)
    plain.add_outer(total, torch.zeros(()), 1.0, torch.randn(12, 10), torch.randn(12, 6), 4, (5, 2))
    assert shapes == {(5, 4, 2)}


def test_partial_gradients_are_rounded_once_and_their_peak_is_recorded():
    dy, x = torch.randn(8, 6), torch.randn(8, 10)
    total, peak = torch.zeros(6, 10, dtype=torch.int64), torch.zeros(())
    plain.add_outer(total, peak, 2.0**20, dy, x, 4, (3, 5))
    expected = sum((dy[at : at + 4].T @ x[at : at + 4]).mul(2.0**20).round().long() for at in (0, 4))
    assert int((total - expected).abs().max()) <= 2
    assert float(peak) == pytest.approx(max(float((dy[at : at + 4].T @ x[at : at + 4]).abs().max()) for at in (0, 4)))
    again = torch.zeros_like(total)
    for at in (4, 0):
        plain.add_outer(again[:3], peak, 2.0**20, dy[at : at + 4, :3], x[at : at + 4], 4, (3, 5))
        plain.add_outer(again[3:], peak, 2.0**20, dy[at : at + 4, 3:], x[at : at + 4], 4, (3, 5))
    assert torch.equal(again, total)


def test_indexed_rows_are_partials_of_their_target():
    rows, index = torch.randn(6, 3), torch.tensor([0, 2, -1, 2, 0, 0])
    total, peak = torch.zeros(3, 3, dtype=torch.int64), torch.zeros(())
    plain.add_rows(total, peak, 2.0**30, rows, index)
    expected = [
        sum(
            (row.mul(2.0**30).round().long() for row, at in zip(rows, index, strict=True) if at == one),
            torch.zeros(3, dtype=torch.int64),
        )
        for one in range(3)
    ]
    assert torch.equal(total, torch.stack(expected))
    assert float(peak) == float(rows[index >= 0].abs().max())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_peak_reports_non_finite_values(bad):
    rows, peak = torch.randn(4, 4), torch.zeros(())
    rows[2, 1] = bad
    plain.add_rows(torch.zeros(4, dtype=torch.int64), peak, 1.0, rows)
    assert not peak.isfinite()
    peak = torch.zeros(())
    plain.add_outer(torch.zeros(4, 4, dtype=torch.int64), peak, 1.0, rows, torch.ones(4, 4), 4, (4, 4))
    assert not peak.isfinite()
    heads = torch.zeros(4)
    plain.raise_head_peaks(heads, rows.view(4, 4, 1))
    assert heads.isfinite().tolist() == [True, False, True, True]


def test_a_gradient_is_the_integers_times_a_power_of_two():
    total = torch.tensor([[3, -(2**40)], [2**55 + 1, 0]])
    assert torch.equal(
        plain.to_gradient(total, 2.0**-3, torch.float32), torch.tensor([[0.375, -(2.0**37)], [2.0**52, 0.0]])
    )
    assert plain.to_gradient(total, 1.0, torch.bfloat16).dtype == torch.bfloat16


def test_squares_are_summed_in_integers():
    values = torch.randn(100)
    total = int(plain.sum_of_squares(values, torch.tensor(2.0**40, dtype=torch.float64)))
    assert total / 2**40 == pytest.approx(float(values.double().square().sum()), rel=1e-9)
    assert float(plain.largest(values)) == float(values.abs().max())
    assert float(plain.largest(values[:0])) == 0.0
