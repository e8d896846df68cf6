"""Known bugs of two modules in two layouts, planted by name; like `workbench.faults`, for `encoder_step`.

They are separate because a step of one module has none of their seams. Those that are a scale are invisible to a
parity test of weights after one step of Adam: Adam's first step is the learning rate times the sign of the gradient,
for any factor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import Fault, fault
from workbench.faults.axis_factors import counted_over_dp
from workbench.policy.model import Policy
from workbench.sharding.bridge.direct import Direct
from workbench.sharding.collectives import all_sum_
from workbench.sharding.gradients import scale_gradients
from workbench.sharding.mesh import Mesh

_FAN_IN = {"encoder": {"dp": 4}, "layout": {"cp": 2, "dp": 2}, "delivery": "whole"}
_FAN_OUT = {"encoder": {"tp": 4}, "layout": {"cp": 2, "dp": 2}, "delivery": "whole"}
_FAN_IN_WITHOUT_CP = {"encoder": {"dp": 4}, "layout": {"tp": 2, "dp": 2}, "delivery": "whole"}
_FAN_OUT_WITHOUT_CP = {"encoder": {"tp": 2}, "layout": {"dp": 2}, "delivery": "whole"}
_EQUAL_WITH_CP = {"encoder": {"tp": 2, "dp": 2}, "layout": {"cp": 2, "dp": 2}, "delivery": "whole"}
_BRIDGE = "workbench.sharding.bridge"
_fault = functools.partial(fault, detected_by="tests/faults/test_bridge_faults.py::test_a_fault_turns_parity_red")
_fan_in_fault = functools.partial(_fault, shows_in=_FAN_IN, hidden_in=_FAN_IN_WITHOUT_CP)


@_fan_in_fault(
    seam=f"{_BRIDGE}.direct:summed_over_cp",
    family="H",
    origin="the bridge before its cp support: NVIDIA/Megatron-LM#4368 has cp = 1 on both sides; its extension "
    "all-reduces over the destination's cp first",
    signature="loss and policy right; the encoder's gradient another one, for tokens of one cp rank only",
    changes_metrics=False,
)
def encoder_gradient_not_summed_over_cp(_: Callable, gradient: Tensor, direct: Direct, caller: str | None) -> Tensor:
    """The gradient returned to the encoder is that of one cp rank's tokens, zero elsewhere."""
    return gradient


@_fan_in_fault(
    seam=f"{_BRIDGE}.direct:summed_over_cp",
    family="B",
    origin="AVG instead of SUM at the bridge, the default of data-parallel wrappers",
    signature="loss and policy right; every gradient of the encoder 1 / cp, cosine 1; no effect after a step of Adam",
    changes_metrics=False,
)
def encoder_gradient_averaged_over_cp(summed_over_cp: Callable, gradient: Tensor, direct: Direct, *more: Any) -> Tensor:
    """The partial gradients of cp ranks are averaged instead of summed."""
    return summed_over_cp(gradient, direct, *more) / direct.cp.size


@_fan_in_fault(
    seam="workbench.train.step:run_step",
    family="B",
    origin="the language model's sum over cp applied to the parameters of both modules",
    signature="loss and policy right; every gradient of the encoder cp times, cosine 1; no effect after a step of Adam",
    changes_metrics=False,
)
def encoder_summed_over_policys_cp(
    run_step: Callable, policy: Policy, loss: Any, rows: Sequence[Any], *more: Any, **options: Any
) -> Any:
    """The encoder's gradient, which is complete after the bridge, is summed over the policy's cp once more."""
    result = run_step(policy, loss, rows, *more, **options)
    all_sum_([parameter.grad for parameter in rows[0].encoder.model.parameters()], policy.mesh["cp"])
    return result


