"""Routers of a mixture of experts: what each chose for a row, and routes that are replayed in place of its choice.

A route is the experts of one token in one mixture. A router chooses them, without a gradient, and computes the gates
that weigh their outputs, with one. Where routes are replayed, the gates are those of the given experts, from the
router's own logits: they keep their gradient, and no choice can flip between two passes.

The routes of a pass are an argument of each decoder layer, as its attention is, so a layer that is recomputed in
backward, or runs between those of other micro-batches, sees its own.

Source: replay of the sampler's routes (R3), arXiv 2510.11370; of the old policy's (R2), arXiv 2507.18071, section 5.3.

Letters: t tokens of this rank | L mixtures of the model | E experts | k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.precision import ROUTERS, SIGMOID_ROUTERS
from workbench.policy.tensor_plan import of_prediction

NO_ROUTE = -1
"""Expert of a token whose route is not known: the router's own choice is taken."""

BIAS = "e_score_correction_bias"
"""Buffer of a router that is added to its scores for the choice alone."""


class Noted(NamedTuple):
    """One router in one pass: logits [t, E], experts taken and of its own choice [t, k], tokens that count [t], gates.

    Of a pass without a gradient, the logits are [0, E]. The gates [t, k] of the experts taken have no gradient here.
    """

    logits_tE: Tensor
    taken_tk: Tensor
    own_tk: Tensor
    counted_t: Tensor
    gates_tk: Tensor


class Routes:
    """The routes of one pass of a row, or of a stage's part of it. No dataclass: FSDP2 hands layers copies of those.

    Attributes:
        counted_t: [t] bool, tokens of documents, which have a route; padding counts nowhere.
        given_tLk: [t, L, k] experts to take, `NO_ROUTE` for the router's own choice; None: everywhere its own.
        noted: of each router that was called, by its number. Calls in backward change nothing.
    """

    def __init__(self, counted_t: Tensor, given_tLk: Tensor | None = None) -> None:
        self.counted_t, self.given_tLk = counted_t, given_tLk
        self.noted: dict[int, Noted] = {}


@dataclass
class Routers:
    """The routers of a model, in order, and the routes of the pass that is running.

    Attributes:
        names: of all routers, also those of other pipeline stages.
        experts: E.
        chosen: k.
        modules: routers by number; those of other stages are never called.
        share: index and number of the tp ranks among which sequence parallelism splits the tokens of a row.
    """

    names: tuple[str, ...]
    experts: int
    chosen: int
    modules: Mapping[int, Any]
    share: tuple[int, int] = (0, 1)
    _current: Routes | None = None

    @property
    def have_bias(self) -> bool:
        """True if each router has a bias of its choice, which is no parameter."""
        return all(hasattr(module, BIAS) for module in self.modules.values())

    def biases(self, model: nn.Module) -> dict[int, Tensor]:
        """[E] bias of the choice of each router that is in a model, which has those of this rank's stages."""
        here = set(map(id, model.modules()))
        return {number: getattr(module, BIAS) for number, module in self.modules.items() if id(module) in here}

    def buffer(self, number: int) -> str:
        """Name of the bias of a router in the model."""
        return f"{self.names[number]}.{BIAS}"

    def probabilities(self, number: int, logits_tE: Tensor) -> Tensor:
        """[t, E] share of each expert in a router's scores, with a gradient: what load-balancing losses average."""
        return _family(self.modules[number]).probabilities(logits_tE)

    @contextmanager
    def _during(self, routes: Routes | None) -> Iterator[None]:
        before, self._current = self._current, routes
        try:
            yield
        finally:
            self._current = before

    def _own(self, values_t: Tensor) -> Tensor:
        rank, ranks = self.share
        return values_t.chunk(ranks)[rank]


def install_routers(model: Any, *, share: tuple[int, int] = (0, 1)) -> Routers:
    """Prepare every router of a model, in place, to note its routes and to replay others; return them.

    ``share``: see `Routers`. Without routes, passes are unchanged.

    Raises:
        SpecError: no router, routers of an unknown kind or of several sizes.
    """
    named = {
        name: module
        for name, module in model.named_modules()
        # The layers of a prediction choose by themselves: recorded routes are those of the decoder's own mixtures.
        if type(module).__name__.endswith("Router") and not of_prediction(name)
    }
    sizes = {(module.num_experts, module.top_k) for module in named.values() if _family(module)}
    if len(sizes) != 1:
        raise SpecError(
            f"routes of model type {model.config.get_text_config().model_type!r}",
            found="no router of experts" if not named else f"experts and choices {sorted(sizes)}",
            rule="a mixture of experts whose routers are all of one size",
            fix="leave routing out for this model",
        )
    [(experts, chosen)] = sizes
    routers = Routers(tuple(named), experts, chosen, dict(enumerate(named.values())), share)
    for number, module in routers.modules.items():
        module.forward = _Router(routers, number, module, module.forward)
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = _Layer(routers, layer.forward)
    return routers


