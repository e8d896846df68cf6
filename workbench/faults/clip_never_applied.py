"""Both branches of the clip are computed, and the first one alone is averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from workbench.faults import Fault
from workbench.losses.terms import Term


def _broken(clip_ratio: Callable[..., Term]) -> Callable[..., Term]:
    def without_second_branch(log_ratio_T: Tensor, advantages_T: Tensor, *more: object, **bounds: object) -> Term:
        term = clip_ratio(log_ratio_T, advantages_T, *more, **bounds)
        return replace(term, values_T=-log_ratio_T.exp() * advantages_T)

    return without_second_branch


FAULT = Fault(
    family="H",
    what="the mean is taken over the unclipped surrogate, where the greater of it and the clipped one belongs; the "
    "share of clipped tokens is reported as if it acted",
    origin="rllm-org/rllm#81",
    signature="tokens that are reported as clipped keep ratio times advantage as their gradient, and their value; all "
    "other tokens, the penalty and all metrics right; nothing under a loss without a clip",
    seam="workbench.losses.surrogates.clipped:clip_ratio",
    broken=_broken,
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_a_clip_that_is_never_applied_is_an_importance_weight",
)
