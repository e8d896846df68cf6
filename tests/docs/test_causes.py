"""The page of causes has each name that `diagnose` gives, with its sentence."""

import re

from tests.docs.pages import ROOT
from workbench.diagnose.causes import CAUSES

PARTS = "cp|dp|tp|micro_batches|accumulation"
PRODUCT = re.compile(rf"(times|over)_({PARTS})_(over_)?({PARTS}).*")
"""Factors of several of a run's parts at once, which the page describes."""


def test_every_cause_is_on_the_page_with_its_sentence():
    rows = set((ROOT / "docs/reference/causes.md").read_text().splitlines())
    single = {f"| `{cause.name}` | {cause.description} |" for cause in CAUSES if not PRODUCT.fullmatch(cause.name)}
    assert single == {row for row in rows if row.startswith("| `")}
    assert len(single) < len(CAUSES)
