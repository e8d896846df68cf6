"""A metric of another system: its declaration, and the settings that the declaration depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workbench.metrics.definitions import AnyMetric
from workbench.metrics.quantities import ClipRule, DocumentSlots, clip_rule
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec


class PeerSettings(NamedTuple):
    """Settings that metric definitions of other systems depend on.

    Attributes:
        clip: the surrogate's clip; None: metrics of the clip are left out.
        kind: kind of surrogate, as `workbench.specs.losses` names it.
        num_documents: all documents of the step, also those in which nothing counts; what Fast-LLM, TRL's sequence
            metrics and NeMo divide by. None: those with trained tokens.
        kl_estimator: the estimator that the KL penalty uses; NeMo's error metrics take it too.
        of_documents: the surrogate's ratio, and a correction's weight, is one of a document.
        spec: the loss's settings; None: metrics that depend on them are left out.
        single: shares of documents are rounded to single precision, as in systems that average flags.
        only: prefixes of the names to report, if a function of the system reports only some; (): all.
        given: counts of the whole step, if only a part of it is present.
        token_advantages: the batch has one advantage per token, not per document, and the system's means follow that
            shape.
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
    """A metric of another system.

    Attributes:
        metric: its declaration; the key is the system's own name for it.
        canonical: the workbench's key of the same number; None: no canonical metric is the same on every batch.
        note: difference from what the name suggests.
    """

    metric: AnyMetric
    canonical: str | None = None
    note: str = ""


def settings_of(loss_spec: LossSpec | None, slots: DocumentSlots | None = None) -> PeerSettings:
    """Return the settings that other systems' definitions need, from those of a loss."""
    clip = clip_rule(loss_spec)
    number = None if slots is None else slots.number
    if loss_spec is None:
        return PeerSettings(clip, num_documents=number)
    kind = loss_spec.surrogate.kind
    return PeerSettings(
        clip, kind, number, loss_spec.kl.estimator, clip is not None and clip.of_documents, spec=loss_spec
    )
