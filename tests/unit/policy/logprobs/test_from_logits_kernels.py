import torch

from workbench.policy.logprobs import from_logits_kernels
from workbench.policy.logprobs.from_logits import _TorchPasses
from workbench.policy.logprobs.from_logits_kernels import TritonPasses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_row_longer_than_a_block_is_read_whole(monkeypatch):
    """The maximum rises, falls and is absent between blocks."""
    monkeypatch.setattr(from_logits_kernels, "_block", lambda columns: 16)
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 61, generator=g)
    logits[0, :16] -= 50
    logits[1, 40:] += 50
    logits[2, :48] = -torch.inf
    logits[3] = -torch.inf
    targets = torch.tensor([3, 60, 50, 0])
    call = targets.to(DEVICE), 0.7, frozenset({"mean_squared_logit"})
    result = TritonPasses().forward(logits.to(DEVICE), *call).cpu()
    expected = _TorchPasses().forward(logits.double(), targets, *call[1:])
    torch.testing.assert_close(result[1:].double(), expected[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[0, :3].double(), expected[0, :3], rtol=1e-5, atol=1e-5)


def test_a_row_that_nothing_moves_is_not_read():
    logits = torch.full((2, 37), torch.nan, device=DEVICE)
    logits[1] = torch.randn(37, generator=torch.Generator().manual_seed(2))
    numbers = torch.zeros(7, 2, device=DEVICE)
    numbers[0, 1] = 1.0
    out = torch.full_like(logits, torch.nan)
    TritonPasses().backward(logits, out, torch.tensor([3, 4], device=DEVICE), 1.0, numbers)
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], logits[1].exp(), rtol=1e-5, atol=0)
