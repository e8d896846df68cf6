"""Documents whose tokens lie on several ranks: numbered by rows or by ids, summed with the adjoint of a sum."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.aligned_ranks import on_ranks
from workbench.errors import ShapeError, SpecError
from workbench.parallel_loss.documents import Documents, SumsOverRanks
from workbench.sharding.mesh import Axis

ALONE = Axis("cp")


def test_rows_are_documents_unless_ids_say_otherwise():
    found = Documents.of(torch.ones(2, 3).bool(), None, None, ALONE)
    assert found.ids.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert found.count == 2
    assert Documents.of(torch.ones(3).bool(), None, None, ALONE).ids.tolist() == [0, 0, 0]


def test_ids_are_counted_over_all_ranks():
    ids = [torch.tensor([0, 0, 1]), torch.tensor([1, 4, -1])]
    counts = on_ranks(lambda align, d, c: Documents.of(ids[c] >= 0, ids[c], None, align.cp).count, cp=2)
    assert counts == [5, 5]


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        (torch.tensor([0, 1]), None),
        (torch.tensor([0.0, 1.0, 1.0]), None),
        (torch.tensor([True, True, False]), None),
        (torch.tensor([0, 1, 2]), 2),
    ],
)
def test_ids_that_are_none_are_refused(ids, count):
    with pytest.raises(ShapeError, match="documents"):
        Documents.of(torch.ones(3).bool(), ids, count, ALONE)


def test_padding_may_have_any_id_below_0_and_what_counts_none():
    ids, mask = torch.tensor([0, 1, -1]), torch.tensor([True, True, False])
    assert Documents.of(mask, ids, None, ALONE).count == 2
    with pytest.raises(ShapeError, match="below 0 on a token that counts"):
        Documents.of(~mask, ids, None, ALONE)


VALUES = torch.tensor([[1.0, 2.0, float("nan"), 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]], dtype=torch.bool)
IDS = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 2]])
CONSUMED = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=torch.float64)
"""What each token wants from its document's sum."""


def summed(align, _, c):
    values = VALUES[c].clone().requires_grad_()
    found = Documents.of(MASK[c], IDS[c], 3, align.cp)
    sums = found.on_tokens(found.totals(values, mask=MASK[c])[0])
    (sums * CONSUMED[c]).sum().backward()
    return sums.detach(), values.grad


def test_sums_and_gradients_are_those_of_the_whole_documents():
    first, second = on_ranks(summed, cp=2)
    assert torch.stack([first[0], second[0]]).tolist() == [[1.0, 11.0, 11.0, 11.0], [11.0, 11.0, 15.0, 15.0]]
    wanted = {0: 1.0, 1: 2.0 + 3 + 4 + 5 + 6, 2: 15.0}
    expected = [[wanted[int(i)] * bool(m) for i, m in zip(*row, strict=True)] for row in zip(IDS, MASK, strict=True)]
    assert torch.stack([first[1], second[1]]).tolist() == expected


def test_half_precision_is_added_up_in_float32():
    found = Documents.of(torch.ones(600).bool(), None, None, ALONE)
    ones = torch.ones(600, dtype=torch.bfloat16)
    total = found.totals(ones, mask=torch.ones(600, dtype=torch.bool))
    assert (total.item(), total.dtype) == (600.0, torch.float32)


@pytest.mark.parametrize("part", ["segment", "pair"])
def test_what_needs_whole_rows_is_refused(part):
    sums = SumsOverRanks(Documents.of(torch.ones(3).bool(), None, None, ALONE), torch.ones(3, dtype=torch.bool))
    with pytest.raises(SpecError, match="from one rank's tokens"):
        getattr(sums, part)(torch.ones(3))
    assert sums.document(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
