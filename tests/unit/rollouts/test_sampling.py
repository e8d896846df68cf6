import pytest

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.sampling import ENGINE_MODES, Sampling, quantity_of


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": True}, "top_k = True"),
        ({"top_p": 0.0}, "top_p = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"min_p": -0.1}, "min_p = -0.1"),
        ({"sampler_logprobs": "processed"}, "sampler_logprobs = 'processed'"),
        ({"trainer_logprobs": ""}, "trainer_logprobs = ''"),
    ],
)
def test_settings_that_no_sampler_has_are_refused(settings, found):
    with pytest.raises(ShapeError, match=found):
        Sampling(**settings)


def test_each_truncation_is_one():
    assert not Sampling(sampler_logprobs="raw").truncates
    for settings in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert Sampling(**settings).truncates
        assert Sampling(**settings).changed() == settings


def test_modes_of_engines_are_quantities():
    assert quantity_of("raw_logprobs") == "raw", "vLLM's default: before the temperature"
    assert quantity_of("processed_logprobs") == "truncated"
    assert quantity_of("sglang") == "scaled", "after the temperature, before top-p"
    assert {quantity_of(mode) for mode in ENGINE_MODES} == {"raw", "scaled", "truncated"}
    assert quantity_of("scaled") == "scaled"
    with pytest.raises(SpecError, match="their normalizer is not reported"):
        quantity_of("raw_logits")
    with pytest.raises(SpecError, match="an unknown mode"):
        quantity_of("cooked")
