"""Rows, a head and every option of its log-probabilities, drawn from a seed; shared by the tests of implementations."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.truncated_support import TruncatedSupport

OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": ("one", "0.7", "each"),
    "bias": (False, True),
    "logit_scale": (1.0, 1.7),
    "soft_cap": (None, 2.0),
    "padding": (0, 3),
    "active": ("all", "some", "none"),
    "support": (False, True),
    "outputs": (
        (),
        ("entropy",),
        ("logsumexp", "mean_squared_logit"),
        ("entropy", "logsumexp", "mean_squared_logit"),
        ("logsumexp", "mean_logit"),
    ),
    "fp32_head": (False, True),
}
"""What an implementation may be asked, by name; the first value is the default."""

PLAIN = {name: values[0] for name, values in OPTIONS.items()}


def crossed(count: int | None, seed: int = 0) -> list[dict[str, Any]]:
    """So many different combinations of all options, or all of them."""
    everything = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    return everything if count is None else random.Random(seed).sample(everything, count)


def named(options: dict[str, Any]) -> str:
    """Return the differences from the default, for the name of a test."""
    return " ".join(f"{name}={value}" for name, value in options.items() if value != PLAIN[name]) or "plain"


def problem(
    options: dict[str, Any],
    *,
    tokens: int = 11,
    vocabulary: int = 23,
    width: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Leaves (hidden, weight, bias) and the keyword arguments of a call, targets among them."""
    g = torch.Generator().manual_seed(seed)
    exists = vocabulary - options["padding"]
    leaves = [
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    ]
    targets_T = torch.randint(0, exists, (tokens,), generator=g)
    temperature_T = 0.4 + torch.rand(tokens, generator=g, dtype=torch.float64)
    active_T = torch.rand(tokens, generator=g) < 0.6
    sizes = torch.randint(0, exists, (tokens,), generator=g).tolist()
    kept = TruncatedSupport.of(
        [torch.randperm(exists, generator=g)[:size].tolist() for size in [0, 1, *sizes][:tokens]]
    )
    if options["active"] != "all":
        targets_T[2::4] = -100
    call = {
        "targets_T": targets_T,
        "temperature": {"one": 1.0, "0.7": 0.7, "each": temperature_T}[options["temperature"]],
        "logit_scale": options["logit_scale"],
        "soft_cap": options["soft_cap"],
        "valid": exists if options["padding"] else None,
        "active_T": {"all": None, "some": active_T, "none": torch.zeros_like(active_T)}[options["active"]],
        "support": kept if options["support"] else None,
        "outputs": options["outputs"],
        "fp32_head": options["fp32_head"],
    }
    return leaves if options["bias"] else [*leaves[:2], None], call


def wants(said: TokenLogprobs, seed: int = 1) -> list[torch.Tensor | None]:
    """Return a random coefficient of each output: the gradient of some loss."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(len(said.logprobs_T), generator=g, dtype=torch.float64) for _ in said]
    return [None if x_T is None else w_T.to(x_T) for x_T, w_T in zip(said, drawn, strict=True)]


def answers(
    implementation: Any, leaves: list[torch.Tensor | None], call: dict[str, Any], /, **more: Any
) -> tuple[TokenLogprobs, list[torch.Tensor | None]]:
    """Return the detached outputs of an implementation, and the gradients of a random sum of all of them by leaf."""
    hidden_TD, weight_VD, bias_V = (None if x is None else x.clone().requires_grad_() for x in leaves)
    output = implementation(hidden_TD, weight_VD, bias_V=bias_V, **call, **more)
    loss = sum((x_T * w_T).sum() for x_T, w_T in zip(output, wants(output), strict=True) if x_T is not None)
    loss.backward()
    return (
        TokenLogprobs(*(None if x_T is None else x_T.detach() for x_T in output)),
        [None if x is None else x.grad for x in (hidden_TD, weight_VD, bias_V)],
    )


def assert_same(
    found: tuple[TokenLogprobs, list[torch.Tensor | None]],
    expected: tuple[TokenLogprobs, list[torch.Tensor | None]],
    *,
    atol: float = 1e-12,
) -> None:
    """Compare numbers and gradients; an output that is None must be None in both."""
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=atol, atol=atol)
