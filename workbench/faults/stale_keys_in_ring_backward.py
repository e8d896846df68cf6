"""Backward of a ring computes every block with the rank's own keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.attention.block import Block
from workbench.sharding.attention.kernels import Gradients, Kernel


@dataclass(frozen=True)
class _FirstKeys:
    """A kernel that keeps with a query the keys and values that it met first, which are the rank's own."""

    right: Kernel

    def forward(self, *args: object) -> tuple[Tensor, Tensor]:
        return self.right.forward(*args)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        delta: Tensor | None = None,
    ) -> Gradients:
        first_key, first_value = query.__dict__.setdefault("first_keys", (key.clone(), value.clone()))
        return self.right.backward(d_out, query, first_key, first_value, out, lse, block, scale, delta)


def _broken(choose: Callable[..., Kernel]) -> Callable[..., _FirstKeys]:
    def choose_and_keep(*args: object) -> _FirstKeys:
        return _FirstKeys(choose(*args))

    return choose_and_keep


FAULT = Fault(
    family="S",
    what="keys and values go around in backward, and each block is computed with those that were saved in forward, "
    "the rank's own",
    origin="huggingface/diffusers#14265 (mended in #14274)",
    signature="forward and loss exact; in the last layer q_proj, k_proj, v_proj, both norms of heads and the norm "
    "before them wrong, o_proj and MLP right; below it everything wrong; nothing under other attention",
    seam="workbench.sharding.attention.ring:choose",
    broken=_broken,
    shows_in={"layout": {"cp": 2, "attention": "ring"}},
    hidden_in={"layout": {"attention": "gathered"}},
    detected_by="tests/faults/test_unseen.py::test_stale_keys_spare_what_stands_behind_attention",
    changes_metrics=False,
)
