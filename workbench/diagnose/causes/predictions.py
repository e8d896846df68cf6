"""Predictions that train, as what flowed back into the logits tells it: masks, targets, lost rows."""

from __future__ import annotations

from workbench.diagnose.causes import given
from workbench.diagnose.causes.objectives import (
    FIRST,
    LAST,
    LIKELY,
    PROVED,
    SECOND,
    THIRD,
    Found,
    begins_here,
    no_likelihood,
    objective,
)
from workbench.diagnose.facts import Facts
from workbench.diagnose.output_facts import FEW, OutputFacts

ROUGH = 0.15
"""Relative spread of mean weights of rows that only lost or gained predictions: those left are others."""
WIDE = 1.6
"""Ratio of the weights of rows beyond which importance ratios are no cause: a clip of 0.2 leaves them within 1.5."""


def other_predictions(facts: Facts, outputs: OutputFacts) -> Found:
    """Causes of other predictions that train, or of other targets; {} if they are the same."""
    if outputs.same_targets and outputs.shifted is None:
        return {}
    (right, wrong), kind = outputs.trained, objective(facts)
    text = f"{wrong} predictions train, not {right}"
    if not outputs.of_tokens:
        if given.other_ids(facts)[0]:
            return {}
        if right == wrong and not outputs.moved:
            return no_likelihood(facts)
        return {"other_mask": (FIRST, [text]), "one_term": (SECOND, [f"{text}: a term of its own has another mask"])}
    if outputs.shifted is not None and not given.other_ids(facts)[0]:
        how = "{1} behind their predictions, and in the trusted run {0}".format(*outputs.shifted)
        return {"other_targets": (PROVED, [f"targets are the ids {how}"])}
    if outputs.only_unclear:
        text = f"{text}, and those that are more or less pull by no token's likelihood: an entropy has another mask"
        return {"one_term": (LIKELY, [text]), "other_mask": (LAST, [text])}
    if (lost := outputs.rows_lost) is not None:
        return _rows_lost(facts, outputs, *lost)
    if given.other_ids(facts)[0]:
        text = f"{text}; {outputs.in_common:.0%} of the rows have the trusted targets, and the model is given other ids"
        return {"other_data": (0.8, [text])} if outputs.in_common <= FEW else {}
    if outputs.other_targets > FEW:
        return {
            "other_targets": (
                PROVED,
                [f"{outputs.other_targets:.0%} of the rows have other targets, at the same places"],
            )
        }
    if kind == "policy" and not begins_here(facts):  # a mask would have shown before
        reason = [f"{text}, from step {facts.step.number} on: their clips or ratios are others"]
        return {"clipping": (FIRST, reason), "old_logprobs": (SECOND, reason), "ratio": (THIRD, reason)}
    if outputs.moved or outputs.lost_one_each:
        how = "at other places" if outputs.moved else "one less in every row"
        known = outputs.next_ids or outputs.moved  # targets that are shifted lose one of a row, too
        return {
            "other_mask": (0.9 if known else FIRST, [f"{text}, {how}"]),
            "first_tokens": (LAST, [text]),
            "other_targets": (0.2, [text]),
        }
    if outputs.rows_added:
        reason = [f"{text}: {outputs.rows_added} rows more"]
        return {"advantages": (FIRST, reason), "other_data": (SECOND, reason), "other_mask": (THIRD, reason)}
    if kind == "policy" and outputs.in_common >= 0.5:  # a mask changes most rows, a clip or an advantage some
        reason = [f"{text}, and those of {outputs.in_common:.0%} of the rows are the same"]
        names = ("advantages", "other_mask", "ratio") if _far(outputs) else ("ratio", "clipping", "advantages")
        return {name: (score, reason) for name, score in zip(names, (FIRST, SECOND, THIRD), strict=True)}
    if kind != "policy" or _weights_of_a_mask(outputs):
        at = "" if right != wrong else ", at other places"
        return {"other_mask": (0.9, [f"{text}{at}"]), "other_targets": (LAST, [text]), "first_tokens": (LAST, [text])}
    reason = [f"{text}, and the weights of those that are left are others"]
    if wrong > right:
        return {"other_mask": (0.48, reason), "clipping": (SECOND, reason), "ratio": (THIRD, reason)}
    return {"advantages": (FIRST, reason), "other_mask": (SECOND, reason), "clipping": (THIRD, reason)}


def _rows_lost(facts: Facts, outputs: OutputFacts, rows: int, calls: int) -> Found:
    """Rows of which nothing trains: lost ones, or of a policy those that weigh nothing."""
    text = f"nothing of {rows} rows trains, and the others train as before"
    if outputs.one_side_lost and objective(facts) == "preference":
        text = f"{text}: those lost are all of one sign, and no other is"
        return {"term_without_gradient": (LIKELY, [text]), "one_term": (FIRST, [text]), "other_loss": (SECOND, [text])}
    if objective(facts) != "policy" or (calls and given.other_ids(facts)[0]):
        score = 0.6 if calls else FIRST
        first, second = ("other_data", "ranks_lost") if facts.smaller_step else ("ranks_lost", "other_data")
        text = f"{text}, but divided by their own count" if facts.smaller_step else text
        return {first: (score, [text]), second: (FIRST - 0.05, [text]), "other_mask": (THIRD, [text])}
    turned = any(one.positive == one.trained and not two.positive for one, two in outputs.same_rows)
    order = (
        ("advantages", "ratio", "clipping")
        if turned or rows == 1 or outputs.one_side_lost
        else ("ratio", "clipping", "advantages")
    )
    scores = {name: (score, [text]) for name, score in zip(order, (FIRST, SECOND, THIRD), strict=True)}
    return scores | ({"ranks_lost": (LAST, [text])} if calls else {})


def _far(outputs: OutputFacts) -> bool:
    """True if weights of the rows that train alike turn, or have factors that importance ratios have not."""
    ratios = [two.size / one.size for one, two in outputs.same_rows if one.size and two.size]
    turned = any(one.weight * two.weight < 0 for one, two in outputs.same_rows)
    return turned or (bool(ratios) and max(ratios) > WIDE * min(ratios))


def _weights_of_a_mask(outputs: OutputFacts) -> bool:
    """True if rows that gained or lost predictions weigh as before, but for one factor or for their own counts."""
    if not outputs.in_order:
        return False
    means = [(two.size / two.trained) / (one.size / one.trained) for one, two in outputs.in_order if one.size]
    counts = [one.trained / two.trained for one, two in outputs.in_order if one.size]
    return any(
        max(each) <= (1 + ROUGH) * min(each)
        for each in (means, [mean / count for mean, count in zip(means, counts, strict=True)])
    )
