from types import SimpleNamespace

import pytest
import torch

from workbench.policy.logprobs.engine import (
    RowGradients,
    add_gemm_,
    count_gemm,
    count_gemms,
    default_chunk,
    exact_float32,
    plan_chunks,
    plan_rows,
)


def test_chunks_cover_every_row_exactly_once_in_order():
    for rows in (0, 1, 4, 9):
        for chunk_tokens in (1, 4, 100):
            covered = [row for piece in plan_chunks(rows, chunk_tokens) for row in range(piece.start, piece.stop)]
            assert covered == list(range(rows))
            assert all(piece.stop - piece.start <= chunk_tokens for piece in plan_chunks(rows, chunk_tokens))


def test_counts_are_nested_and_end():
    with count_gemms() as outer:
        count_gemm(3)
        with count_gemms() as inner:
            count_gemm(4)
    count_gemm(5)
    assert (outer.rows, inner.rows) == (7, 4)


def test_gradients_of_some_rows_keep_none():
    some = RowGradients(torch.arange(4), None, torch.arange(4) * 2).of(slice(1, 3))
    assert some[1] is None
    assert some[3] is None
    assert (some[0].tolist(), some[2].tolist()) == ([1, 2], [2, 4])


@pytest.mark.parametrize(
    ("operands", "sums"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_the_first_product_overwrites_and_the_next_is_added(operands, sums):
    gradient, hidden = torch.randn(7, 5).to(operands), torch.randn(7, 3).to(operands)
    result = torch.full((5, 3), torch.nan, dtype=sums)
    add_gemm_(result, gradient, hidden, first=True)
    add_gemm_(result, gradient, hidden, first=False)
    expected = 2 * gradient.double().T @ hidden.double()
    torch.testing.assert_close(
        result.double(), expected, rtol=0, atol={torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.1}[sums]
    )


def test_half_precision_is_summed_in_float32():
    ones = torch.ones(300, 1, dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    result = torch.zeros(1, 1)
    for row in ones.split(1):
        add_gemm_(result, row, row, first=False)
    assert result.item() == 300


@pytest.mark.parametrize("before", ["tf32", "ieee", "none"])
def test_float32_is_exact_inside_and_as_it_was_outside(before):
    setting = torch.backends.cuda.matmul
    outside, setting.fp32_precision = setting.fp32_precision, before
    try:
        with exact_float32(torch.float32):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == before
        with exact_float32(torch.bfloat16):
            assert setting.fp32_precision == before
        with pytest.raises(ZeroDivisionError), exact_float32(torch.float32):
            raise ZeroDivisionError
        assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = outside


def test_a_plan_keeps_documents_whole_where_it_can():
    units = torch.tensor([5, 5, 3, 3, 3, 8, 1, 1, 1, 1, 1, 1, 1, 2])
    plan = plan_rows(14, 4, "document", units)
    assert plan.order_A is None
    assert plan.groups == [[slice(6, 10), slice(10, 13)], [slice(0, 2)], [slice(2, 6)], [slice(13, 14)]]
    assert plan_rows(14, 4, "token", units).groups == [[slice(0, 4)], [slice(4, 8)], [slice(8, 12)], [slice(12, 14)]]
    assert plan_rows(5, 4, "row").groups == [[slice(0, 4), slice(4, 5)]]
    assert [plan_rows(0, 4, couples, units[:0]).groups for couples in ("token", "document", "row")] == [[], [], []]


def test_a_plan_gathers_scattered_documents():
    units = torch.tensor([1, 2, 1, 3, 2, 1])
    plan = plan_rows(6, 3, "document", units)
    assert plan.order_A.tolist() == [0, 2, 5, 1, 3, 4]
    assert plan.groups == [[slice(0, 3)], [slice(3, 6)]]


def test_a_chunk_has_as_many_logits_as_4096_rows_of_a_large_vocabulary():
    """Rows of a chunk by default, by the vocabulary and by the ranks that share it."""

    def rows(vocabulary, tp=1):
        head = SimpleNamespace(vocabulary=vocabulary, axis=None if tp == 1 else SimpleNamespace(size=tp))
        return default_chunk(head)

    assert rows(151936) == rows(262144) == 4096
    assert rows(151936, tp=4) == 4 * 4096
    for vocabulary in (151935, 128256, 47936, 32000, 7):
        assert rows(vocabulary) % 128 == 0
        assert rows(vocabulary) * vocabulary <= 4096 * 151936 < (rows(vocabulary) + 128) * vocabulary
    assert rows(50257, tp=3) == rows(-(-50257 // 3))


@pytest.mark.parametrize("vocabulary", [151936, 128256, 47936])
def test_chunks_by_default_are_about_as_long(vocabulary):
    head = SimpleNamespace(vocabulary=vocabulary, axis=None)
    most = default_chunk(head)
    for rows in (0, 1, most, most + 1, 2 * most - 1, 16384, 24576, 10 * most + 128):
        chunk = default_chunk(head, rows)
        assert chunk <= most
        assert -(-rows // chunk) == -(-rows // most), "as many chunks as of the longest"
        assert rows <= most or (chunk % 128 == 0 and chunk * (-(-rows // most)) < rows + 128 * -(-rows // most))
