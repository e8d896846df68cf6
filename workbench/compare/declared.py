"""Invariants that a loss declares to break: a difference under those is expected, not a defect.

Both the report and the command line print them next to a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from workbench.specs.losses import LossSpec

MEANINGS = {
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
    "micro_batch": "micro-batches",
    "packing": "packing order",
    "masked_rows": "documents without trained tokens",
}
"""Entry of `LossSpec.breaks` -> the change under which the loss differs."""


def declared_breaks(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the invariants that the loss of a configuration declares to break; () for almost all.

    Args:
        settings: of the configuration, from `Configuration.settings`: the whole spec as JSON data.

    Returns:
        Entries of `LossSpec.breaks`. () also for a loss that this version cannot read, such as one of an older record.

    Example:
        >>> declared_breaks({"loss": {"name": "bnpo"}}), declared_breaks({"loss": {"name": "grpo"}})
        (('micro_batch', 'packing', 'dp'), ())
    """
    loss = settings.get("loss")
    if not isinstance(loss, Mapping):
        return ()
    try:
        return LossSpec.model_validate(dict(loss)).breaks
    except (ValidationError, TypeError, ValueError):
        return ()


def declared_note(settings: Mapping[str, Any]) -> str:
    """Return a sentence on the invariants that the loss declares to break; "" if it declares none.

    Example:
        >>> declared_note({"loss": {"name": "bnpo"}})
        'bnpo declares that it depends on micro-batches, packing order and data-parallel ranks'
    """
    names = [MEANINGS.get(name, name) for name in declared_breaks(settings)]
    if not names:
        return ""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{settings['loss'].get('name', 'the loss')} declares that it depends on {listed}"
