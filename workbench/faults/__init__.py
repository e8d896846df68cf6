"""Known bugs of the field, switched on by name.

Product code has no ``if fault``. A fault names a *seam* (a function that is looked up by its name when it is called)
and what to put there instead; `planted` swaps it and puts it back. Each fault lives in a module of its own name, with
its origin, the settings under which it shows and those under which it hides, and under each some named test must go
red.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from workbench.errors import SpecError

FAMILIES: Mapping[str, str] = {
    "A": "wrong denominator",
    "B": "wrong factor of a parallel axis",
    "C": "micro-batches and accumulation",
    "D": "metrics",
    "E": "label shift, packing, boundaries",
    "F": "masks, NaN, ranks without tokens",
    "G": "temperature, behaviour policy, sampling support",
    "H": "missing or extra gradient",
    "I": "advantages and groups",
    "J": "precision and fused kernels",
    "K": "auxiliary losses",
    "S": "sharding",
}
"""What a family of faults gets wrong, by its letter."""

_STEP = "workbench.train.step"


@dataclass(frozen=True)
class Fault:
    """One known bug.

    Attributes:
        family: a letter of `FAMILIES`.
        what: the mistake in a sentence.
        origin: where it was made, with a reference.
        signature: what it does to loss and gradient, against the right step.
        seam: where it acts: a function of `workbench.train.step`, or ``module:path``, such as
            ``workbench.policy.model:Policy.token_logprobs``.
        broken: given the right function, returns the wrong one.
        shows_in: settings over a small spec under which it shows.
        hidden_in: settings over those of ``shows_in`` under which it changes nothing; None: none are known.
        detected_by: the test that goes red under it.
        changes_gradient: whether a gradient turns wrong.
        changes_metrics: whether a number that is reported turns wrong: the loss, a metric, or a norm that is not its
            gradient's. A fault that changes nothing stalls or hangs a run.
    """

    family: str
    what: str
    origin: str
    signature: str
    seam: str
    broken: Callable[[Callable[..., Any]], Callable[..., Any]]
    shows_in: Mapping[str, Any] = field(default_factory=dict)
    hidden_in: Mapping[str, Any] | None = None
    detected_by: str = "tests/faults/test_zoo.py::test_a_fault_turns_parity_red"
    changes_gradient: bool = True
    changes_metrics: bool = True

    @property
    def changes_numbers(self) -> bool:
        """Whether anything turns wrong; if not, the run stalls or hangs."""
        return self.changes_gradient or self.changes_metrics


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
    """Run a block with faults planted; the seams are whole again afterwards.

    Of several faults at one seam each is given what the one before it left there.

    Raises:
        SpecError: a name that stands twice or is not known; a seam that is not there, or is not a function.
    """
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise SpecError(
            f"faults {', '.join(names)}",
            found=f"{', '.join(twice)} more than once",
            rule="a fault is planted once",
            fix="name each fault once",
        )
    with planted_faults({name: load_fault(name) for name in names}):
        yield


@contextlib.contextmanager
def planted_faults(faults: Mapping[str, Fault]) -> Iterator[None]:
    """The same for faults that have no module here, name -> fault.

    Raises:
        SpecError: a seam that is not there, or is not a function.
    """
    with contextlib.ExitStack() as whole_again:
        for name, fault in faults.items():
            owner, attribute = _place(fault.seam)
            held = vars(owner).get(attribute)
            wrapper = type(held) if isinstance(held, staticmethod | classmethod) else None
            right = held.__func__ if wrapper else held
            if not isinstance(right, FunctionType):
                raise SpecError(
                    f"fault {name!r} at seam {fault.seam!r}",
                    found="nothing of that name" if held is None else type(held).__name__,
                    rule="a seam is a function, or a method in the class that defines it",
                    fix="name the place where the function is looked up",
                )
            broken = fault.broken(right)
            setattr(owner, attribute, wrapper(broken) if wrapper else broken)
            whole_again.callback(setattr, owner, attribute, held)
        yield


def _place(seam: str) -> tuple[Any, str]:
    """Whose attribute a seam is, and its name there."""
    module, _, path = seam.rpartition(":")
    owner, _, attribute = path.rpartition(".")
    return pkgutil.resolve_name(f"{module or _STEP}:{owner}"), attribute
