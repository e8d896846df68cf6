"""Copies to the host that do not stop it."""

import pytest
import torch

from workbench.policy.logprobs.host import HostCopy


def test_a_tensor_of_the_host_is_not_copied():
    values = torch.arange(3)
    assert HostCopy(values).wait()[0] is values


@pytest.mark.gpu
def test_values_are_those_at_the_time_of_the_copy_and_the_host_goes_on():
    device = torch.device("cuda")
    square, values = torch.randn(8192, 8192, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)
    square @ square
    HostCopy(values).wait()  # the first pinned memory waits for the device
    stream = torch.cuda.current_stream()
    for _ in range(32):  # tens of milliseconds
        square @ square
    values[1:, 2:].fill_(True)
    assert not stream.query(), "too little work to see who waits for it"
    copy = HostCopy(values)
    under_way = not stream.query()
    values.zero_()
    assert under_way, "the host waited before it asked for the values"
    assert copy.wait()[0].tolist() == [[False] * 3, [False, False, True]]
