"""The norm that decides about the clip is that of averaged gradients, the step takes their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workbench.faults import Fault
from workbench.sharding.mesh import Mesh


def _broken(gradient_norms: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    def norms_of_average(model: object, shards: Mapping, mesh: Mesh) -> dict[str, float]:
        return {name: norm / mesh["dp_cp"].size for name, norm in gradient_norms(model, shards, mesh).items()}

    return norms_of_average


FAULT = Fault(
    family="B",
    what="gradients are clipped while they are still averaged over dp x cp ranks: the threshold is that much higher "
    "than asked",
    origin="NVIDIA-NeMo/RL#1693",
    signature="loss, metrics of tokens and gradients right; every norm exactly 1 / (dp cp) of its gradient's, and a "
    "clip that lets through dp cp times what it should",
    seam="gradient_norms",
    broken=_broken,
    shows_in={"layout": {"dp": 2, "cp": 2}},
    hidden_in={"layout": {"dp": 1, "cp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_norms_of_averaged_gradients_are_too_small_by_the_ranks",
    changes_gradient=False,
)
