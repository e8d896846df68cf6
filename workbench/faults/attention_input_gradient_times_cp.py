"""Each rank does all of a layer's attention, and what the copies want from its input is added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.faults import Fault


def _broken(forward: Callable) -> Callable:
    def from_summed_copies(self: Any, hidden_states: Tensor, *args: Any, **how: Any) -> Any:
        if (shard := how.get("shard")) is not None:  # a model that is being loaded has none
            cp = shard.inner.size * shard.outer.size
            hidden_states = hidden_states + (cp - 1) * (hidden_states - hidden_states.detach())
        return forward(self, hidden_states, *args, **how)

    return from_summed_copies


FAULT = Fault(
    family="S",
    what="tokens are gathered for a layer that all ranks compute alike, and the adjoint of the gathering sums "
    "identical gradients over cp",
    origin="THUDM/slime#1748, radixark/miles#852 (linear attention under context parallelism)",
    signature="forward and loss exact; in the last layer all right but the norm before attention, exactly cp times "
    "too big; below it what comes through attention is too big by cp for each layer that it passed",
    seam="transformers.models.qwen3.modeling_qwen3:Qwen3Attention.forward",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_copies_of_attention_inflate_what_lies_before_it",
    changes_metrics=False,
)
