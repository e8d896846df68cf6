"""Results that readings of a step share."""

import torch

from workbench.check.memo import KEPT, Memo


def test_a_result_is_computed_once_for_the_same_tensors_and_settings():
    memo, one, calls = Memo(), torch.ones(2), []
    for _ in range(2):
        assert memo.get("a", (one, None), "x", lambda: calls.append(1) or 5) == 5
    memo.get("a", (one, None), "y", lambda: calls.append(1) or 6)
    memo.get("a", (one.clone(), None), "x", lambda: calls.append(1) or 7)
    memo.get("b", (one, None), "x", lambda: calls.append(1) or 8)
    assert len(calls) == 4


def test_the_ones_used_least_recently_are_dropped():
    memo, calls = Memo(), []
    for number in [*range(KEPT), 0, KEPT, 0, 1]:
        memo.get("a", (), number, lambda number=number: calls.append(number))
    assert calls == [*range(KEPT + 1), 1]
