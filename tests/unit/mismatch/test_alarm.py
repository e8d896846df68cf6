import torch

from workbench.mismatch.alarm import MARGIN, RATE, calibrate, statistics
from workbench.mismatch.floor import Floor


def floor(scale=1.0, draws=8, documents=20, tokens=10):
    generator = torch.Generator().manual_seed(0)
    noise = scale * torch.randn(draws, documents * tokens, generator=generator, dtype=torch.float64)
    return Floor(noise, noise, noise, torch.arange(documents).repeat_interleave(tokens))


def test_statistics_by_hand():
    found = statistics(torch.tensor([1.0, -1.0, 3.0]).double(), torch.tensor([0, 0, 2]))
    assert found == {"mean": 5 / 3, "shift": 1.0, "documents": 3.0}


def test_noise_like_the_floors_raises_it_at_most_as_often_as_stated():
    alarm = calibrate(floor(), 20)
    generator = torch.Generator().manual_seed(1)
    documents = torch.arange(20).repeat_interleave(10)
    batches = [torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(300)]
    assert sum(bool(alarm.raised(batch, documents)) for batch in batches) <= 300 * RATE
    tight = {name: value / MARGIN for name, value in alarm.thresholds.items()}
    below = [max(value / tight[name] for name, value in statistics(b, documents).items()) for b in batches]
    assert max(below) > 0.9  # the margin, not slack elsewhere, keeps them below


def test_each_statistic_sees_its_own_cause():
    alarm, documents = calibrate(floor(), 20), torch.arange(20).repeat_interleave(10)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert set(alarm.raised(2 * noise, documents)) >= {"mean"}
    assert set(alarm.raised(noise + 0.5, documents)) >= {"shift"}
    one = torch.where(documents == 3, 3 * noise, noise)
    assert set(alarm.raised(one, documents)) == {"documents"}


def test_a_floor_of_zero_lets_nothing_pass():
    alarm = calibrate(floor(scale=0.0), 20)
    assert alarm.raised(torch.full((200,), 1e-9).double(), torch.arange(20).repeat_interleave(10))["mean"] == float(
        "inf"
    )
