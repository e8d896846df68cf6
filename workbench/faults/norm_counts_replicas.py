"""The gradient norm counts a weight once for every tp rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workbench.faults import Fault
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard


def _broken(gradient_norms: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    def norms_of_all_copies(model: object, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
        copies = mesh["tp"].size
        return {
            name: norm * copies**0.5 if shards[name].dim is None else norm
            for name, norm in gradient_norms(model, shards, mesh).items()
        }

    return norms_of_all_copies


FAULT = Fault(
    family="S",
    what="squares of gradients that all tp ranks hold are summed over tp, like those of which each holds a part",
    origin="pytorch/pytorch#180346, NVIDIA/Megatron-LM#6489, NovaSky-AI/SkyRL#211",
    signature="gradients exact; norms of replicated weights sqrt(tp) times too big, and the global norm by their "
    "share, so that a threshold clips too early",
    seam="gradient_norms",
    broken=_broken,
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"tp": 1}},
    changes_gradient=False,
)
