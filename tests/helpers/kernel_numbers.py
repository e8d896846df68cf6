"""Numbers for kernels that are compiled where a GPU is and interpreted elsewhere."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, whole=False):
    """bfloat16 numbers; integers are small, and products of them exact."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=g) if whole else torch.randn(*shape, generator=g)
    return values.to(DEVICE, torch.bfloat16)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def far(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())
