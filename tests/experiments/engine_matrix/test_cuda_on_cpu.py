"""A package that names CUDA gets tensors of the CPU, and the rest of torch is as it was."""

import torch

from experiments.engine_matrix.drivers.cuda_on_cpu import CudaOnCpu


def test_tensors_asked_for_on_cuda_are_of_the_cpu_and_say_cuda():
    current_device = torch.cuda.current_device
    with CudaOnCpu():
        zeros = torch.zeros(2, device="cuda", dtype=torch.int)
        assert zeros.device.type == torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"
        weight = torch.ones(2, requires_grad=True)
        (weight.cuda() * torch.tensor([2.0, 3.0], device="cuda:0")).sum().backward()
        assert weight.grad.tolist() == [2.0, 3.0]
        assert weight.grad.type() == "torch.cuda.FloatTensor"
        assert weight.type(torch.float64).dtype == torch.float64
        assert torch.empty(2, device="meta").is_meta
    assert weight.type() == "torch.FloatTensor"
    assert torch.cuda.current_device is current_device
