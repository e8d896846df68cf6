"""Policy losses as pure per-token arithmetic: tensors in, named terms out; no ranks, no model, no files."""

from workbench.losses.grpo import clipped_surrogate, grpo, kl_k3
from workbench.losses.terms import Loss, LossInputs, Term

LOSSES = {"grpo": grpo}
"""Losses by the name that a spec uses."""

__all__ = ["LOSSES", "Loss", "LossInputs", "Term", "clipped_surrogate", "grpo", "kl_k3"]
