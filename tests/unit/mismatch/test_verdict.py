import json

import torch

from tests.helpers.gaps import records
from workbench.mismatch import attribute
from workbench.mismatch.verdict import SEEDED, summary


def test_the_text_has_parts_rest_and_floor_and_says_what_does_not_transfer():
    result = attribute("tiny-qwen3", records(temperature=0.7), draws=2)
    text = str(result)
    for word in ("temperature 0.7", "FOUND (sampler)", "interactions", "rest", "safe for this model", SEEDED):
        assert word in text
    assert json.loads(json.dumps(result.as_json()))["parts"][0]["factor"] == "temperature"
    assert (result.verdict, result.ok) == ("explained", False)
    assert result.safe["mean"] > result.floor["mean"] > 0


def test_a_summary_by_hand_leaves_out_what_is_no_number():
    found = summary(torch.tensor([1.0, -3.0, torch.nan]))
    assert (found["mean"], found["mean_distance"], found["largest"], found["tokens"]) == (-1.0, 2.0, 3.0, 2)
    assert summary(torch.tensor([torch.nan]))["tokens"] == 0
