import torch

from workbench.policy.logprobs.engine import RowGradients, count_gemm, count_gemms, plan_chunks


def test_chunks_cover_every_row_once_in_order():
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


def test_gradients_of_some_rows_keep_what_is_none():
    some = RowGradients(torch.arange(4), None, torch.arange(4) * 2).of(slice(1, 3))
    assert some[1] is None
    assert some[3] is None
    assert (some[0].tolist(), some[2].tolist()) == ([1, 2], [2, 4])
