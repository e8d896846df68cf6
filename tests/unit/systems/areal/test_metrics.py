"""AReaL's names, against manual values: shares of the trained tokens."""

import torch

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by

RATIOS = torch.tensor([1.5, 0.5, 4.0, 1.0, 9.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, False])
ZERO = torch.zeros(5, dtype=torch.float64)


def named(**settings):
    spec = LossSpec(**settings)
    sampler = torch.tensor([-1.0, 0.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    inputs = LossInputs(RATIOS.log(), ZERO, ADVANTAGES, sampler, loss_mask_T=MASK)
    values = as_named_by("areal", inputs, MASK, terms=build_loss(spec)(inputs), loss_spec=spec)
    return {name: value.finish() for name, value in values.items()}


def test_the_dual_clip_is_counted_by_itself():
    assert named(surrogate={"dual_clip": 3.0}) == {"clip_fraction": 0.5, "dual_clip_fraction": 0.25}
    assert named(name="sapo") == {"clip_fraction": 0.0, "dual_clip_fraction": 0.0}


def test_filtered_tokens_are_the_rejected_or_bounded_ones():
    rejecting = {"ratio": "token", "gate": "ratio", "gate_high": 2.0}
    assert named(correction=rejecting)["filtered_fraction"] == 0.5
    assert named(correction={"ratio": "token", "ratio_high": 2.0})["filtered_fraction"] == 0.5
    assert named(correction={"ratio": "token", "ratio_high": 3.0})["filtered_fraction"] == 0.0


def test_cispo_counts_outside_ratios_of_surviving_tokens():
    surrogate = {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.2}
    assert named(surrogate=surrogate)["clip_fraction"] == 0.75
    assert (
        named(surrogate=surrogate, correction={"ratio": "token", "gate": "ratio", "gate_high": 2.0})["clip_fraction"]
        == 0.5
    )
