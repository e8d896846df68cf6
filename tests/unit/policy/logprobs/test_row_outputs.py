"""Head outputs of rows in the order of a plan: what is kept, what is copied, and what a loss sees of them."""

import pytest
import torch

from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.row_outputs import RowOutputs

PLACES = torch.tensor([7, 2, 5, 3])
FIELDS = ("logprobs_T", "entropy_T")


def outputs(loss_fn=None, *, fields=FIELDS, expected=None, ascending=None):
    return RowOutputs(loss_fn, fields, PLACES, ascending, expected, None, torch.float64)


def some(start, count):
    values = start + torch.arange(count, dtype=torch.float64)
    return TokenLogprobs(logprobs_T=values, entropy_T=10 + values)


def test_outputs_of_all_rows_are_kept_and_those_of_some_are_copied():
    every, kept = some(1.0, 4), outputs()
    kept.record(every, kept.everything)
    assert kept.values[0] is every.logprobs_T
    assert kept.values[1] is every.entropy_T
    parts = outputs()
    parts.record(some(1.0, 3), slice(0, 3))
    parts.record(some(7.0, 2), torch.tensor([3, 0]))
    assert [value.tolist() for value in parts.values] == [[8, 2, 3, 7], [18, 12, 13, 17]]
    assert parts.head_output().entropy_T.tolist() == [18, 12, 13, 17]


def test_a_chunk_is_shown_in_the_order_of_the_plan_and_the_whole_in_its_own():
    seen = []

    def loss(output, places):
        seen.append((output.logprobs_T.tolist(), places.tolist()))
        return (output.logprobs_T * places).sum()

    rows = outputs(loss, ascending=torch.argsort(PLACES))
    rows.record(some(1.0, 4), rows.everything)
    value, coefficients = rows.loss(slice(1, 3))
    assert (float(value), coefficients.tolist()) == (2 * 2 + 3 * 5, [[2, 5], [0, 0]])
    value, coefficients = rows.loss(rows.everything)
    assert coefficients.tolist() == [[7, 2, 5, 3], [0] * 4]
    assert not value.requires_grad
    assert seen == [([2, 3], [2, 5]), ([2, 4, 3, 1], [2, 3, 5, 7])]


def test_fields_on_which_the_loss_depends_are_noticed():
    rows = outputs(lambda output, places: output.entropy_T.square().sum())
    assert rows.used_fields == set()
    assert rows.loss(slice(0, 2))[1].tolist() == [[0, 0], [0, 0]]
    rows.record(some(1.0, 4), rows.everything)
    assert rows.loss(slice(0, 2))[1].tolist() == [[0, 0], [22, 24]]
    assert rows.used_fields == {"entropy_T"}


@pytest.mark.parametrize("expected", [None, torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)])
def test_what_is_not_known_is_expected_and_shifted_unevenly(expected):
    rows = outputs(expected=expected)
    rows.record(some(1.0, 4), rows.everything)
    base = torch.zeros(3, dtype=torch.float64) if expected is None else expected[1:]
    assumed = rows.assumed(slice(1, 4))
    assert assumed.tolist() == [base.tolist(), [0] * 3]
    up, down = (rows.assumed(slice(1, 4), slice(2, 3), by) for by in (1, -1))
    assert up[:, 1].tolist() == down[:, 1].tolist() == [3, 13]
    assert (up[0] - base)[[0, 2]].tolist() == [1 / 8, 3 / 8]
    assert (down[0] - base)[[0, 2]].tolist() == [-1 / 8, -3 / 8]
    assert up[1, [0, 2]].tolist() == [0, 0]
