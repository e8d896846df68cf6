import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.metric_rows import inputs_of, nasty_documents, segment_lengths
from workbench.metrics.cost import StepClock, peak_bytes
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec


def test_clock_counts_milliseconds():
    with StepClock(torch.device("cpu")) as clock:
        time.sleep(0.02)
    assert 15 < clock.step_ms < 2000


def test_peak_memory_grows_with_live_tensors():
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(before // 4 + 32_000_000)  # more than the peak so far
    assert peak_bytes(torch.device("cpu")) >= before + 64_000_000
    del ballast


class NoWaiting(TorchDispatchMode):
    """Refuses to bring a number from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "this waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["basic", "full"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_measuring_waits_for_nothing(level, name):
    documents = nasty_documents(4)
    inputs, mask = inputs_of(documents)
    spec = LossSpec(name=name)
    slots = DocumentSlots(0, len(documents), segment_lengths(documents))
    with NoWaiting():
        assert policy_metrics(inputs, {}, mask, level, spec, slots)
    with NoWaiting(), pytest.raises(AssertionError, match="this waits"):
        float(torch.ones(1).sum())
