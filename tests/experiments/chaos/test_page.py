"""The campaigns of chaos as a page: every case is in one row, and there are as many as were promised."""

from __future__ import annotations

import json

import pytest

from experiments.chaos import page
from tests.chaos.campaign import RECORD, totals


def test_the_campaigns_have_tried_enough():
    record = json.loads(RECORD.read_text())
    assert record["totals"] == totals(record["campaigns"])
    assert record["totals"]["all: SIGKILL"] >= 1000
    assert record["totals"]["all: SIGSTOP and early exit"] >= 200
    assert record["totals"]["malformed spec"] >= 10_000
    assert record["totals"]["all: rollouts"] >= 5000
    assert record["totals"]["damaged record"] >= 2000


def test_failures_are_told_and_every_case_is_in_a_row():
    campaign = {"minutes": 2.0, "cpu_count": 2, "cases": {"malformed spec": 3, "EIO at a file operation": 1}}
    failed = campaign | {"failures": [{"kind": "kills"}], "cases": {"limit on descriptors": 2}}
    record = {"campaigns": [campaign | {"failures": []}, failed]}
    assert "It did not hold 1 times (1 in kills), never in the last 0 campaigns" in page.answer(record)
    assert sum(int(count) for _, count in page.rows(record)) == 6
    record["campaigns"][0]["cases"]["another"] = 1
    with pytest.raises(AssertionError, match="in no row"):
        page.rows(record)
