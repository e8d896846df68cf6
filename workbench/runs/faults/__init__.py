"""Known bugs of the field, switched on by name.

Product code has no ``if fault``. A fault names a *seam* (a function that `workbench.runs.step` calls by its global
name) and what to put there instead; `planted` swaps it and puts it back. Each fault lives in a module of its own
name, with its origin, and under each some named test must go red.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import SpecError


@dataclass(frozen=True)
class Fault:
    """One known bug.

    Attributes:
        what: the mistake in a sentence.
        origin: where it was made, with a reference.
        signature: what it does to loss and gradient, against the right step.
        seam: name of a function in `workbench.runs.step`.
        broken: given the right function, returns the wrong one.
        changes_numbers: whether loss or gradients turn wrong; if not, the run stalls or hangs.
    """

    what: str
    origin: str
    signature: str
    seam: str
    broken: Callable[[Callable[..., Any]], Callable[..., Any]]
    changes_numbers: bool = True


def fault_names() -> list[str]:
    """Every fault that can be switched on."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_fault(name: str) -> Fault:
    """The fault of a name.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in fault_names():
        raise SpecError(f"fault {name!r}", rule=f"one of {', '.join(fault_names())}", fix="correct the spec")
    return importlib.import_module(f"{__name__}.{name}").FAULT


@contextlib.contextmanager
def planted(names: Sequence[str]) -> Iterator[None]:
    """Run a block with faults planted in `workbench.runs.step`; the seams are whole again afterwards."""
    from workbench.runs import step

    faults = [load_fault(name) for name in names]
    before = {fault.seam: getattr(step, fault.seam) for fault in faults}
    try:
        for fault in faults:
            setattr(step, fault.seam, fault.broken(getattr(step, fault.seam)))
        yield
    finally:
        for seam, function in before.items():
            setattr(step, seam, function)
