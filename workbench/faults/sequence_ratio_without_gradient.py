"""The sequence ratio carries no gradient, and nothing else of the surrogate does."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(log_sequence_ratio: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def without_gradient(*args: object) -> Tensor:
        return log_sequence_ratio(*args).detach()

    return without_gradient


FAULT = Fault(
    family="H",
    what="GSPO's ratio is detached as in its per-token form, without the token's own gradient path beside it",
    origin="PrimeIntellect-ai/prime-rl#1123",
    signature="loss and metrics right; the gradient is that of the penalties alone (without one backward refuses)",
    seam="workbench.losses.surrogates.sequence:log_sequence_ratio",
    broken=_broken,
    shows_in={"loss": {"name": "gspo"}},
    hidden_in={"loss": {"name": "gspo_token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_detached_sequence_ratio_leaves_the_penalty",
    changes_metrics=False,
)
