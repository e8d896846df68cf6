"""Curves of arms that share seeds: their random numbers are the same, and the guide has what the record says."""

import json
from pathlib import Path

from experiments.paired_curves import ARMS, RECORD, curve, null_rate, summary
from workbench.compare.power import compare_arms

GUIDE = Path(__file__).parents[2] / "docs/guides/what-a-check-can-see.md"


def test_arms_of_one_seed_draw_the_same_problems_and_tokens():
    first, other, unlike = curve("base", 0, 1), curve("fast", 0, 1), curve("base", 1, 1)
    assert first == other, "before an update the arms are one policy, and draw the same"
    assert first != unlike


def test_the_guide_has_the_recorded_table_and_its_claims():
    record = json.loads(RECORD.read_text())
    assert {name: dict(arm) for name, arm in ARMS.items()} == record["settings"]["arms"]
    assert summary(record) in GUIDE.read_text()
    accused, draws = null_rate(record)
    assert accused <= 0.01 * draws
    results = {arm: compare_arms(record["curves"]["base"], record["curves"][arm]) for arm in ("cp2", "near", "fast")}
    assert {arm: result.verdict for arm, result in results.items()} == dict.fromkeys(results, "different") | {
        "cp2": "equal"
    }
    assert results["near"].seeds_for(results["near"].smallest_effect, paired=False) > 10 * 20
