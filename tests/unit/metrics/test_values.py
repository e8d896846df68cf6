import math

import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.metrics.values import Deviation, Maximum, Mean, Minimum, Sum, finish_metrics
from workbench.sharding.mesh import Axis, make_mesh


def all_kinds(values, mask):
    values, mask = torch.tensor(values), torch.tensor(mask, dtype=torch.bool)
    return {"sum": Sum(torch.where(mask, values, 0.0).sum()), "mean": Mean.over(values, mask),
            "std": Deviation.over(values, mask, pivot=1.0), "max": Maximum.over(values, mask),
            "min": Minimum.over(values, mask)}


ALL = {"sum": 8.0, "mean": 2.0, "std": pytest.approx(math.sqrt(3)), "max": 5.0, "min": 1.0}


def test_micro_batches_merge_by_count_and_an_empty_one_changes_nothing():
    pieces = [all_kinds([1.0], [1]), all_kinds([-7.0, 9.0], [0, 0]), all_kinds([1.0, 1.0, 5.0], [1, 1, 1])]
    assert finish_metrics(pieces, Axis("dp_cp")) == ALL  # a mean of means would say 1.67


def test_a_mean_of_nothing_is_not_zero():
    found = finish_metrics([all_kinds([3.0], [0])], Axis("dp_cp"))
    assert math.isnan(found["mean"])
    assert math.isnan(found["std"])
    assert (found["sum"], found["max"], found["min"]) == (0.0, -math.inf, math.inf)


def test_a_row_of_no_tokens_changes_nothing():
    pieces = [all_kinds([-1.0], [1]), all_kinds([], [])]
    found = finish_metrics(pieces, Axis("dp_cp"))
    assert (found["mean"], found["max"], found["min"]) == (-1.0, -1.0, -1.0)


def on_ranks():
    mesh = make_mesh(dp=4)
    mine = [([1.0], [1]), ([0.0], [0]), ([1.0, 1.0, 77.0], [1, 1, 0]), ([5.0], [1])][mesh["dp"].rank]
    return finish_metrics([all_kinds(*mine)], mesh["dp_cp"])


def test_ranks_merge_and_an_empty_rank_changes_nothing(tmp_path):
    assert run_ranks(on_ranks, 4, tmp_path) == [ALL] * 4


def test_deviation_does_not_cancel():
    values = 1.0 + 1e-9 * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    deviation = Deviation.over(values, torch.ones(2, dtype=torch.bool), pivot=1.0)
    assert finish_metrics([{"std": deviation}], Axis("dp_cp"))["std"] == pytest.approx(1e-9, rel=1e-6)
