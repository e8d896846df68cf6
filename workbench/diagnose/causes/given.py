"""Explanations from what the model was given, as recorders saw it (`workbench.records.inputs`).

They stand behind what follows from per-token values, and explain numbers that differ: other inputs alone may be other
padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.diagnose.causes.cause import NOT, Judged
from workbench.diagnose.facts import Facts

EXPLAINS = 0.93
"""Score of other inputs of the model where its numbers differ."""
UNNOTICED = 0.995
"""Of other inputs where no number differs beyond its tolerance: above `no_difference`, for they are one."""
ROUNDED = 2**-6
"""Relative distance of two losses of the same tokens: four roundings to the 8 bits of bfloat16."""
LIKELY = 0.7
"""Of one use of a mask, where the other would need another kind of mask or batch."""
OTHERWISE = 0.45
"""Of the use of a mask that is less likely."""
FEWER = 0.6
"""Of another number of tokens: lost ones, or other padding."""


def _seen(facts: Facts) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    one, other = (step.observed.get("inputs") or {} for step in facts.pair)
    return one, other


def _off(facts: Facts, role: str) -> str:
    """Clause for an argument that differs in the first step that does; "" if it does not, or is unknown.

    Only arguments of as many numbers are compared. If ids differ, what belongs to them does too.
    """
    one, other = _seen(facts)
    if not any(step.differs for step in facts.evidence.steps) or not (one.get("calls") and other.get("calls")):
        return ""
    right, wrong = one.get(role), other.get(role)
    if right == wrong or (role != "ids" and one.get("ids") != other.get("ids")):
        return ""
    if wrong is None:
        return "none given, and some in the trusted run"
    if right is None:
        return "some given, and none in the trusted run"
    if role == "mask" and right[1] * wrong[0] != wrong[1] * right[0]:  # it may be of all rows at once
        return f"{wrong[1] / wrong[0]:.0%} of it allow, not {right[1] / right[0]:.0%}"
    if right[0] != wrong[0]:
        return ""
    if right[1] != wrong[1]:
        return f"{wrong[1]} of {wrong[0]} count, not {right[1]}"
    return f"{wrong[0]} values are others" if right[3] != wrong[3] else f"the same {wrong[0]} values in another order"


def ids_same(facts: Facts) -> bool:
    """True if the model was given the same vocabulary ids."""
    one, other = _seen(facts)
    return "ids" in one and one["ids"] == other.get("ids")


def other_ids(facts: Facts) -> Judged:
    """Score of other vocabulary ids: data of another step, lost or doubled."""
    _, other = _seen(facts)
    if text := _unnoticed(facts):
        return UNNOTICED, [text]
    if text := _off(facts, "ids"):
        earlier = [step.observed.get("inputs", {}) for step in facts.suspect.steps if step.number < facts.step.number]
        again = ": those of an earlier step" if any(each.get("ids") == other["ids"] for each in earlier) else ""
        return EXPLAINS, [f"vocabulary ids that enter the model: {text}{again}"]
    return (FEWER, [fewer(facts)]) if fewer(facts) else NOT


def _unnoticed(facts: Facts) -> str:
    """Clause for other vocabulary ids of one number in one number of rows, and a loss apart by more than rounding; "".

    Only where no number differs beyond its tolerance, which is wide in bfloat16: another step's documents may give as
    large ones. Other ids of padding leave the loss where it was.
    """
    if any(step.differs for step in facts.evidence.steps):
        return ""
    suspect = {step.number: step for step in facts.suspect.steps}
    for step in facts.evidence.trusted.steps:
        its = suspect.get(step.number)
        if its is None or step.loss is None or its.loss is None:
            continue
        one, other = (seen.get("inputs", {}).get("ids") for seen in (step.observed, its.observed))
        apart = abs(step.loss - its.loss) > ROUNDED * max(abs(step.loss), abs(its.loss))
        if one and other and one[:3] == other[:3] and one[3] != other[3] and apart:
            return f"vocabulary ids that enter the model in step {step.number}: {other[0]} values are others"
    return ""


def fewer(facts: Facts) -> str:
    """Clause for another number of tokens in runs that divide their steps alike; "" if that is not the case."""
    one, other = _seen(facts)
    right, wrong = one.get("ids"), other.get("ids")
    contexts = (facts.evidence.trusted.context, facts.context)
    alike = all(contexts[0].get(name) == contexts[1].get(name) for name in ("dp", "cp"))
    if not right or not wrong or not alike or right[0] == wrong[0]:
        return ""
    if not any(step.differs for step in facts.evidence.steps):
        return ""
    calls = f" in {other['calls']} calls, not {right[0]} in {one['calls']}"
    return f"{wrong[0]} tokens, with padding, enter the model{calls}"


def fewer_calls(facts: Facts) -> bool:
    """True if the model was called less often, with fewer tokens, in runs that divide their steps alike."""
    one, other = _seen(facts)
    return bool(fewer(facts)) and other["calls"] < one["calls"]


def calls_alike(facts: Facts) -> bool:
    """True if a call is given as many tokens as in the trusted run, on average: none was divided otherwise."""
    one, other = _seen(facts)
    return bool(one.get("ids") and other.get("ids")) and (
        one["ids"][0] * other["calls"] == other["ids"][0] * one["calls"]
    )


def other_labels(facts: Facts, *, counted: bool) -> Judged:
    """Score of other labels: of another number that counts, or of others of the same number."""
    text = _off(facts, "labels")
    return (EXPLAINS, [f"labels: {text}"]) if text and (" count, not " in text) == counted else NOT


def other_positions(facts: Facts) -> Judged:
    """Score of other positions."""
    text = _off(facts, "positions")
    return (EXPLAINS, [f"positions that the model is given: {text}"]) if text else NOT


def other_attention(facts: Facts, *, packed: bool) -> Judged:
    """Score of another attention mask, in rows that are packed or padded."""
    text, (_, other) = _off(facts, "mask"), _seen(facts)
    if not text or not other.get("ids"):
        return NOT
    sure, in_rows = _in_packed_rows(facts)
    return (sure if in_rows == packed else OTHERWISE), [f"attention mask: {text}"]


def _in_packed_rows(facts: Facts) -> tuple[float, bool]:
    """Score, and True if rows hold several documents; else one document and padding.

    Rows hold several documents where they are fewer, or where positions begin again in them, and no padding where all
    of their predictions train. A mask of the pairs of tokens of each row keeps documents apart; that of padding needs
    one number a token. Rows of a call each need no padding.
    """
    seen, outputs = [each for each in _seen(facts) if each.get("ids")], facts.outputs
    rows = max(each["ids"][2] for each in seen)
    documents = max(step.counts.get("documents", 0.0) for step in facts.pair)
    if documents > rows:
        return EXPLAINS, True
    if outputs is not None and outputs.trusted["every"] == 1:
        several = any(len(each) > rows for each in outputs.rows)
        if several or outputs.trained[0] >= seen[0]["ids"][0] - rows:
            return EXPLAINS, True
    if documents == rows:
        return EXPLAINS, False
    if any(each.get("mask") and each["mask"][0] * rows >= each["ids"][0] ** 2 for each in seen):
        return LIKELY, True
    return (LIKELY, True) if rows == seen[-1]["calls"] else (EXPLAINS, False)


def met_fewer(facts: Facts) -> str:
    """Clause for backwards that found nothing to add to, where those of the trusted run did; "" if there are none."""
    one, other = (step.observed.get("met") for step in facts.pair)
    if not one or not other or one[1] != other[1] or other[0] >= one[0] or facts.gradient_same is not False:
        return ""
    return f"{other[0]} of {other[1]} later backwards met the gradient of those before, not {one[0]}: it was cleared"


def kept_gradients(facts: Facts) -> Judged:
    """Score of a first backward that met a gradient of the step before."""
    others = {step.number: step.observed for step in facts.suspect.steps}
    for step in facts.evidence.trusted.steps:
        if step.observed.get("cleared") and others.get(step.number, {}).get("cleared") is False:
            differs = any(each.differs for each in facts.evidence.steps)
            text = f"in step {step.number} the first backward met a gradient that was there before"
            return (0.97 if differs else 0.995), [text]
    return NOT
