"""Gradients that every tensor-parallel rank has whole are summed over them all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.faults import Fault
from workbench.sharding.tensor_parallel import ParameterShard


def _broken(sum_gradients: Callable) -> Callable:
    def sum_all_norms(model: object, shards: Mapping[str, ParameterShard], mesh: object) -> None:
        all_parts = {
            name: replace(shard, gradient_is_partial=shard.gradient_is_partial or shard.dim is None)
            for name, shard in shards.items()
        }
        sum_gradients(model, all_parts, mesh)

    return sum_all_norms


FAULT = Fault(
    family="S",
    what="all replicated weights are marked for the sum over tp, also norms that act on what every rank holds whole",
    origin="NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715, modelscope/mcore-bridge#101",
    signature="norms between blocks, and the last one, exactly tp times the right gradient; q_norm and k_norm, which "
    "need the sum, and all other parameters right; loss right; nothing under sequence parallelism",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"sequence_parallel": True}},
    detected_by="tests/faults/test_unseen.py::test_norms_that_were_whole_are_tp_times_too_big",
    changes_metrics=False,
)
