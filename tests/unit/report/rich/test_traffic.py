"""Traffic across a bridge: both sides at their places, and a table of rows for each exchange."""

import re

import pytest

from workbench.report.rich import traffic as module
from workbench.report.rich.traffic import as_html
from workbench.sharding.bridge import Grid, GridPair
from workbench.sharding.bridge.delivery import Delivery
from workbench.sharding.bridge.traffic import Traffic


def strips(drawn):
    """For each strip, (kind, length) from left to right."""
    return [
        re.findall(r'class="([\w ]+)"[^>]*flex-grow:(\d+)', line)
        for line in re.findall(r'<span class="strip".*?</span>', drawn)
    ]


def cells(drawn):
    """For each table, the cells of each line."""
    return [
        [re.findall(r"<td[^>]*>(\d*)</td>", line) for line in re.findall(r"<tr>(.*?)</tr>", found)[1:]]
        for found in re.findall(r"<table.*?</table>", drawn)
    ]


SHARDS = Traffic.of(GridPair(Grid.of(dp=2), Grid.of(cp=2)), Delivery("sharded", "zigzag"))


def test_both_sides_are_drawn_at_their_places():
    drawn = as_html(SHARDS)
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
    assert cells(as_html(SHARDS)) == [[["", "2"], ["2", ""]]] * 2
    fan_out = as_html(Traffic.of(GridPair(Grid.of(tp=2, dp=1, offset=3), Grid.of(dp=2, offset=3)), tokens=5))
    assert cells(fan_out) == [[["", "5"], ["5", ""]]]
    assert "5 rows from rank 3 to rank 4" in fan_out


def test_what_stays_is_said():
    drawn = as_html(
        Traffic.of(GridPair(Grid.of(cp=2), Grid.of(cp=2)), Delivery("sharded", "zigzag", source_order="zigzag"))
    )
    assert drawn.count("nothing leaves its rank") == 2
    assert cells(drawn) == []


def test_many_ranks_and_many_stretches_are_counted(monkeypatch):
    monkeypatch.setattr(module, "AT_ALL", 1)
    monkeypatch.setattr(module, "_PIECES", 1)
    drawn = as_html(SHARDS)
    assert "1 more ranks are not drawn." in drawn
    assert "4 stretches" in drawn
    assert [len(lines) for lines in cells(drawn)] == [1, 1]


@pytest.mark.parametrize("label", ["rank 1 holds samples 1", "rank 1 holds samples 0, 1: 1, 2"])
def test_strips_are_said_to_screen_readers(label):
    assert f'aria-label="{label}"' in as_html(SHARDS)
