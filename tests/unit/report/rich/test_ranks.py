"""Tokens of ranks: a plan, each at its place in the row, and traffic between two grids."""

import re

import pytest
import torch

from workbench.report.rich import ranks as module
from workbench.report.rich.ranks import plan_html, traffic_html
from workbench.sharding.bridge import Grid, GridPair
from workbench.sharding.bridge.delivery import Delivery
from workbench.sharding.bridge.traffic import Traffic
from workbench.sharding.plan import ShardPlan


def strips(drawn):
    """For each strip, (kind, length) from left to right."""
    return [
        re.findall(r'class="([\w ]+)"[^>]*flex-grow:(\d+)', line)
        for line in re.findall(r'<span class="strip".*?</span>', drawn)
    ]


def test_zigzag_is_seen():
    assert strips(plan_html(ShardPlan.make("zigzag", num_tokens=8, cp=2))) == [
        [("owner r0", "2"), ("owner r1", "4"), ("owner r0", "2")],
        [("held", "2"), ("gap", "4"), ("held", "2")],
        [("gap", "2"), ("held", "4"), ("gap", "2")],
    ]


def test_documents_stand_above_the_ranks_and_count_for_the_work():
    drawn = plan_html(ShardPlan.make("document_zigzag", num_tokens=16, cp=2, document_lengths=(4, 8, 4)))
    assert strips(drawn)[0] == [("prompt", "4"), ("context", "8"), ("prompt", "4")]
    assert "tokens 4 to 11" in drawn
    assert "inside documents on the slowest rank: 1.00 times the mean; where a ring waits at every step: 1.00" in drawn
    drawn = plan_html(ShardPlan.make("contiguous", num_tokens=16, cp=2, document_lengths=(12, 4)))
    assert "41% of causal attention" in drawn, "36 of 88 pairs: the second document sees nothing of the first"
    assert "slowest rank: 1.18 times" in drawn


def test_the_work_of_causal_attention_is_shown():
    zigzag, contiguous = (plan_html(ShardPlan.make(order, num_tokens=4096, cp=2)) for order in ("zigzag", "contiguous"))
    assert zigzag.count("50% of causal attention") == 2
    assert "25% of causal attention" in contiguous
    assert "75% of causal attention" in contiguous


def test_many_ranks_are_counted(monkeypatch):
    monkeypatch.setattr(module, "PLAN_RANKS", 2)
    drawn = plan_html(ShardPlan.make("contiguous", num_tokens=8, cp=4))
    assert len(strips(drawn)) == 3
    assert "2 more ranks are not drawn." in drawn


def test_a_plan_of_many_pieces_is_drawn_by_shares():
    drawn = plan_html(ShardPlan.make("striped", num_tokens=4000, cp=2))
    assert "and 1998 more" in drawn
    assert "4000 pieces of 1 tokens: too short to draw" in drawn
    assert strips(drawn)[1] == [("held share2", "20")] * 200
    assert "10 of tokens 20 to 39" in drawn
    assert len(drawn) < 60_000
    permutation = torch.cat(
        [torch.arange(0, 1000, 2), torch.arange(1000, 1500), torch.arange(1, 1000, 2), torch.arange(1500, 2000)]
    )
    drawn = strips(plan_html(ShardPlan("odd", 2, permutation, torch.argsort(permutation))))
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


# ---- Traffic across a bridge: both sides at their places, and a table of rows for each exchange ----


def cells(drawn):
    """For each table, the cells of each line."""
    return [
        [re.findall(r"<td[^>]*>(\d*)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", result)[1:]]
        for result in re.findall(r"<table.*?</table>", drawn)
    ]


SHARDS = Traffic.of(GridPair(Grid.of(dp=2), Grid.of(cp=2)), Delivery("sharded", "zigzag"))


def test_both_sides_are_drawn_at_their_places():
    drawn = traffic_html(SHARDS)
    assert strips(drawn) == [
        [("owner r0", "4"), ("gap", "4")],
        [("gap", "4"), ("owner r1", "4")],
        [("owner r0", "1"), ("gap", "2"), ("owner r0", "1"), ("owner r0", "1"), ("gap", "2"), ("owner r0", "1")],
        [("gap", "1"), ("owner r0", "2"), ("gap", "2"), ("owner r0", "2"), ("gap", "1")],
    ]
    assert "sample 1, tokens 1 to 2" in drawn
    assert "dp0 cp1 tp0 · 0, 1: 1, 2" in drawn
    assert "general (shards are delivered, not whole sequences); 2 samples of 4 tokens" in drawn


def test_rows_stand_from_line_to_column():
    assert cells(traffic_html(SHARDS)) == [[["", "2"], ["2", ""]]] * 2
    fan_out = traffic_html(Traffic.of(GridPair(Grid.of(tp=2, dp=1, offset=3), Grid.of(dp=2, offset=3)), tokens=5))
    assert cells(fan_out) == [[["", "5"], ["5", ""]]]
    assert "5 rows from rank 3 to rank 4" in fan_out


def test_a_bridge_without_traffic_is_labelled():
    drawn = traffic_html(
        Traffic.of(GridPair(Grid.of(cp=2), Grid.of(cp=2)), Delivery("sharded", "zigzag", source_order="zigzag"))
    )
    assert drawn.count("nothing leaves its rank") == 2
    assert cells(drawn) == []


def test_many_ranks_and_many_stretches_are_counted(monkeypatch):
    monkeypatch.setattr(module, "TRAFFIC_RANKS", 1)
    monkeypatch.setattr(module, "_PIECES", 1)
    drawn = traffic_html(SHARDS)
    assert "1 more ranks are not drawn." in drawn
    assert "4 stretches" in drawn
    assert [len(lines) for lines in cells(drawn)] == [1, 1]


@pytest.mark.parametrize("label", ["rank 1 holds samples 1", "rank 1 holds samples 0, 1: 1, 2"])
def test_strips_have_text_for_screen_readers(label):
    assert f'aria-label="{label}"' in traffic_html(SHARDS)
