"""The arrays that each system's functions take, as data. An array that a function does not take is refused by name.

Another array would be left aside without a word, and the replay would return other numbers than the system. An array
that a function takes may still be without effect under some options (a reference where the KL's coefficient is 0):
then the system leaves it aside, too. Several systems hand their functions the whole batch, of which they look at a
part: the log-probabilities, advantages and values of a batch are taken there.
"""

from __future__ import annotations

import difflib

from workbench.errors import SpecError
from workbench.systems.case import Case, flags_of_logits
from workbench.systems.registry import HEAD, load_system

_ALWAYS = ("advantages", "mask", "document_index")


def inputs_of(system: str, kind: str) -> tuple[str, ...]:
    """The names of the arrays that a system's function takes.

    Args:
        system: one of `SYSTEMS`.
        kind: of case, as in `replay`.

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


def refuse_unused(case: Case) -> None:
    """Refuse arrays that the function of a case does not take.

    Raises:
        SpecError: there is one; the message names it, what the function takes, and the nearest name of that.
    """
    taken = inputs_of(case.system, case.kind)
    if case.system == "slime" and case.config.get("keep_mask"):  # flags of all logits, whatever they are called
        taken = (*taken, *flags_of_logits(case)[:1])
    elif "keep_mask" in taken:
        taken = tuple(name for name in taken if name != "keep_mask")
    unused = [name for name in case.inputs if name not in taken]
    if not unused:
        return
    near = [
        f"did you mean {match!r} for {name!r}?"
        for name in unused
        for match in difflib.get_close_matches(name, [each for each in taken if each not in case.inputs], n=1)
    ]
    instead = load_system(case.system).instead
    reasons = [instead[name] for name in unused if name in instead]
    raise SpecError(
        f"replay of {case.kind} of {case.system} with {', '.join(map(repr, unused))}",
        found=f"nothing in this replay uses {', '.join(unused)}: the numbers would be those without",
        rule=f"its arrays are {', '.join(taken)}",
        fix="; ".join([*reasons, *near]) or "leave the array out, or give it under the name of one of them",
    )
