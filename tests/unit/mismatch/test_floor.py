"""The floor, drawn, against the distance from the truth of the computation itself: two methods that share nothing."""

import pytest
import torch

from tests.helpers.gaps import computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.floor import measure_floor, noise_of, truth

LONG = [
    {
        "prompt_ids": [n % 19, 4],
        "completion_ids": torch.randint(0, 19, (40,), generator=torch.Generator().manual_seed(n)).tolist(),
        "sampler_logprobs": [-1.0] * 40,
    }
    for n in range(24)
]


def rms(values):
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("settings", [{}, {"precision": "bfloat16"}], ids=["float32", "bfloat16"])
def test_it_is_within_20_percent_of_the_distance_from_the_truth(settings):
    own, configuration = computation(LONG), Configuration(**settings)
    real = rms(own.column(configuration) - truth(own, configuration))
    drawn = rms(noise_of(own, configuration, draws=2, seed=0))
    assert 0.8 < drawn / real < 1.2


def test_the_sides_are_drawn_apart_and_float64_has_none():
    own = computation(LONG[:4])
    floor = measure_floor(own, Configuration(precision="float64"), Configuration(), draws=2)
    assert rms(floor.trainer_KT) == 0
    assert floor.rms == rms(floor.sampler_KT) > 0
    both = measure_floor(own, Configuration(), Configuration(), draws=2)
    assert 1.1 < both.rms / floor.rms < 1.8
    assert not torch.equal(both.trainer_KT, both.sampler_KT)
    more = both.with_draws(measure_floor(own, Configuration(), Configuration(), draws=1, seed=2))
    again = measure_floor(own, Configuration(), Configuration(), draws=3)
    assert torch.equal(more.noise_KT, again.noise_KT)
    assert set(both.as_json()) >= {"mean", "rms", "p99", "draws", "tokens"}


def test_the_truth_of_recorded_routes_is_on_these_routes():
    """Routers that are lifted to float64 lost what replays them, and a side that states `routes: recorded` crashed."""
    mixtures = 2
    rows = [
        {**row, "sampler_routes": [[[0, 3]] * mixtures] * (len(row["prompt_ids"]) + len(row["completion_ids"]))}
        for row in LONG[:4]
    ]
    own = computation(rows, model="tiny-qwen3-moe")
    recorded = Configuration(routes="recorded")
    exact = truth(own, recorded)
    assert (own.column(recorded) - exact).abs().max() < 1e-4
    assert (truth(own, Configuration()) - exact).abs().max() > 1e-3
    assert rms(noise_of(own, recorded, draws=1, seed=0)) > 0
