import pytest

from workbench.errors import SpecError
from workbench.rollouts.sampling import Sampling
from workbench.systems.sampling import sampling_of
from workbench.systems.trl.settings import TRLSettings
from workbench.systems.trl.translate import translate


@pytest.mark.parametrize(
    ("system", "options", "expected"),
    [
        ("trl", {"top_k": 20, "top_p": 0.9, "min_p": 0.1}, Sampling(20, 0.9, 0.1, "truncated", "scaled")),
        ("trl", {"top_k": 0, "top_p": 1.0, "min_p": None}, Sampling()),
        ("prime_rl", {"top_k": -1, "top_p": 0.95}, Sampling(None, 0.95, 0.0, "truncated", "scaled")),
        ("openrlhf", {"top_p": 0.9}, Sampling(None, 0.9, 0.0, "truncated", "scaled")),
        ("slime", {"rollout_top_p": 0.9}, Sampling(None, 0.9, 0.0, "scaled", "scaled")),
        (
            "slime",
            {"rollout_top_k": 50, "rollout_top_p": 0.9, "keep_mask": True},
            Sampling(50, 0.9, 0.0, "scaled", "truncated"),
        ),
    ],
)
def test_options_of_a_system_say_what_its_log_probabilities_are(system, options, expected):
    assert sampling_of(system, options) == expected


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("verl", {}, "one of trl, prime_rl, openrlhf, slime"),
        ("trl", {"rollout_top_p": 0.9}, "its options are top_k, top_p, min_p"),
    ],
)
def test_other_systems_and_options_are_refused(system, options, message):
    with pytest.raises(SpecError, match=message):
        sampling_of(system, options)


def test_a_truncated_sampler_of_trl_is_noted():
    """Its ratios to the sampler are too small by the mass that the sampler kept."""
    notes = translate(TRLSettings.model_validate({"top_p": 0.9})).notes
    assert any(note.startswith("top_p: sampler log-probabilities are within the truncated support") for note in notes)
    plain = translate(TRLSettings.model_validate({})).notes
    assert not any("truncated support" in note for note in plain)
