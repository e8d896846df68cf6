"""Effect of a sampler's kind of weights: what is measured, and that the record says what the guide does."""

import json
from pathlib import Path

from experiments.lora_sampler import KINDS, RECORD, measure

GUIDE = Path(__file__).parents[2] / "docs/guides/lora.md"


def test_a_small_measurement_has_every_kind():
    record = measure(steps=(1,), rates=(1e-4,), documents=3)
    [result] = record["adapters"].values()
    assert result["samplers"].keys() == set(KINDS)
    merged, unmerged, rounded = (result["samplers"][kind] for kind in KINDS)
    assert 0 < merged["learned_in_weights"] < 0.9, "a first update is below half a unit of most weights"
    assert "learned_in_weights" not in unmerged
    assert 0 < unmerged["weights_alone"]["mean"] < merged["weights_alone"]["mean"]
    assert rounded["weights_alone"]["mean"] > 0
    assert 0 < record["base"]["mean"] < 0.1


def test_the_guide_has_the_recorded_numbers():
    adapters, text = json.loads(RECORD.read_text())["adapters"], " ".join(GUIDE.read_text().split())
    fast, slow = (
        adapters[f"1 steps at {rate}"]["samplers"]["merged"]["learned_in_weights"] for rate in ("0.0001", "1e-05")
    )
    assert f"{100 * fast:.0f} % of what a first step at 1e-4 has learned, and {100 * slow:.0f} % of one at 1e-5" in text
    for result in adapters.values():
        kinds = result["samplers"]
        assert kinds["unmerged"]["weights_alone"]["mean"] < 0.002 * result["learned"]["mean"]
        merged, rounded = (kinds[kind]["weights_alone"]["mean"] for kind in ("merged", "merged_bfloat16"))
        assert abs(merged - rounded) < 0.1 * merged
