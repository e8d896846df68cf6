"""The helper that runs real ranks names the rank that failed or hung, and its stack."""

import time

import pytest

from tests.helpers.ranks import RanksError, run_ranks


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
