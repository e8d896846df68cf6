"""Known bugs: replayed routes of a mixture of experts, and losses that balance its routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.policy.routers import NO_ROUTE, Routes

MIXTURE = {"model": {"source": "tiny-qwen3-moe"}}
REPLAYED = MIXTURE | {"routing": {"replay": "recorded"}}
CHOSEN = {"routing": {"replay": "none", "record": True}}


@fault(
    seam="workbench.train.routes:StepRoutes.begin",
    origin="verl-project/verl#7340 (routers that the replay does not reach)",
    family="G",
    signature="router/disagreement/share exactly 0; log-probabilities, loss and gradients those of the routers' own "
    "choice",
    shows_in=REPLAYED,
    hidden_in=CHOSEN,
    detected_by="tests/faults/test_routes.py::test_routes_that_are_not_replayed_agree_with_every_router",
)
def routes_not_replayed(begin: Callable, step: Any, number: int) -> Routes:
    """Recorded routes do not reach the routers, which choose by themselves, without a word."""
    return Routes(begin(step, number).counted_t)


@fault(
    seam="workbench.train.routes:StepRoutes.begin",
    origin="NVIDIA-NeMo/RL#3903, radixark/miles#2570 (routes bound to layers by their place in a list)",
    family="G",
    signature="log-probabilities, loss and gradients wrong, more disagreement; the loads of mixtures exchanged; no "
    "effect in a model with one mixture",
    shows_in=REPLAYED,
    hidden_in=CHOSEN,
    detected_by="tests/faults/test_routes.py::test_routes_of_another_layer_exchange_the_loads_of_mixtures",
)
def routes_of_another_layer(begin: Callable, step: Any, number: int) -> Routes:
    """Each mixture replays the routes of the next one, the last those of the first."""
    routes = begin(step, number)
    return Routes(routes.counted_t, None if routes.given_tLk is None else routes.given_tLk.roll(-1, dims=1))


@fault(
    seam="workbench.train.routes:StepRoutes.begin",
    origin="NovaSky-AI/SkyRL#1908 (routes and padding not aligned with the tokens)",
    family="G",
    signature="log-probabilities, loss and gradients wrong, from the second token of each document on; more "
    "disagreement",
    shows_in=REPLAYED,
    hidden_in=CHOSEN,
    detected_by="tests/faults/test_routes.py::test_shifted_routes_are_those_of_the_token_before",
)
def routes_shifted_by_one(begin: Callable, step: Any, number: int) -> Routes:
    """A token replays the routes of the one before it."""
    routes = begin(step, number)
    if routes.given_tLk is None:
        return routes
    before_tLk = routes.given_tLk.roll(1, dims=0)
    here = (before_tLk != NO_ROUTE) & (routes.given_tLk != NO_ROUTE)
    return Routes(routes.counted_t, torch.where(here, before_tLk, routes.given_tLk))


@fault(
    seam="workbench.policy.routers:replayed_gates",
    origin="ISEEKYAN/Megatron-LM#79, of #49: scores gathered from those that the router's own choice left",
    family="G",
    signature="experts that are replayed against the router's choice have gate and gradient 0: loss and gradients "
    "wrong, disagreement as in the right step where it was replayed",
    shows_in=REPLAYED,
    hidden_in=CHOSEN,
    detected_by="tests/faults/test_routes.py::test_gates_of_drifted_routes_are_zero",
)
def gates_of_drifted_routes_zero(
    replayed_gates: Callable, router: Any, logits_tE: Tensor, experts_tk: Tensor
) -> Tensor:
    """Gates of replayed experts are read from scores that are 0 outside the router's own choice."""
    own_tk = logits_tE.topk(experts_tk.shape[1], dim=-1).indices
    kept_tk = (experts_tk[:, :, None] == own_tk[:, None, :]).any(dim=2)
    return replayed_gates(router, logits_tE, experts_tk) * kept_tk


@fault(
    seam="workbench.train.routes:StepRoutes.counts_of_step",
    origin="arXiv 2501.11873: frameworks that balance the load of each rank's tokens instead of the batch's",
    family="K",
    signature="loss/router_balance and its gradient wrong where ranks have other loads; all other terms right",
    shows_in=MIXTURE | {"routing": {"balance": 0.5}, "layout": {"dp": 2}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_routes.py::test_loads_of_ranks_balance_another_loss",
)
def balance_of_own_tokens(counts_of_step: Callable, step: Any, counts_LE: Tensor) -> Tensor:
    """The share of an expert in the load-balancing loss is that of a rank's own tokens."""
    counts_of_step(step, counts_LE)
    return counts_LE


@fault(
    seam="workbench.train.routes:StepRoutes.finish",
    origin="NVIDIA/Megatron-LM#1652 (auxiliary loss and context parallelism)",
    family="K",
    signature="losses right; what the losses of routers add to every gradient exactly 1/cp of its size",
    shows_in=MIXTURE | {"routing": {"balance": 0.5}, "layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_routes.py::test_router_losses_count_a_cp_th",
    changes_metrics=False,
)
def router_gradient_over_cp(finish: Callable, step: Any, number: int, routes: Routes) -> list[Tensor]:
    """The losses of routers are averaged over cp ranks, whose tokens are different ones."""
    return [loss / step.policy.mesh["cp"].size for loss in finish(step, number, routes)]


@fault(
    seam="workbench.train.routes:StepRoutes.finish",
    origin="NVIDIA/Megatron-LM#7452, finding 10 (#7481): a count of tokens that its own all-reduce overwrites",
    family="K",
    signature="losses right; what the losses of routers add to every gradient exactly cp times its size",
    shows_in=MIXTURE | {"routing": {"balance": 0.5}, "layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_routes.py::test_router_losses_count_the_tokens_of_all_ranks",
    changes_metrics=False,
)
def router_gradient_times_cp(finish: Callable, step: Any, number: int, routes: Routes) -> list[Tensor]:
    """Each rank scales the losses of routers by the tokens of all cp ranks in place of its own."""
    return [loss * step.policy.mesh["cp"].size for loss in finish(step, number, routes)]
