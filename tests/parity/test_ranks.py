"""The helper that runs real ranks names the rank that failed or hung, and its stack."""

import time

import pytest
import torch

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.same_bits import same_bits


def stand_still():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def test_a_hang_is_an_error_with_the_stack_of_every_rank(tmp_path):
    with pytest.raises(RanksError) as caught:
        run_ranks(stand_still, 2, tmp_path, timeout_s=5)
    assert "rank 1 hung" in str(caught.value)
    assert "rank 0 hung" in str(caught.value)
    assert str(caught.value).count("in stand_still") == 2


def fail_on_one():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("planned")
    return dist.get_rank()


def test_an_exception_names_its_rank_and_brings_its_traceback(tmp_path):
    with pytest.raises(RanksError, match=r"rank 1 raised:(.|\n)*ValueError: planned"):
        run_ranks(fail_on_one, 2, tmp_path, timeout_s=120)


def my_rank():
    import torch.distributed as dist

    return dist.get_rank()


def test_results_come_in_rank_order(tmp_path):
    assert run_ranks(my_rank, 3, tmp_path) == [0, 1, 2]


def tensors():
    """Tensors of every kind that a rank may return."""
    draw = torch.Generator().manual_seed(5)
    matrix = torch.randn(3, 4, dtype=torch.float64, generator=draw)
    matrix[0, 0], matrix[1, 1] = float("nan"), -0.0
    kinds = {
        str(dtype): matrix.nan_to_num().to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
    }
    return kinds | {
        "matrix": matrix,
        "number": matrix.sum(),
        "nothing": torch.empty(0, 3),
        "turned": matrix.T,
        "part": matrix[1:, 2],
        "weight": torch.nn.Parameter(matrix.clone()),
    }


def test_tensors_come_back_with_their_bits(tmp_path):
    expected, [actual] = tensors(), run_ranks(tensors, 1, tmp_path)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(actual[name], value), name
        assert type(actual[name]) is type(value)
        assert actual[name].requires_grad == value.requires_grad
    actual["matrix"].add_(1)
