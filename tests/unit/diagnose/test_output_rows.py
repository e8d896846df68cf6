"""Rows of a model's outputs, and what two of them have in common."""

import pytest

from tests.helpers.hand_outputs import row
from workbench.diagnose.output_rows import Row, alike, grouped, one_side_lost, ratio_of, spread


def made(weights, call=0, **more):
    return Row(call, *row(weights, **more))


def test_rows_are_alike_up_to_one_factor():
    one = made([0.1, 0.4, 0.5])
    assert alike(one, made([-0.2, -0.8, -1.0]), 1e-3)
    assert not alike(one, made([0.2, 0.3, 0.5]), 1e-3)
    assert ratio_of(one, made([-0.2, -0.8, -1.0])) == pytest.approx(-2)


def test_pieces_of_one_ratio_are_put_together():
    assert grouped([(3, 0.5), (4, 0.25), (5, 0.5)], 1e-3) == [(4, 0.25), (8, 0.5)]
    assert spread([2.0, 3.0]) == 0.5


def test_a_side_is_lost_where_all_of_one_sign_are_gone():
    chosen, rejected = ([made([sign] * n, targets=[n] * n) for n in (3, 4)] for sign in (1.0, -1.0))
    rejected = [each._replace(targets=f"other {at}") for at, each in enumerate(rejected)]
    assert one_side_lost([*chosen, *rejected], chosen)
    assert not one_side_lost([*chosen, *rejected], [*chosen, rejected[0]])
    assert not one_side_lost([chosen[0], *rejected], [chosen[0]])
