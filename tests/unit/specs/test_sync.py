"""Settings of a sampler's weights: what would do nothing, or train on nothing, is refused with its fix."""

import pytest

from tests.helpers.online_runs import spec_of
from workbench.errors import SpecError
from workbench.specs.run import RunSpec
from workbench.specs.sync import SyncSpec


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync": {"mixed": True}}, "give queue"),
        ({"sync": {"in_flight_tokens": 2}}, "in_flight_tokens without queue"),
        ({"sync": {"queue": 1, "cache": "recomputed"}}, "give in_flight_tokens"),
        ({"sync": {"late": ["q_proj"]}}, "give lag"),
        ({"sync": {"queue": 2, "max_staleness": 1}}, "every completion is 2 optimizer steps old"),
        ({"sync": {"queue": 2, "max_staleness": 2}}, "would leave nothing out"),
        ({"sync": {"queue": 1, "max_staleness": 2, "mixed": True}}, "would leave nothing out"),
        ({"online": {"old_logprobs": "behaviour"}}, "without sync.queue"),
        ({"loss": {"old_policy": "interpolated"}}, "take old_logprobs: sampler"),
        ({"loss": {"old_policy": "interpolated", "correction": {"kind": "m2po"}}}, "interpolated is not known before"),
        (
            {
                "sync": {"queue": 1, "in_flight_tokens": 1, "cache": "recomputed"},
                "routing": {"replay": "recorded"},
            },
            "take cache: kept",
        ),
        (
            {"sync": {"queue": 1}, "online": {"old_logprobs": "behaviour"}, "routing": {"replay": "recorded"}},
            "routes are those of one",
        ),
    ],
)
def test_settings_that_conflict_are_refused(changes, words):
    with pytest.raises((SpecError, ValueError), match=words):
        spec_of(**changes)


def test_settings_without_a_sampler_are_refused():
    with pytest.raises(ValueError, match=r"sync\.queue without online\.task"):
        RunSpec.model_validate({"sync": {"queue": 1}})


def test_defaults_leave_the_identity_of_a_run_alone():
    assert '"sync"' not in spec_of().canonical()
    assert "staleness_high" not in spec_of().canonical()
    assert '"queue":1' in spec_of(sync={"queue": 1}).canonical()
    assert not SyncSpec().asynchronous
    assert SyncSpec(queue=1).asynchronous
