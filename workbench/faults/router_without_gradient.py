"""What the router says reaches the experts as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.faults import Fault


def _broken(forward: Callable) -> Callable:
    def from_numbers(self: Any, hidden_states: Tensor) -> Tensor:
        tokens_TD = hidden_states.flatten(0, -2)
        _, weights_TK, experts_TK = self.gate(tokens_TD)
        return self.experts(tokens_TD, experts_TK, weights_TK.detach()).view_as(hidden_states)

    return from_numbers


FAULT = Fault(
    family="H",
    what="routing weights are gathered over ranks by a collective that has no gradient: the router learns from "
    "auxiliary losses alone",
    origin="NVIDIA-NeMo/Automodel#2995",
    signature="loss and metrics right; gradient of every router exactly 0, experts of the last layer right, what lies "
    "below a router wrong by the share that came through it",
    seam="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock.forward",
    broken=_broken,
    shows_in={"model": {"source": "tiny-qwen3-moe"}},
    hidden_in={"model": {"source": "tiny-qwen3"}},
    detected_by="tests/faults/test_unseen.py::test_a_detached_router_spares_the_last_experts",
    changes_metrics=False,
)
