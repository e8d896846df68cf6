"""The engine averages gradients over cp, and nobody multiplies the loss by cp."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault


def _broken(sum_gradients: Callable) -> Callable:
    def average_over_cp(model: object, shards: object, mesh: object) -> None:
        sum_gradients(model, shards, mesh)
        for parameter in model.parameters():
            parameter.grad.div_(mesh["cp"].size)

    return average_over_cp


FAULT = Fault(
    family="B",
    what="gradients are averaged over context-parallel ranks, each of which holds only a share of the sum",
    origin="NVIDIA/Megatron-LM#673, THUDM/slime#987, NovaSky-AI/SkyRL#1420",
    signature="every gradient exactly 1 / cp of the right one, cosine 1, loss right; invisible after one Adam step",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/parity/test_faults.py::test_missing_cp_factor_halves_every_gradient_and_not_the_loss",
    changes_metrics=False,
)
