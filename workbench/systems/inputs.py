"""Arrays that each system's functions take, as data. Any other array is an error.

It would be ignored silently, and the replay would return other numbers than the system. An array that a function takes
may still have no effect under some options (a reference with a KL coefficient of 0): the system ignores it, too.
Several systems pass their functions the whole batch and read a part of it: the log-probabilities, advantages and values
of a batch are accepted there.
"""

from __future__ import annotations

import difflib

from workbench.errors import SpecError
from workbench.systems.case import Case, flags_of_logits
from workbench.systems.registry import HEAD, load_system

_ALWAYS = ("advantages", "mask", "document_index")


def inputs_of(system: str, kind: str) -> tuple[str, ...]:
    """Return the names of the arrays that a system's function takes.

    Args:
        system: one of `SYSTEMS`.
        kind: kind of case, as in `replay`.

    Raises:
        SpecError: the system has no such kind.
    """
    declared = load_system(system)
    further = declared.arrays_of
    if kind in further:
        return further[kind]
    if kind == "logprobs":
        return ("logits", "targets", "cotangent_logprobs", "cotangent_entropy")
    tokens = (*_ALWAYS, *declared.arrays)
    before = ("grad_logits_in",) if system == "fast_llm" else ()
    policy = {
        "policy_loss": ("logprobs",),
        "policy_loss_packed": ("logprobs",),
        "policy_loss_logits": ("logits", "targets", *before),
        "fused_linear_policy_loss": HEAD,
    }
    if kind not in policy:
        raise SpecError(
            f"arrays of {kind!r} of {system}",
            rule=f"one of {', '.join([*policy, 'logprobs', *further])}",
            fix="choose one of them",
        )
    return (*policy[kind], *tokens)


def check_arrays(case: Case) -> None:
    """Raise an error for arrays that the function of a case does not take.

    Raises:
        SpecError: there is one; the message names it, the accepted arrays, and the closest of their names.
    """
    accepted = inputs_of(case.system, case.kind)
    if case.system == "slime" and case.config.get("keep_mask"):  # flags of all logits, under any name
        accepted = (*accepted, *flags_of_logits(case)[:1])
    elif "keep_mask" in accepted:
        accepted = tuple(name for name in accepted if name != "keep_mask")
    unused = [name for name in case.inputs if name not in accepted]
    if not unused:
        return
    suggestions = [
        f"did you mean {match!r} for {name!r}?"
        for name in unused
        for match in difflib.get_close_matches(name, [each for each in accepted if each not in case.inputs], n=1)
    ]
    instead = load_system(case.system).unsupported_arrays
    reasons = [instead[name] for name in unused if name in instead]
    raise SpecError(
        f"replay of {case.kind} of {case.system} with {', '.join(map(repr, unused))}",
        found=f"nothing in this replay uses {', '.join(unused)}: the result would be the same",
        rule=f"its arrays are {', '.join(accepted)}",
        fix="; ".join([*reasons, *suggestions]) or "leave the array out, or pass it under one of these names",
    )
