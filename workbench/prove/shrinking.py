"""Shrinking of a failure: fewer documents, shorter ones, fewer ranks, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from workbench.prove.invariants import Case, Invariant


def shrink(case: Case, invariant: Invariant, fails: Callable[[Case], bool], has_time: Callable[[], bool]) -> Case:
    """The smallest case that greedy steps find.

    Args:
        case: one that fails.
        invariant: the invariant it breaks.
        fails: True for a case that fails in the same way.
        has_time: True while there is time for another try.
    """
    improved = True
    while improved:
        improved = False
        for smaller in smaller_cases(case, invariant):
            if not has_time():
                return case
            if fails(smaller):
                case, improved = smaller, True
                break
    return case


def smaller_cases(case: Case, invariant: Invariant) -> Iterator[Case]:
    """Cases one step smaller, largest steps first: a number, half of the documents, one of them, tokens."""
    for name, choices in invariant.numbers.items():
        at = list(choices).index(case[name])
        for smaller in list(choices)[:at]:
            yield case.with_number(name, smaller)
    count = len(case.documents)
    for size in dict.fromkeys((count // 2, count // 4, 1) if count > 3 else (1,) if count > 1 else ()):
        for begin in range(0, count, size):
            yield replace(case, documents=case.documents[:begin] + case.documents[begin + size :])
    for number, document in enumerate(case.documents):
        length = len(document.tokens)
        for shorter in dict.fromkeys((length // 2, length - 1)):
            if 0 < shorter < length:
                cut = (*case.documents[:number], document.cut(shorter), *case.documents[number + 1 :])
                yield replace(case, documents=cut)
