import json

import pytest
import torch

from tests.helpers.gaps import computation, records
from workbench.errors import RecordError
from workbench.mismatch import attribute
from workbench.mismatch.configuration import Configuration


def test_stated_differences_are_parts_and_no_causes():
    result = attribute({"model": "tiny-qwen3"}, {"rollouts": records(temperature=0.7), "temperature": 0.7}, draws=2)
    [part] = result.parts
    assert (part.factor, part.stated, result.causes, result.verdict) == ("temperature", True, (), "explained")
    assert result.rest["mean_distance"] < 2e-6 < part.mean_distance
    assert result.ok


def test_parts_interactions_and_rest_add_up_to_the_gap():
    own = computation()
    column = own.column(Configuration(temperature=0.7, precision="bfloat16"))
    given = records()
    for number, one in enumerate(given):
        one["sampler_logprobs"] = column[own.document_T == number].tolist()
    result = attribute("tiny-qwen3", given, draws=0)
    assert {part.factor for part in result.causes} == {"temperature", "trunk precision"}
    parts = sum(result.columns[part.factor] for part in result.parts)
    whole = Configuration()
    alone = own.column(whole) - own.column(Configuration(temperature=0.7))
    assert torch.allclose(result.columns["temperature"], alone)
    interactions = result.columns["explained"] - parts
    assert float(interactions.abs().mean()) == pytest.approx(result.interactions)
    assert result.interactions > 1e-4
    assert torch.allclose(parts + interactions + result.columns["rest"], result.columns["gap"])


def test_a_cause_in_the_trainers_own_values_is_the_trainers():
    given = records()
    own = computation()
    wrong = own.column(Configuration(temperature=0.5)).reshape(8, 12).tolist()
    result = attribute(
        "tiny-qwen3", [one | {"trainer_logprobs": w} for one, w in zip(given, wrong, strict=True)], draws=0
    )
    [cause] = result.causes
    assert (cause.factor, cause.side) == ("temperature", "trainer")
    assert result.rest["mean_distance"] < 5e-6


def test_raw_values_are_told_from_a_temperature_by_the_tokens_or_the_rival_is_named():
    given, own = records(temperature=0.5), computation(records(temperature=0.5))
    raw = own.column(Configuration()).reshape(8, 12).tolist()
    given = [one | {"sampler_logprobs": values} for one, values in zip(given, raw, strict=True)]
    settings = {"model": "tiny-qwen3", "temperature": 0.5}
    result = attribute(settings, {"rollouts": given}, draws=0)
    assert [part.factor for part in result.causes] == ["log-probability mode"]
    assert result.causes[0].rivals == ()
    settings |= {"temperature": 0.98}
    few = attribute(settings, {"rollouts": given[:2]}, draws=0)
    assert few.causes[0].rivals
    assert "cannot be told from" in str(few)


def test_a_gap_that_nothing_explains_raises_an_alarm_and_says_what_is_missing():
    generator = torch.Generator().manual_seed(0)
    given = records()
    for one in given:
        one["sampler_logprobs"] = (torch.tensor(one["sampler_logprobs"]) - torch.rand(12, generator=generator)).tolist()
    result = attribute("tiny-qwen3", given, draws=2)
    assert (result.verdict, result.ok) == ("unexplained", False)
    assert "mean" in result.alarms
    assert any("rest is above the floor" in sentence for sentence in result.undecided)


def test_a_vocabulary_that_is_none_is_refused(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(RecordError, match="a JSON list"):
        attribute("tiny-qwen3", {"rollouts": records(), "vocabulary": path}, draws=0)