@dataclass
class _Layer:
    """The forward of a decoder layer, which takes the routes of a pass and hands them to its router."""

    routers: Routers
    forward: Callable[..., Any]

    def __call__(self, *inputs: Any, routes: Routes | None = None, **more: Any) -> Any:
        with self.routers._during(routes):
            return self.forward(*inputs, **more)


@dataclass
class _Router:
    """The forward of a router: notes its routes, or replays others."""

    routers: Routers
    number: int
    module: Any
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_tE, gates_tk, own_tk = self.forward(hidden)
        routes = self.routers._current
        if routes is None:
            return logits_tE, gates_tk, own_tk
        taken_tk = own_tk
        if routes.given_tLk is not None:
            given_tk = self.routers._own(routes.given_tLk)[:, self.number]
            taken_tk = torch.where(given_tk == NO_ROUTE, own_tk, given_tk)
            gates_tk = replayed_gates(self.module, logits_tE, taken_tk).to(gates_tk.dtype)
        counted_t = self.routers._own(routes.counted_t)
        kept_tE = logits_tE if torch.is_grad_enabled() else logits_tE[:0]  # only losses read them
        routes.noted.setdefault(self.number, Noted(kept_tE, taken_tk, own_tk, counted_t, gates_tk.detach()))
        return logits_tE, gates_tk, taken_tk


def replayed_gates(router: Any, logits_tE: Tensor, experts_tk: Tensor) -> Tensor:
    """Gates of given experts, from a router's logits and by its own formula; those of its own choice are the same.

    Shapes:   [t, E], [t, k] -> [t, k].
    Backward: to the logits, through the gates; the choice has no gradient.
    """
    return _family(router).gates(router, logits_tE, experts_tk)


class _Family(NamedTuple):
    """Formulas of a kind of router: its gates, and the share of each expert in its scores."""

    gates: Callable[[Any, Tensor, Tensor], Tensor]
    probabilities: Callable[[Tensor], Tensor]


def _wide(logits_tE: Tensor) -> Tensor:
    """In the dtype in which `transformers` computes scores: float32, or float64 in such a run."""
    return logits_tE.to(torch.promote_types(logits_tE.dtype, torch.float32))


def _softmax(logits_tE: Tensor) -> Tensor:
    return torch.softmax(_wide(logits_tE), dim=-1)


def _softmax_gates(router: Any, logits_tE: Tensor, experts_tk: Tensor) -> Tensor:
    gates_tk = _softmax(logits_tE).gather(1, experts_tk)
    return gates_tk / gates_tk.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else gates_tk


def _softmax_of_chosen(router: Any, logits_tE: Tensor, experts_tk: Tensor) -> Tensor:
    return torch.softmax(logits_tE.gather(1, experts_tk), dim=-1)


def _sigmoid_gates(router: Any, logits_tE: Tensor, experts_tk: Tensor) -> Tensor:
    gates_tk = _wide(logits_tE).sigmoid().gather(1, experts_tk)
    if router.norm_topk_prob:
        gates_tk = gates_tk / (gates_tk.sum(dim=-1, keepdim=True) + 1e-20)
    return gates_tk * router.routed_scaling_factor


def _shares_of_sigmoids(logits_tE: Tensor) -> Tensor:
    scores_tE = _wide(logits_tE).sigmoid()
    return scores_tE / scores_tE.sum(dim=-1, keepdim=True)


_FAMILIES = {
    **dict.fromkeys(ROUTERS, _Family(_softmax_gates, _softmax)),
    **dict.fromkeys(SIGMOID_ROUTERS, _Family(_sigmoid_gates, _shares_of_sigmoids)),
    "GptOssTopKRouter": _Family(_softmax_of_chosen, _softmax),
}
"""Kind of router in `transformers` -> its formulas."""


def has_known_gates(router: nn.Module) -> bool:
    """True if `replayed_gates` knows the formula of a router's gates."""
    return type(router).__name__ in _FAMILIES


def _family(router: nn.Module) -> _Family:
    kind = type(router).__name__
    if kind not in _FAMILIES:
        raise SpecError(
            f"routes of a model with {kind}",
            rule=f"routers whose gates are known: {', '.join(_FAMILIES)}",
            fix="leave routing out for this model, or add its router to policy/routers.py",
        )
    return _FAMILIES[kind]
