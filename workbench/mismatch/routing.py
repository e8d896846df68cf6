"""Routers of a mixture of experts in another arithmetic, or on recorded routes.

    own                 as the model computes it
    float32, bfloat16   logits of the router from operands of this dtype
    chosen -1, +1       one expert fewer or more for each token; recorded routes have the model's own number
    renormalized        gates that sum to 1, where the model's do not; and the other way round

Letters: t tokens | E experts | k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.routers import NO_ROUTE, has_known_gates, replayed_gates

VARIANTS = ("float32", "bfloat16", "chosen -1", "chosen +1", "renormalized")


def install_router(model: Any, name: str) -> Any:
    """Change all routers of a model, in place, and prepare them for recorded routes; return the model."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for number, router in enumerate(routers):
        if name == "renormalized":
            router.norm_topk_prob = not getattr(router, "norm_topk_prob", True)
        router.forward = _Router(router, router.forward, number, name)
    vars(model)["routers_of_record"] = routers
    return model


@contextmanager
def _replayed(routers: list[Any], given_tLk: Tensor) -> Iterator[None]:
    for router in routers:
        router.forward.given = given_tLk
    try:
        yield
    finally:
        for router in routers:
            router.forward.given = None


def replay(model: Any, given_tLk: Tensor | None) -> Any:
    """Take these routes in the passes inside; None: the routers' own."""
    return nullcontext() if given_tLk is None else _replayed(vars(model)["routers_of_record"], given_tLk)


class _Router:
    """The forward of a router, in another arithmetic or on given routes."""

    def __init__(self, module: Any, forward: Any, number: int, name: str) -> None:
        self.module, self.forward, self.number, self.name = module, forward, number, name
        self.given: Tensor | None = None
        self.own = module.top_k
        more = int(name.split()[1]) if name.startswith("chosen") else 0
        self.chosen = min(max(1, self.own + more), module.num_experts)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.module.top_k = self.chosen if self.given is None else self.own
        if self.name in ("float32", "bfloat16"):
            dtype = getattr(torch, self.name)
            weight_ED, kept = self.module.weight, hidden.dtype
            self.module.weight = torch.nn.Parameter(weight_ED.to(dtype), requires_grad=False)
            logits_tE, gates_tk, own_tk = self.forward(hidden.to(dtype))
            self.module.weight = weight_ED
            if has_known_gates(self.module):  # of the logits in float32: its own are rounded to the router's dtype
                gates_tk = replayed_gates(self.module, logits_tE.float(), own_tk)
            gates_tk = gates_tk.to(kept)
        else:
            logits_tE, gates_tk, own_tk = self.forward(hidden)
        given = self.given
        if given is None:
            return logits_tE, gates_tk, own_tk
        if given.shape[1] <= self.number or given.shape[2] != own_tk.shape[1]:
            raise SpecError(
                "replay the recorded routes",
                found=f"sampler_routes of {given.shape[1]} mixtures and {given.shape[2]} experts of a token",
                rule=f"those of the model: router {self.number} takes {own_tk.shape[1]}",
                fix="record [tokens][mixtures][experts of a token]",
            )
        given_tk = given[:, self.number]
        taken_tk = torch.where(given_tk == NO_ROUTE, own_tk, given_tk)
        return logits_tE, replayed_gates(self.module, logits_tE, taken_tk).to(gates_tk.dtype), taken_tk
