"""What one number of another system is: its declaration, and what the declaration depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workbench.metrics.definitions import AnyMetric
from workbench.metrics.quantities import ClipRule, DocumentSlots, clip_rule
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec


class PeerSettings(NamedTuple):
    """What the definitions of other systems depend on.

    Attributes:
        clip: the surrogate's clip; None: metrics of the clip are left out.
        kind: of surrogate, as `workbench.specs.losses` names it.
        num_documents: all documents of the step, also those in which nothing counts; what Fast-LLM, TRL's sequence
            metrics and NeMo divide by. None: those with trained tokens.
        kl_estimator: the estimator that the KL penalty uses; NeMo's error metrics take it too.
        of_documents: the surrogate's ratio, and a correction's weight, is one of a document.
        spec: the loss's settings; None: metrics of what they decide are left out.
        single: shares of documents are rounded to single precision, as a system does that takes the mean of flags.
        only: beginnings of the names that are wanted, where one function of a system reports some of them; (): all.
        given: counts of a step of which only a part is here.
        token_advantages: the batch has an advantage a token and not one a document, where a system's means follow the
            shape that it came in.
    """

    clip: ClipRule | None
    kind: str = "ppo"
    num_documents: int | None = None
    kl_estimator: str = "k3"
    of_documents: bool = False
    spec: LossSpec | None = None
    single: bool = False
    only: tuple[str, ...] = ()
    given: GivenCounts = GivenCounts()
    token_advantages: bool = False


@dataclass(frozen=True)
class Alias:
    """One number of another system.

    Attributes:
        metric: its declaration; the key is the system's own name for it.
        canonical: the workbench's key of the same number; None: no canonical metric is the same on every batch.
        note: how it differs from what its name suggests.
    """

    metric: AnyMetric
    canonical: str | None = None
    note: str = ""


def settings_of(loss_spec: LossSpec | None, slots: DocumentSlots | None = None) -> PeerSettings:
    """What a loss's settings say about other systems' definitions."""
    clip = clip_rule(loss_spec)
    number = None if slots is None else slots.number
    if loss_spec is None:
        return PeerSettings(clip, num_documents=number)
    kind = loss_spec.surrogate.kind
    return PeerSettings(
        clip, kind, number, loss_spec.kl.estimator, clip is not None and clip.of_documents, spec=loss_spec
    )
