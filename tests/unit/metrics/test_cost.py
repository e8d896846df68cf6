import time

import torch

from workbench.metrics.cost import StepClock, peak_bytes


def test_clock_counts_milliseconds():
    with StepClock(torch.device("cpu")) as clock:
        time.sleep(0.02)
    assert 15 < clock.step_ms < 2000


def test_peak_grows_with_what_is_held():
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(before // 4 + 32_000_000)  # more than the peak so far
    assert peak_bytes(torch.device("cpu")) >= before + 64_000_000
    del ballast
