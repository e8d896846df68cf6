"""Metrics of a whole step: gradient norms by group of parameters and by layer, wall time, peak memory.

A wrong factor in one part of a model (a head whose gradient is lost, norms that miss a sum over tp) is hidden in the
global norm and visible here. A parameter's group follows from the full names of the modules on its path.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from workbench.metrics.definitions import Level

SAMPLER_MOVED = "sampler/moved/fraction"
"""Step record: share of a bfloat16 or float16 sampler's weights that all updates so far have changed, in its dtype."""
MOST_MOVED = 0.5
"""A smaller share is reported. A sampler in bfloat16 sees about 5 % after 6 steps at a rate of 1e-6
(`experiments/precision`)."""

GROUPS: Mapping[str, frozenset[str]] = {
    "norm": frozenset(
        {
            "norm",
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "q_norm",
            "k_norm",
            "ln_f",
            "ln_1",
            "ln_2",
            "final_layernorm",
            "enorm",
            "hnorm",
            "post_norm",
        }
    ),
    "attention": frozenset({"self_attn", "attn", "attention", "linear_attn"}),
    "mlp": frozenset({"mlp", "feed_forward", "block_sparse_moe"}),
    "embedding": frozenset({"embed_tokens", "wte", "wpe", "embed_in"}),
    "head": frozenset({"lm_head", "embed_out", "score"}),
}
"""Group -> names of modules. The first group with a module on the parameter's path wins, so the norms of queries and
keys are norms. Tied weights are one parameter, which belongs to the embedding."""

LAYERS = frozenset({"layers", "h", "blocks"})
"""Names of the list of layers; the layer's number follows."""


def parameter_group(name: str) -> str:
    """Return the group of a parameter; "other" if no module on its path is known.

    Example:
        >>> parameter_group("model.layers.3.self_attn.q_norm.weight"), parameter_group("lm_head.weight")
        ('norm', 'head')
    """
    modules = set(name.split("."))
    return next((group for group, known in GROUPS.items() if known & modules), "other")


def parameter_layer(name: str) -> int | None:
    """Return the number of a parameter's layer, or None."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts[:-1]) if part in LAYERS and parts[i + 1].isdecimal()]
    return int(parts[places[0] + 1]) if places else None


def gradient_group_norms(norms: Mapping[str, float], level: Level = "basic") -> dict[str, float]:
    """Return L2 norms of the gradient, ``gradient/norm/<group>`` and, at level full, ``gradient/norm/layer_<number>``.

    ``norms`` are of the *full* gradients (`workbench.sharding.gradients.gradient_norms`), so there is nothing to merge.
    Groups without parameters are left out.

    Formula:  norm of a group = sqrt(sum of its parameters' squared norms); squares of groups add up to the global one.
    """
    if level == "none":
        return {}
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        layer = parameter_layer(name)
        keys = [parameter_group(name)] + ([f"layer_{layer:02d}"] if level == "full" and layer is not None else [])
        for key in keys:
            squares[key] = squares.get(key, 0.0) + float(norm) ** 2
    order = [*GROUPS, "other"]
    ordered = sorted(squares, key=lambda key: (order.index(key), "") if key in order else (len(order), key))
    return {f"gradient/norm/{key}": math.sqrt(squares[key]) for key in ordered}


class StepClock:
    """Wall-clock timer of a region on a device, in ``step_ms``; waits for the device at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step_ms = 0.0

    def __enter__(self) -> StepClock:
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.step_ms = (self._now() - self._start) * 1e3

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now, where the system allows it (Linux)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory since `forget_peak`: allocated on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
