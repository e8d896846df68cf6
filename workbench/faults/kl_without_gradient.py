"""The KL penalty is reported and trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.losses.terms import Term


def _broken(kl_term: Callable[..., Term]) -> Callable[..., Term]:
    def without_gradient(*args: object) -> Term:
        term = kl_term(*args)
        return replace(term, values_T=term.values_T.detach())

    return without_gradient


FAULT = Fault(
    family="H",
    what="the KL penalty is computed where no gradient is recorded",
    origin="NovaSky-AI/SkyRL#1353",
    signature="loss right; the gradient is that of the other terms alone, exactly 0 where the penalty is the only one",
    seam="workbench.losses.build:kl_term",
    broken=_broken,
    shows_in={"loss": {"kl": {"coefficient": 0.3}}},
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    changes_metrics=False,
)
