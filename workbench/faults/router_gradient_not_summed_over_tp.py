"""Each tensor-parallel rank steps its copy of a router with the gradient of its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.faults import Fault
from workbench.sharding.tensor_parallel import ParameterShard


def _broken(sum_gradients: Callable) -> Callable:
    def sum_all_but_routers(model: object, shards: Mapping[str, ParameterShard], mesh: object) -> None:
        left_out = {
            name: replace(shard, gradient_is_partial=False) if name.endswith("mlp.gate.weight") else shard
            for name, shard in shards.items()
        }
        sum_gradients(model, left_out, mesh)

    return sum_all_but_routers


FAULT = Fault(
    family="S",
    what="routers are replicated over tp, act on a rank's own tokens, and are not among the weights whose gradients "
    "are summed",
    origin="pytorch/torchtitan#2387 (mended in #2416)",
    signature="only routers wrong: each rank has the part of its own tokens, and the copies drift apart from the "
    "first step; norms, experts, all else and the loss right",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"model": {"source": "tiny-qwen3-moe"}, "layout": {"tp": 2, "sequence_parallel": True}},
    hidden_in={"layout": {"sequence_parallel": False}},
    detected_by="tests/faults/test_unseen.py::test_routers_alone_have_their_ranks_part",
    changes_metrics=False,
)
