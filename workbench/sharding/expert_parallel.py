"""Expert parallelism: each rank of an axis has some experts of every mixture, and the tokens that chose them.

The ranks of dp x cp have different tokens. Over ep, neighbours among them, each has E / ep experts: rows of hidden
states are sent to the rank of their expert (dispatch), and the expert's outputs back (combine), where the gates of the
token weigh them. No token is dropped, whatever the load. A rank's gradient of its experts is that of the tokens of all
ep ranks, so it is summed over the ranks with the same experts alone (edp), once per step. With tp each rank has a slice
of its experts' features.

Every rank of ep calls the experts as often as the others, with any number of tokens.

Source: GShard, arXiv 2006.16668 (dispatch and combine); dropless: MegaBlocks, arXiv 2211.15841.

Letters: D model dimension | E experts | F features of an expert | k experts of a token | n rows, one for each of a
token's experts, that a rank receives | t tokens of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from workbench.sharding.collectives import exchange_rows, gather_equal
from workbench.sharding.divisibility import check_experts
from workbench.sharding.mesh import Axis
from workbench.sharding.tensor_parallel import ParameterShard

_ARGUMENTS = 3
"""Of the forward of experts in `transformers`: hidden states, the experts of each token, and their gates."""


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Mixtures of experts whose parameters have the experts as their first dimension, by name.

    Those of `transformers`, which it calls with hidden states [t, D], experts and gates [t, k]. Routers, which are
    called with hidden states alone, are none.
    """
    return {name: module for name, module in model.named_modules() if _is_mixture(module)}


def _is_mixture(module: nn.Module) -> bool:
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    count = getattr(module, "num_experts", None)
    return (
        isinstance(count, int)
        and any(parameter.dim() == 3 for parameter in own)
        and all(parameter.shape[0] == count for parameter in own)
        and len(inspect.signature(module.forward).parameters) >= _ARGUMENTS
    )


def apply_expert_parallel(
    model: nn.Module, shards: Mapping[str, ParameterShard], axis: Axis
) -> dict[str, ParameterShard]:
    """Reduce every mixture to this rank's experts, in place; a no-op on an axis of one rank.

    Call after tensor parallelism, with the sharding that it returns, and the same weights on every rank.

    Returns:
        The sharding of every parameter.

    Backward: dispatch and combine are each other's adjoints.
    Raises:   ShardingError: a model without experts, or a number of them that ep does not divide.
    """
    if axis.size == 1:
        return dict(shards)
    mixtures: dict[str, Any] = dict(expert_modules(model))
    if not mixtures:
        check_experts("the model", 0, axis.size)
    for name, module in mixtures.items():
        shards = dict(shards) | _keep_own(name, module, shards, axis)
    return dict(shards)


def _keep_own(name: str, module: Any, shards: Mapping[str, ParameterShard], axis: Axis) -> dict[str, ParameterShard]:
    check_experts(name, module.num_experts, axis.size)
    each = module.num_experts // axis.size
    for parameter, whole in list(module.named_parameters(recurse=False)):
        local = whole.detach().narrow(0, axis.rank * each, each).clone()
        setattr(module, parameter, nn.Parameter(local, requires_grad=whole.requires_grad))
    module.num_experts = each
    module.forward = _Dispatched(module.forward, each, axis)
    own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
    return {parameter: replace(shards[parameter], over_ep=True) for parameter in own}


class _Dispatched:
    """The forward of a mixture whose experts are on several ranks; ``compute`` is that of this rank's."""

    def __init__(self, compute: Callable[..., Tensor], experts: int, axis: Axis) -> None:
        self.compute, self.experts, self.axis = compute, experts, axis

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixed(self, hidden_states, top_k_index, top_k_weights)


def mixed(mixture: _Dispatched, hidden_tD: Tensor, chosen_tk: Tensor, gates_tk: Tensor) -> Tensor:
    """Outputs of the experts that each token chose, wherever they are, weighed by its gates.

    Shapes: [t, D], [t, k], [t, k] -> [t, D].
    """
    axis, chosen_r = mixture.axis, chosen_tk.flatten()  # r = t * k
    order_r = torch.argsort(chosen_r, stable=True)
    token_r = order_r // chosen_tk.shape[1]
    sent_R = torch.bincount(chosen_r // mixture.experts, minlength=axis.size)
    counts_RR = gather_equal(sent_R, axis).cpu()
    received_nD = _Exchanged.apply(hidden_tD[token_r], counts_RR, axis)
    local_n = exchange_rows(chosen_r[order_r] % mixture.experts, counts_RR, axis)
    out_nD = mixture.compute(received_nD, local_n[:, None], torch.ones_like(received_nD[:, :1]))
    if torch.is_grad_enabled() and not out_nD.requires_grad:  # nothing was received: backward enters all the same
        out_nD = out_nD + 0 * received_nD
    returned_rD = _Exchanged.apply(out_nD, counts_RR.T, axis)
    weighed_rD = returned_rD * gates_tk.flatten()[order_r, None]
    return torch.zeros_like(hidden_tD).index_add(0, token_r, weighed_rD.to(hidden_tD.dtype))


class _Exchanged(Function):
    """Rows sent to other ranks. Backward: their gradients, sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts_RR: Tensor, axis: Axis) -> Tensor:
        ctx.counts_RR, ctx.axis = counts_RR, axis
        return exchange_rows(rows.contiguous(), counts_RR, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchange_rows(gradient.contiguous(), ctx.counts_RR.T, ctx.axis), None, None
