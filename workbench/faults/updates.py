"""Known bugs of the optimizer's step: every gradient is right, and the weights after the step are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.specs.run import RunSpec

DETECTED = "tests/faults/test_updates.py::test_an_update_is_wrong_where_the_fault_shows_and_right_where_it_hides"
_MIXED = {"precision": "bf16_mixed", "steps": 3}


def _rounding(optimizer: torch.optim.Optimizer, *, state: bool) -> torch.optim.Optimizer:
    """Round moments, or weights, to bfloat16 after every step."""

    def hook(*_: object) -> None:
        with torch.no_grad():
            moments = (kept[name] for kept in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
            weights = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for value in moments if state else weights:  # sgd has weights without a state
                value.copy_(value.bfloat16())

    optimizer.register_step_post_hook(hook)
    return optimizer


@fault(
    seam="workbench.train.worker:build_optimizer",
    origin="areal-project/AReaL#1292",
    signature="no wrong gradient in the first step; moments have 8 bits, so that a second moment stops growing when "
    "its increment is below half a unit in the last place, and later updates are too large or too small",
    shows_in=_MIXED,
    hidden_in={"optimizer": {"name": "sgd"}},
    detected_by=DETECTED,
    changes_gradient=False,
    changes_metrics=False,
    changes_update=True,
)
def moments_in_bfloat16(
    build_optimizer: Callable[..., torch.optim.Optimizer], policy: Policy, spec: RunSpec
) -> torch.optim.Optimizer:
    """The state of the optimizer is created in the dtype of the model's computation."""
    optimizer = build_optimizer(policy, spec)
    return optimizer if isinstance(optimizer, torch.optim.SGD) else _rounding(optimizer, state=True)


@fault(
    seam="workbench.train.worker:build_optimizer",
    origin="no single report: a model loaded in bfloat16 and given to an optimizer; measured in arXiv 2010.06192",
    signature="no wrong gradient in the first step; updates below half a unit in the last place of a weight are lost: "
    "at the rates of RL nearly all, so that the run stands still",
    shows_in=_MIXED,
    hidden_in={"precision": "bfloat16"},
    detected_by=DETECTED,
    changes_gradient=False,
    changes_metrics=False,
    changes_update=True,
)
def masters_in_bfloat16(
    build_optimizer: Callable[..., torch.optim.Optimizer], policy: Policy, spec: RunSpec
) -> torch.optim.Optimizer:
    """The weights that the optimizer updates are those that the model computes with, without float32 masters."""
    return _rounding(build_optimizer(policy, spec), state=False)


@fault(
    seam="workbench.train.optimizer:LossScale.accepts",
    origin="no single report: a loop without the scaler's check (torch.amp.GradScaler.step is not called)",
    signature="a step whose scaled gradient overflows sets weights to NaN; every step without an overflow is right",
    shows_in={"precision": "fp16_amp", "mixed_precision": {"loss_scale": 2.0**40}, "steps": 2},
    hidden_in={"mixed_precision": {"loss_scale": 1024.0}},
    detected_by="tests/faults/test_updates.py::test_an_overflow_that_is_not_skipped_ends_the_run",
    changes_gradient=False,
    changes_metrics=False,
    changes_update=True,
)
def overflow_not_skipped(accepts: Callable[[object, float], bool], scale: object, norm: float) -> bool:
    """The optimizer steps with gradients that are not finite."""
    accepts(scale, norm)
    return True


@fault(
    seam="clip_gradients",
    origin="no single report: torch's AMP documentation warns of it (scaler.unscale_ comes before clip_grad_norm_)",
    signature="gradients recorded before the clip right; their norm is clipped to the bound over the loss scale, so "
    "that updates of sgd vanish, and moments of adamw stay near its epsilon",
    shows_in={"precision": "fp16_amp", "optimizer": {"max_grad_norm": 1e3}, "steps": 2},
    hidden_in={"mixed_precision": {"loss_scale": 1.0}},
    detected_by=DETECTED,
    changes_gradient=False,
    changes_metrics=False,
    changes_update=True,
)
def clip_before_unscaling(
    clip_gradients: Callable[..., float], policy: Policy, norms: Mapping[str, float], max_norm: float | None
) -> float:
    """Gradients are clipped while they still have the factor of the loss scale."""
    return clip_gradients(policy, norms, None if max_norm is None else max_norm / policy.loss_scale)
