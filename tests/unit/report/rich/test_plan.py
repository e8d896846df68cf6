"""A plan: each rank's tokens at their places in the row."""

import re

import pytest
import torch

from workbench.report.rich import plan as module
from workbench.report.rich.plan import as_html
from workbench.sharding.plan import ShardPlan


def strips(drawn):
    """For each strip, (kind, length) from left to right."""
    return [
        re.findall(r'class="([\w ]+)"[^>]*flex-grow:(\d+)', line)
        for line in re.findall(r'<span class="strip".*?</span>', drawn)
    ]


def test_zigzag_is_seen():
    assert strips(as_html(ShardPlan.make("zigzag", num_tokens=8, cp=2))) == [
        [("owner r0", "2"), ("owner r1", "4"), ("owner r0", "2")],
        [("held", "2"), ("gap", "4"), ("held", "2")],
        [("gap", "2"), ("held", "4"), ("gap", "2")],
    ]


def test_documents_stand_above_the_ranks_and_count_for_the_work():
    drawn = as_html(ShardPlan.make("document_zigzag", num_tokens=16, cp=2, document_lengths=(4, 8, 4)))
    assert strips(drawn)[0] == [("prompt", "4"), ("context", "8"), ("prompt", "4")]
    assert "tokens 4 to 11" in drawn
    assert "inside documents on the slowest rank: 1.00 times the mean; where a ring waits at every step: 1.00" in drawn
    drawn = as_html(ShardPlan.make("contiguous", num_tokens=16, cp=2, document_lengths=(12, 4)))
    assert "41% of causal attention" in drawn, "36 of 88 pairs: the second document sees nothing of the first"
    assert "slowest rank: 1.18 times" in drawn


def test_the_work_of_causal_attention_is_said():
    zigzag, contiguous = (as_html(ShardPlan.make(order, num_tokens=4096, cp=2)) for order in ("zigzag", "contiguous"))
    assert zigzag.count("50% of causal attention") == 2
    assert "25% of causal attention" in contiguous
    assert "75% of causal attention" in contiguous


def test_many_ranks_are_counted(monkeypatch):
    monkeypatch.setattr(module, "AT_ALL", 2)
    drawn = as_html(ShardPlan.make("contiguous", num_tokens=8, cp=4))
    assert len(strips(drawn)) == 3
    assert "2 more ranks are not drawn." in drawn


def test_a_plan_of_many_pieces_is_drawn_by_shares():
    drawn = as_html(ShardPlan.make("striped", num_tokens=4000, cp=2))
    assert "and 1998 more" in drawn
    assert "4000 pieces of 1 tokens: too short to draw" in drawn
    assert strips(drawn)[1] == [("held share2", "20")] * 200
    assert "10 of tokens 20 to 39" in drawn
    assert len(drawn) < 60_000
    permutation = torch.cat(
        [torch.arange(0, 1000, 2), torch.arange(1000, 1500), torch.arange(1, 1000, 2), torch.arange(1500, 2000)]
    )
    drawn = strips(as_html(ShardPlan("odd", 2, permutation, torch.argsort(permutation))))
    assert drawn[1] == [("held share2", "10")] * 100 + [("held share4", "10")] * 50 + [("gap", "10")] * 50


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            ShardPlan.make("zigzag", num_tokens=8, cp=2),
            "ShardPlan(zigzag, 8 tokens over cp=2; rank 0: 0-1, 6-7; rank 1: 2-5)",
        ),
        (
            ShardPlan.make("contiguous", num_tokens=20, cp=10),
            "ShardPlan(contiguous, 20 tokens over cp=10; rank 0: 0-1; rank 1: 2-3; rank 2: 4-5; rank 3: 6-7; "
            "rank 4: 8-9; rank 5: 10-11; rank 6: 12-13; rank 7: 14-15; and 2 more)",
        ),
    ],
)
def test_the_text_twin(plan, said):
    assert repr(plan) == said
