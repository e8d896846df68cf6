"""Chunks for an engine, forward and back, on the device that is here; shared by the tests of the Triton engine."""

from __future__ import annotations

import torch

from workbench.policy.logprobs import driver
from workbench.policy.logprobs.engine import Accumulators, RowGradients
from workbench.policy.logprobs.head import make_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERYTHING = frozenset({"entropy", "logsumexp", "mean_squared_logit", "mean_logit"})
RELATIVE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 4e-3}
"""Relative error of a gradient: that of one rounding of each element, and of the sums of float32."""


def triton(*tensors, **call):
    """Log-probabilities by the driver over the Triton engine."""
    from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine

    return driver.token_logprobs(*tensors, engine=ExpEpilogueEngine, **call)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().clamp(min=1e-3))


def chunk_and_back(
    make,
    hidden,
    weight,
    bias,
    targets,
    temperature,
    gradients,
    *,
    keep="scratch",
    outputs=EVERYTHING,
    first=True,
    into=None,
    **head,
):
    """A chunk forward, and back into memory full of NaN."""
    engine = make(make_head(weight, bias_V=bias, **head))
    gradients = [None if x is None else x.to(hidden.device) for x in gradients]
    chunk = engine.forward(hidden, targets, temperature, outputs=outputs, keep=keep)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    into = into or Accumulators(
        torch.full_like(hidden, torch.nan),
        torch.full_like(weight, torch.nan, dtype=wide),
        None if bias is None else torch.full_like(bias, torch.nan, dtype=wide),
    )
    engine.backward(chunk, RowGradients(*gradients), into, slice(0, len(hidden)), first=first)
    return chunk, into


def like_a_model(
    rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, a head and targets with probabilities between about 0.05 and 0.95."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    weight = (torch.randn(vocabulary, width, device=DEVICE, generator=g) * (1.28 / width**0.5)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), device=DEVICE, generator=g)
    towards = 6 + 3.5 * torch.rand(rows, 1, device=DEVICE, generator=g)
    hidden = torch.randn(rows, width, device=DEVICE, generator=g) + towards * weight[targets].float()
    return hidden.to(dtype), weight, targets


def plain(dtype=torch.float32, rows=21, columns=53, depth=40, seed=9):
    """Arguments of `chunk_and_back`: no bias, one temperature, and a gradient of the log-probability alone."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, depth, generator=g).to(DEVICE, dtype),
        (torch.randn(columns, depth, generator=g) / 3).to(DEVICE, dtype),
        None,
        torch.randint(0, columns, (rows,), generator=g).to(DEVICE),
        0.7,
        [torch.randn(rows, generator=g).to(DEVICE), None, None, None],
    )
