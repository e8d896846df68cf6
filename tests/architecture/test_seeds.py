"""Every test draws the same random numbers, whatever ran before."""

import random

import numpy as np
import pytest
import torch

from tests.conftest import seed_torch


@pytest.mark.parametrize("repetition", range(2))
def test_every_library_begins_at_the_same_number(repetition):
    drawn = (random.random(), np.random.rand(), float(torch.rand(())))  # noqa: NPY002 (the state that is seeded)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert drawn == (random.random(), np.random.rand(), float(torch.rand(())))  # noqa: NPY002


def test_seeding_a_test_leaves_no_stack_behind():
    """`torch.manual_seed` would keep one for each kind of device that this machine lacks."""
    if torch.cuda.is_available():
        assert torch.cuda.initial_seed() == 0
        return
    before = len(torch.cuda._queued_calls)
    seed_torch(torch)
    assert len(torch.cuda._queued_calls) == before
