"""Metrics of other systems, under their names and by their definitions; one module per system.

A name says little: `clip_ratio/region_mean` (TRL) looks at the sign of the advantage, `clipped_ratio_fraction`
(Fast-LLM) does not and is a mean over documents. So no metric here is a similar one renamed: each has its own
declaration and definition, and `Alias.canonical` names the workbench's key only if both are the same number on every
batch.

Read from the code and checked against numbers of Fast-LLM 7d61a1ba, TRL 1.16.0, verl 1dda039b, NeMo-RL 7ea279ab.
Numbers that these systems compute wrongly, or under a misleading name, are not reproduced: see `left_out`.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import metric_table
from workbench.metrics.policy import measure
from workbench.metrics.quantities import ClipRule, DocumentSlots, Quantities
from workbench.metrics.values import Value
from workbench.specs.losses import LossSpec
from workbench.systems.alias import Alias, PeerSettings, settings_of
from workbench.systems.registry import SYSTEMS, load_system

if TYPE_CHECKING:
    import pandas as pd


def left_out() -> dict[tuple[str, str], str]:
    """Map (system, name) to what that system reports there in some case, and what is reported here instead."""
    return {(system, name): why for system in SYSTEMS for name, why in load_system(system).left_out.items()}


def as_named_by(
    system: str,
    inputs: LossInputs,
    loss_mask_T: Tensor,
    *,
    terms: Mapping[str, Term] | None = None,
    loss_spec: LossSpec | None = None,
    slots: DocumentSlots | None = None,
    settings: PeerSettings | None = None,
) -> dict[str, Value]:
    """Return one micro-batch's metrics as another system names and defines them, unfinished.

    They merge like all others: `workbench.metrics.values.finish_metrics`, alone or together with `policy_metrics`.
    Names whose quantities the batch does not have (no sampler, no reference, no clip) are left out.

    Args:
        system: one of `SYSTEMS`.
        inputs: inputs of the loss.
        loss_mask_T: [T] bool, the population.
        terms: terms of the loss; corrections keep their weights there.
        loss_spec: the loss's settings.
        slots: names of the row's documents in the whole step; needed by numbers of whole documents.
        settings: settings of the definitions; None: derived from ``loss_spec`` and ``slots``.

    Raises:
        SpecError: unknown system, or a sequence-level loss without ``slots``.
    """
    settings = settings or settings_of(loss_spec, slots)
    if settings.of_documents and slots is None:
        raise SpecError(
            f"metrics as {system} names them, for a loss of kind {settings.kind!r}",
            found="no slots",
            rule="a ratio of documents needs the names of the documents in the step",
            fix="pass slots=DocumentSlots(first, number)",
        )
    q = Quantities(inputs, terms or {}, loss_mask_T, clip=settings.clip, slots=slots)
    return measure((alias.metric for alias in aliases(system, settings)), q)


def aliases(system: str, settings: PeerSettings) -> tuple[Alias, ...]:
    """Return every metric of a system with its definition, for a loss.

    Raises:
        SpecError: unknown system.
    """
    return tuple(load_system(system).aliases(settings))


def alias_table(system: str, settings: PeerSettings | None = None) -> pd.DataFrame:
    """Tabulate a system's metrics: definitions, and the canonical key of the same number. One row per name."""
    settings = settings or PeerSettings(ClipRule(0.8, 1.2, 3.0))
    chosen = aliases(system, settings)
    frame = metric_table([alias.metric for alias in chosen]).drop(columns="level")
    frame.insert(0, "canonical", [alias.canonical or "" for alias in chosen])
    frame["note"] = [alias.note for alias in chosen]
    return frame