@_fault(
    seam="workbench.train.encoder_step:sum_gradients",
    family="B",
    origin="the default of data-parallel wrappers together with a per-token loss: NVIDIA/Megatron-LM#7513",
    signature="loss and policy right; every gradient of the encoder 1 / dp of its own, cosine 1; no effect after a "
    "step of Adam",
    shows_in=_FAN_IN,
    hidden_in={"encoder": {"tp": 4}, "layout": {"tp": 2, "cp": 2}, "delivery": "whole"},
    changes_metrics=False,
)
def encoder_averaged_over_dp(sum_gradients: Callable, model: Any, shards: Any, mesh: Mesh) -> None:
    """The encoder's gradient is averaged over its own dp, although the loss is divided by the whole step."""
    sum_gradients(model, shards, mesh)
    scale_gradients(model, shards, 1 / mesh["dp"].size)


@_fan_in_fault(
    seam="workbench.train.step:prepare_rows",
    family="A",
    origin="(numerator, denominator) over the data-parallel group of a policy that shards its sequence",
    signature="loss and all gradients of both modules too large, about cp times; by another factor if masks are uneven",
)
def denominator_over_dp_only(prepare_rows: Callable, batch: Any, spec: Any, mesh: Mesh, *more: Any) -> Any:
    """Trained tokens are counted over dp and not over cp, so each cp rank divides by its own count."""
    rows, totals = prepare_rows(batch, spec, mesh, *more)
    return counted_over_dp(rows, totals, mesh), totals


@_fault(
    seam=f"{_BRIDGE}.direct:gather_slots",
    family="S",
    origin="a gather group whose order differs from that of the samples",
    signature="each token reads another image's features: wrong loss, wrong gradients everywhere",
    shows_in=_FAN_IN,
    hidden_in=_EQUAL_WITH_CP,
)
def slots_in_reverse_order(joined: Callable, values: Tensor, direct: Direct, caller: str | None) -> Tensor:
    """The outputs of ranks are concatenated along the batch in another order than that of their slots."""
    slots = joined(values, direct, caller).chunk(direct.slots, dim=direct.batch_dim)
    return torch.cat(slots[::-1], dim=direct.batch_dim)


@_fault(
    seam=f"{_BRIDGE}.direct:own_slot",
    family="S",
    origin="a slot numbered by another dimension than dp",
    signature="loss and policy right; the encoder's gradient wrong",
    shows_in=_FAN_IN,
    hidden_in=_EQUAL_WITH_CP,
    changes_metrics=False,
)
def gradient_of_next_slot(own_slot: Callable, values: Tensor, direct: Direct) -> Tensor:
    """Each rank of the encoder takes the gradient of its neighbour's samples."""
    return own_slot(values, replace(direct, slot=(direct.slot + 1) % direct.slots))


@_fault(
    seam=f"{_BRIDGE}.direct:own_slot",
    family="S",
    origin="a map of the ranks with cp = 0, looked up on all ranks",
    signature="tokens of later cp ranks read another image's features: wrong loss, wrong gradients",
    shows_in=_FAN_OUT,
    hidden_in=_FAN_OUT_WITHOUT_CP,
)
def first_slot_on_later_cp_ranks(own_slot: Callable, values: Tensor, direct: Direct) -> Tensor:
    """Ranks with cp > 0 are missing in the map from ranks to slots, and take the first slot's samples."""
    return own_slot(values, replace(direct, slot=0) if direct.cp.rank else direct)


@_fault(
    seam=f"{_BRIDGE}.crossing:_Sum.of",
    family="H",
    origin="the adjoint of a send to one receiver used for a send to several",
    signature="loss and policy right; the encoder's gradient misses all consumers of a shared image but one",
    shows_in={"encoder": {"dp": 2}, "layout": {"cp": 2}, "delivery": "sharded", "shared": True},
    hidden_in={"encoder": {"dp": 2}, "layout": {"cp": 2}, "delivery": "sharded"},
    changes_metrics=False,
)
def one_consumer_of_several(of: Callable, self: Any, rows: Any) -> Any:
    """Of the ranks that read one image, the gradient of one is returned instead of the sum."""
    return of(replace(self, rounds=self.rounds[:1]), rows)


BRIDGE_FAULTS: Mapping[str, Fault] = {each.name: each for each in list(globals().values()) if isinstance(each, Fault)}
"""Every fault of two modules, by name."""
