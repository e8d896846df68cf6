"""Known bugs of the field, planted by name.

Product code has no ``if fault``. A fault names a *seam* (a function that is looked up by name at the call) and its
replacement; `planted` swaps the function and restores it. Each fault is one function under ``@fault``, in the module
of its family, with its origin, settings that expose it, settings that hide it, and the test that must fail under it.
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

from workbench.errors import SpecError, nearest_names

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
    "L": "low-rank adapters",
    "S": "sharding",
    "U": "optimizer's update",
}
"""Families of faults, by letter."""

MODULES: Mapping[str, str] = {
    "denominators": "A",
    "axis_factors": "B",
    "micro_batches": "C",
    "metrics": "D",
    "boundaries": "E",
    "masks": "F",
    "sampling": "G",
    "gradients": "H",
    "loss_terms": "I",
    "precision": "J",
    "sharding": "S",
    "experts": "S",
    "pipeline": "S",
    "routes": "K",
    "attention": "S",
    "process_groups": "S",
    "prediction": "K",
    "adapters": "L",
    "updates": "U",
}
"""Modules of this package whose faults a spec can name -> the family of those that state none."""

_STEP = "workbench.train.step"
_DECLARED = re.compile(r"^@fault\((?:.|\n)*?\)\ndef (\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """One known bug.

    Attributes:
        name: of the function that defines it.
        family: a letter of `FAMILIES`.
        what: the mistake in one sentence.
        origin: project and reference of the mistake.
        signature: its effect on loss and gradient, relative to the correct step.
        seam: the replaced function: one of `workbench.train.step`, or ``module:path``, such as
            ``workbench.policy.model:Policy.token_logprobs``.
        broken: given the correct function, returns the wrong one.
        shows_in: changes to a small spec that expose it.
        hidden_in: changes to ``shows_in`` under which it has no effect; None: none are known.
        detected_by: the test that fails under it.
        changes_gradient: True if a gradient becomes wrong.
        changes_metrics: True if a reported number becomes wrong: the loss, a metric, or a norm other than that of its
            gradient. A fault that changes nothing stalls or hangs a run.
        changes_update: True if only the weights after the step become wrong.
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
    changes_update: bool = False

    @property
    def changes_numbers(self) -> bool:
        """True if a number of the step itself becomes wrong; if not, only its update does, or the run stalls."""
        return self.changes_gradient or self.changes_metrics


def fault(
    *, seam: str, origin: str, signature: str, needs: str = "", factory: bool = False, **settings: Any
) -> Callable[[Callable[..., Any]], Fault]:
    """Declare a fault: decorate a function that takes the correct function of a seam, then the seam's own arguments.

    The function's name is the fault's; the last paragraph of its docstring is the mistake in one sentence.

    Args:
        seam: see `Fault`.
        origin: see `Fault`.
        signature: see `Fault`.
        needs: an axis or "micro_batches", for a fault that shows with several and is hidden with one; in place of
            ``shows_in`` and ``hidden_in``.
        factory: True for a function that takes the correct function only and returns the wrong one, to keep a state of
            its own each time it is planted.
        settings: other attributes of `Fault`; the family defaults to that of the module.
    """
    if needs:
        group, several = ("data", 3) if needs == "micro_batches" else ("layout", 2)
        settings |= {"shows_in": {group: {needs: several}}, "hidden_in": {group: {needs: 1}}}

    def declare(function: Callable[..., Any]) -> Fault:
        module = function.__module__.rpartition(".")[2]
        what = " ".join((function.__doc__ or "").strip().split("\n\n")[-1].split()).removesuffix(".")
        family = settings.pop("family", None) or MODULES[module]

        def broken(correct: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **options: function(correct, *args, **options)

        return Fault(
            function.__name__, family, what, origin, signature, seam, function if factory else broken, **settings
        )

    return declare


@functools.cache
def _modules() -> dict[str, str]:
    """Fault -> module, parsed from the source: a launcher that checks a name loads no torch."""
    folder = Path(__file__).parent
    return {
        name: module
        for module in MODULES
        for name in _DECLARED.findall((folder / f"{module}.py").read_text(encoding="utf-8"))
    }


def fault_names() -> list[str]:
    """Return the names of all faults that a spec can plant."""
    return sorted(_modules())


_KNOWN = "one of the faults of workbench.faults; fault_names() there lists them"


def nearest_faults(name: str) -> str:
    """Return a question with the faults whose names are nearest to an unknown one, or where all of them are listed."""
    names = fault_names()
    parts = [each for each in names if set(name.split("_")) & set(each.split("_"))]
    near = nearest_names(name, names) or nearest_names(name, parts, cutoff=0.0)
    if not near:
        return f"unknown; workbench.faults.fault_names() lists the {len(names)} known ones"
    return f"unknown; did you mean {' or '.join(map(repr, near))}?"


def load_fault(name: str) -> Fault:
    """Return the fault of a name.

    Raises:
        SpecError: unknown name.
    """
    if name not in _modules():
        raise SpecError(f"fault {name!r}", found=nearest_faults(name), rule=_KNOWN, fix="correct the spec")
    return getattr(importlib.import_module(f"{__name__}.{_modules()[name]}"), name)


@contextlib.contextmanager
def planted(names: Sequence[str]) -> Iterator[None]:
    """Run a block with faults planted; the seams are restored afterwards.

    Several faults at one seam are applied in order, each to the result of the previous one.

    Raises:
        SpecError: a duplicate or unknown name; a seam that does not exist, or is not a function.
    """
    if duplicates := sorted({name for name in names if list(names).count(name) > 1}):
        raise SpecError(
            f"faults {', '.join(names)}",
            found=f"{', '.join(duplicates)} more than once",
            rule="a fault is planted once",
            fix="name each fault once",
        )
    with planted_faults([load_fault(name) for name in names]):
        yield


@contextlib.contextmanager
def planted_faults(faults: Sequence[Fault]) -> Iterator[None]:
    """Plant faults that no spec can name.

    Raises:
        SpecError: a seam that does not exist, or is not a function.
    """
    with contextlib.ExitStack() as restore:
        for each in faults:
            owner, attribute = _resolve(each.seam)
            original = vars(owner).get(attribute)
            wrapper = type(original) if isinstance(original, staticmethod | classmethod) else None
            function = original.__func__ if wrapper else original
            if not isinstance(function, FunctionType):
                raise SpecError(
                    f"fault {each.name!r} at seam {each.seam!r}",
                    found="nothing of that name" if original is None else type(original).__name__,
                    rule="a seam is a function, or a method in the class that defines it",
                    fix="name the module or class in which the function is looked up",
                )
            # The owner's own attribute is set, so that static and class methods keep their kind (DECISIONS.md, row 74).
            broken = each.broken(function)
            setattr(owner, attribute, wrapper(broken) if wrapper else broken)
            restore.callback(setattr, owner, attribute, original)
        yield


def _resolve(seam: str) -> tuple[Any, str]:
    """Return the owner of a seam, and the attribute's name."""
    module, _, path = seam.rpartition(":")
    owner, _, attribute = path.rpartition(".")
    return pkgutil.resolve_name(f"{module or _STEP}:{owner}"), attribute
