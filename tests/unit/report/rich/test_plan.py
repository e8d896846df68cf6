"""A plan: each rank's tokens at their places in the row."""

import re

import pytest
import torch

from workbench.report.rich import plan as module
from workbench.report.rich.plan import as_html
from workbench.sharding.plan import ShardPlan


def held(drawn):
    """For each rank, (kind, length) from left to right."""
    return [re.findall(r'class="(\w+)"[^>]*flex-grow:(\d+)', line)
            for line in re.findall(r'<span class="strip".*?</span>', drawn)]


def test_zigzag_is_seen():
    assert held(as_html(ShardPlan.make("zigzag", num_tokens=8, cp=2))) == [
        [("held", "2"), ("gap", "4"), ("held", "2")],
        [("gap", "2"), ("held", "4"), ("gap", "2")]]


def test_the_work_of_causal_attention_is_said():
    zigzag, contiguous = (as_html(ShardPlan.make(order, num_tokens=4096, cp=2)) for order in ("zigzag", "contiguous"))
    assert zigzag.count("50% of causal attention") == 2
    assert "25% of causal attention" in contiguous
    assert "75% of causal attention" in contiguous


def test_many_ranks_are_counted(monkeypatch):
    monkeypatch.setattr(module, "AT_ALL", 2)
    drawn = as_html(ShardPlan.make("contiguous", num_tokens=8, cp=4))
    assert len(held(drawn)) == 2
    assert "2 more ranks are not drawn." in drawn


def test_a_plan_of_many_pieces_is_drawn_as_far_as_is_sensible():
    permutation = torch.cat([torch.arange(0, 1000, 2), torch.arange(1, 1000, 2)])
    drawn = as_html(ShardPlan("odd", 2, permutation, torch.argsort(permutation)))
    assert "and 496 more" in drawn
    assert len(drawn) < 60_000


@pytest.mark.parametrize(("plan", "said"), [
    (ShardPlan.make("zigzag", num_tokens=8, cp=2),
     "ShardPlan(zigzag, 8 tokens over cp=2; rank 0: 0-1, 6-7; rank 1: 2-5)"),
    (ShardPlan.make("contiguous", num_tokens=20, cp=10),
     "ShardPlan(contiguous, 20 tokens over cp=10; rank 0: 0-1; rank 1: 2-3; rank 2: 4-5; rank 3: 6-7; "
     "rank 4: 8-9; rank 5: 10-11; rank 6: 12-13; rank 7: 14-15; and 2 more)"),
])
def test_the_text_twin(plan, said):
    assert repr(plan) == said
