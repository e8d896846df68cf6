"""The entropy bonus is reported and does not act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.losses.terms import Term


def _broken(entropy_bonus: Callable[..., Term]) -> Callable[..., Term]:
    def without_gradient(*args: object, **how: object) -> Term:
        term = entropy_bonus(*args, **how)
        return replace(term, values_T=term.values_T.detach())

    return without_gradient


FAULT = Fault(
    family="H",
    what="a chunked operator ignores the gradient that arrives at its entropy",
    origin="huggingface/trl#6625",
    signature="loss and metrics right; the gradient is that without a bonus, exactly 0 where the bonus is alone",
    seam="workbench.losses.build:entropy_bonus",
    broken=_broken,
    shows_in={"loss": {"entropy_coefficient": 0.3}},
    hidden_in={"loss": {"entropy_coefficient": 0.0}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_bonus_without_gradient_is_that_of_no_bonus",
    changes_metrics=False,
)
