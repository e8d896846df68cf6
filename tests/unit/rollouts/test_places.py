"""Places of each number, against one comparison a number."""

from __future__ import annotations

import pytest
import torch

from workbench.rollouts.places import places_of_each


@pytest.mark.parametrize("ids", [[], [0], [-1, -1], [0, 0, 1, 1, 1, 2, -1, -1], [9, 3, 9, -1, 3, 3, 0, 9]])
def test_places_are_those_of_a_comparison_with_each_number(ids):
    ids_T = torch.tensor(ids, dtype=torch.int64)
    found = places_of_each(ids_T)
    assert list(found) == sorted(set(ids))
    for number, places in found.items():
        assert places.tolist() == torch.nonzero(ids_T == number)[:, 0].tolist()


def test_places_ascend_in_long_rows_too():
    """A sort that is not stable keeps short rows in order."""
    ids_T = torch.randint(-1, 40, (20_000,), generator=torch.Generator().manual_seed(0))
    for number, places in places_of_each(ids_T).items():
        assert torch.equal(places, torch.nonzero(ids_T == number)[:, 0])
