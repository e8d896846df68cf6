"""Known bugs of the field, switched on by name.

Product code has no ``if fault``. A fault names a *seam* (a function that is looked up by its name when it is called)
and what to put there instead; `planted` swaps it and puts it back. Each fault is one function under ``@fault``, in the
module of its family, with its origin, the settings under which it shows and those under which it hides, and under each
some named test must go red.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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

MODULES: Mapping[str, str] = {
    "denominators": "A",
    "document_denominators": "A",
    "axis_factors": "B",
    "micro_batches": "C",
    "metrics": "D",
    "boundaries": "E",
    "masks": "F",
    "sampling": "G",
    "gradients": "H",
    "advantages": "I",
    "precision": "J",
    "auxiliary": "K",
    "sharding": "S",
    "attention": "S",
}
"""Modules of this package whose faults a spec can name, and their family."""

_STEP = "workbench.train.step"
_DECLARED = re.compile(r"^@fault\((?:.|\n)*?^\)\ndef (\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One known bug.

    Attributes:
        name: of the function that makes it.
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

    name: str
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


def fault(*, seam: str, origin: str, signature: str, **settings: Any) -> Callable[[Callable[..., Any]], Fault]:
    """Declare a fault: decorates a function that takes the right function of a seam and returns the wrong one.

    The function's name is the fault's, the last paragraph of its docstring the mistake in a sentence.

    Args:
        seam: as in `Fault`.
        origin: as in `Fault`.
        signature: as in `Fault`.
        settings: other attributes of `Fault`; the family is that of the module unless it is given.
    """

    def declare(broken: Callable[..., Any]) -> Fault:
        module = broken.__module__.rpartition(".")[2]
        what = " ".join((broken.__doc__ or "").strip().split("\n\n")[-1].split()).removesuffix(".")
        family = settings.pop("family", None) or MODULES[module]
        return Fault(broken.__name__, family, what, origin, signature, seam, broken, **settings)

    return declare


@functools.cache
def _places() -> dict[str, str]:
    """Fault -> module, read from the text of the modules: a launcher that checks a name loads no torch."""
    folder = Path(__file__).parent
    return {
        name: module
        for module in MODULES
        for name in _DECLARED.findall((folder / f"{module}.py").read_text(encoding="utf-8"))
    }


def fault_names() -> list[str]:
    """Every fault that can be switched on."""
    return sorted(_places())


def load_fault(name: str) -> Fault:
    """The fault of a name.

    Raises:
        SpecError: there is none of that name.
    """
    if name not in _places():
        raise SpecError(f"fault {name!r}", rule=f"one of {', '.join(fault_names())}", fix="correct the spec")
    return getattr(importlib.import_module(f"{__name__}.{_places()[name]}"), name)


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
    with planted_faults([load_fault(name) for name in names]):
        yield


@contextlib.contextmanager
def planted_faults(faults: Sequence[Fault]) -> Iterator[None]:
    """The same for faults that no spec can name.

    Raises:
        SpecError: a seam that is not there, or is not a function.
    """
    with contextlib.ExitStack() as whole_again:
        for each in faults:
            owner, attribute = _place(each.seam)
            held = vars(owner).get(attribute)
            wrapper = type(held) if isinstance(held, staticmethod | classmethod) else None
            right = held.__func__ if wrapper else held
            if not isinstance(right, FunctionType):
                raise SpecError(
                    f"fault {each.name!r} at seam {each.seam!r}",
                    found="nothing of that name" if held is None else type(held).__name__,
                    rule="a seam is a function, or a method in the class that defines it",
                    fix="name the place where the function is looked up",
                )
            broken = each.broken(right)
            setattr(owner, attribute, wrapper(broken) if wrapper else broken)
            whole_again.callback(setattr, owner, attribute, held)
        yield


def _place(seam: str) -> tuple[Any, str]:
    """Whose attribute a seam is, and its name there."""
    module, _, path = seam.rpartition(":")
    owner, _, attribute = path.rpartition(".")
    return pkgutil.resolve_name(f"{module or _STEP}:{owner}"), attribute
