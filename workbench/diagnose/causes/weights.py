"""Weights of the predictions that train, as what flowed back into logits tells them: denominators, terms, ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.diagnose.causes.objectives import (
    FIRST,
    LAST,
    LIKELY,
    LOW,
    PROVED,
    SECOND,
    THIRD,
    Found,
    begins_here,
    no_likelihood,
    objective,
    value_right,
    words_of,
)
from workbench.diagnose.facts import Facts
from workbench.diagnose.output_facts import FEW, OutputFacts
from workbench.diagnose.output_rows import Row

MUCH = 0.05
"""Share of the whole gradient of a parameter whose agreement tells something."""
TURNED = 0.1
"""Share of predictions whose weights turn, beyond which a penalty, which is small beside advantages, is no cause."""
EVERY_ROW = 0.7
"""Share of the rows whose weights move by more than a factor, from which on each prediction has a change of its own, as
of a penalty or a correction; an advantage is one for its row."""
_GRADIENT = 2**-8
"""Relative distance of norms of gradients that were rounded to bfloat16."""


def other_weights(facts: Facts, outputs: OutputFacts) -> Found:
    """Causes of other weights of the same predictions, or of what comes behind them."""
    if outputs.forward_same is not True:
        return {}
    if outputs.ratios is None:
        return no_likelihood(facts)
    if outputs.weights_same:
        return _behind_weights(facts, outputs)
    if outputs.common is not None:
        return _one_factor(facts, outputs, outputs.common)
    by_objective = _BY_OBJECTIVE.get(objective(facts), _of_likelihood)
    rules = (
        _of_counts,
        _right_value,
        _of_lengths,
        _rounded,
        by_objective if outputs.of_tokens else lambda facts, _: no_likelihood(facts),
    )
    return next(filter(None, (rule(facts, outputs) for rule in rules)), {})


def _behind_weights(facts: Facts, outputs: OutputFacts) -> Found:
    """All predictions pull as they should: what differs is a term beside them, or comes after them."""
    if outputs.beside:
        return {"one_term": (PROVED, [f"predictions weigh as they should, and {outputs.beside}"])}
    if outputs.values is not None and not outputs.values[1]:
        text = "predictions of the policy weigh as they should, and the critic's gradient is another one"
        return {"one_term": (0.6, [text]), "advantages": (LAST, [text])}
    if facts.loss_same is False:
        text = "all predictions weigh as they should: a term that is none of theirs differs"
        return {"one_term": (0.6, [text])}
    text = "the loss is right and all predictions weigh as they should: what happens to gradients after them differs"
    if facts.off and all(abs(p.ratio - 1) <= _GRADIENT for p in facts.off.values()):
        return {"lower_precision": (0.48, [text]), "some_parameters": (THIRD, [text])}
    if facts.off and any(p.share > MUCH for p in facts.right.values()):
        return {"some_parameters": (0.48, [text]), "lower_precision": (THIRD, [text])}
    return {
        "ranks_lost": (SECOND, [text]),
        "gradient_clipping": (THIRD, [text]),
        "lower_precision": (LAST, [text]),
        "some_parameters": (0.2, [text]),
    }


def _one_factor(facts: Facts, outputs: OutputFacts, factor: float) -> Found:
    text, kind = f"every prediction weighs {factor:.6g} times as much", objective(facts)
    if kind == "preference" and begins_here(facts) and not facts.loss_follows and not facts.factor_names:
        text = f"{text}, and the loss, which has one value where margins are 0, does not"
        swapped = {"other_data": (FIRST, [text]), "other_loss": (SECOND, [text]), "one_term": (THIRD, [text])}
        return swapped if factor < 0 else {"other_loss": (FIRST, [text]), "one_term": (SECOND, [text])}
    if facts.factor_names or (facts.loss_same is not False and "loss" not in facts.step.silent):
        return {}
    itself = next(
        (k for k in range(2, 17) if abs(factor * k / (k - 1) - 1) <= 1e-4 or abs(factor * (k - 1) / k - 1) <= 1e-4), 0
    )
    if kind == "policy":
        why = f"{text}, as if a baseline over {itself} held the document itself" if itself else text
        return {"advantages": (FIRST, [why]), "other_count": (SECOND, [text]), "one_term": (THIRD, [text])}
    return {"other_count": (FIRST, [text]), "unnamed_factor": (SECOND, [text])}


def _of_counts(facts: Facts, outputs: OutputFacts) -> Found:
    """Factors that are one over counts of pieces of the step."""
    texts = {
        "call": ("mean_per_rows", "predictions of each call weigh by one over its number"),
        "row": ("mean_per_documents", "predictions of each row weigh by one over its number"),
        "rank": (
            "mean_per_ranks",
            "calls fall into groups whose predictions weigh by one over the number of the group",
        ),
    }
    for of_rows in (False, True):
        matches = [texts[kind] for kind in texts if outputs.follows(kind, of_rows=of_rows)]
        score = PROVED if len(matches) == 1 else FIRST
        if matches:
            what = " of rows" if of_rows else ""
            result: Found = {name: (score - 0.05 * at, [text + what]) for at, (name, text) in enumerate(matches)}
            if matches[0][0] == "mean_per_rows" and outputs.sums_means(of_rows=of_rows):
                why = [f"{matches[0][1]}{what}, and the means of calls are added and not averaged"]
                result |= {"times_micro_batches": (LIKELY, why), "times_accumulation": (LIKELY - 0.05, why)}
            return result
    if outputs.of_calls:
        text = "each call has a factor of its own, which no count of its predictions or rows gives"
        return {"mean_per_rows": (FIRST, [text]), "uneven_weights": (SECOND, [text]), "mean_per_ranks": (THIRD, [text])}
    return {}


def _of_lengths(facts: Facts, outputs: OutputFacts) -> Found:
    if not outputs.follows("length"):
        return {}
    text = "each row weighs by its number of predictions: those of the step, or of a call, are divided together"
    return {"uneven_weights": (0.48, [text]), "mean_per_documents": (SECOND, [text]), "mean_per_rows": (LAST, [text])}


def _rounded(facts: Facts, outputs: OutputFacts) -> Found:
    """Weights that are right to the rounding of bfloat16."""
    ratios = [ratio for _, _, ratio in outputs.ratios or ()]
    most = max(abs(ratio - 1) for ratio in ratios)
    both_ways = bool(outputs.within_rows) and min(ratios) < 1 < max(ratios)
    if most > (LOW if both_ways else LOW / 4):  # what is rounded within a row averages out over it
        return {}
    text = f"weights of rows are {min(ratios):.4f} to {max(ratios):.4f} times the trusted ones"
    return {"lower_precision": (0.48, [text]), "one_term": (THIRD, [text]), "advantages": (LAST, [text])}


def _right_value(facts: Facts, outputs: OutputFacts) -> Found:
    """The value of the loss is right and the weights of predictions, its derivatives, are not."""
    if not value_right(facts, outputs):
        return {}
    if outputs.follows("length"):
        text = "the loss is right, and each row weighs by its number of predictions: a sum in place of a mean"
        of_rows = "other_loss" if objective(facts) == "preference" else "ratio"
        return {of_rows: (0.85, [text]), "mean_per_documents": (LAST, [text])}
    loss, size = abs(facts.step.losses[0]) if facts.step.losses else 0.0, sum(row.size for row in outputs.rows[0])
    if loss <= 1e-3 * size:
        return {}
    text = "the loss is right, and predictions weigh otherwise: a value is right and its derivative is not"
    return _of_first_values(facts, outputs, text) or {
        "term_without_gradient": (LIKELY, [text]),
        "ratio": (LAST, [text]),
        "one_term": (LAST, [text]),
    }


def _of_first_values(facts: Facts, outputs: OutputFacts, text: str) -> Found:
    """At ratios of 1 and margins of 0 a loss has one value, however those are computed: another one is as likely.

    A detached factor leaves predictions without weight; one that is computed otherwise moves those of rows.
    """
    kind = objective(facts)
    if not begins_here(facts) or kind not in ("policy", "preference"):
        return {}
    if kind == "preference":
        return {"other_loss": (FIRST, [text]), "term_without_gradient": (SECOND, [text]), "one_term": (THIRD, [text])}
    return {"ratio": (FIRST, [text]), "term_without_gradient": (SECOND, [text]), "one_term": (THIRD, [text])}


def _of_policy(facts: Facts, outputs: OutputFacts) -> Found:
    """Advantages, ratios, clips and penalties, which give each prediction its weight."""
    if not begins_here(facts):
        return _of_later_steps(outputs)
    ratios = [ratio for _, _, ratio in outputs.ratios or ()]
    text = f"weights of rows are {min(ratios):.3g} to {max(ratios):.3g} times the trusted ones"
    of_tokens = outputs.values is not None or words_of(facts, "gae", "gamma", "lam", "lambda")
    if outputs.within_rows >= EVERY_ROW and outputs.rows_shifted <= 1 - FEW and not of_tokens:
        return _of_each_prediction(facts, text)
    if not of_tokens and outputs.turned > TURNED:
        return {
            "advantages": (0.48, [f"{text}, and {outputs.turned:.0%} of them turn"]),
            "old_logprobs": (THIRD, [text]),
        }
    if outputs.within_rows < EVERY_ROW or outputs.rows_shifted > 1 - FEW:
        return {
            "advantages": (FIRST, [f"{text}, and those of a row move together"]),
            "one_term": (THIRD if outputs.within_rows else LAST, [text]),
            "ratio": (SECOND if outputs.turned == 0 else LAST, [text]),
            "uneven_weights": (LAST, [text]),
        }
    return {"advantages": (FIRST, [text]), "one_term": (SECOND, [text]), "old_logprobs": (THIRD, [text])}


def _of_each_prediction(facts: Facts, text: str) -> Found:
    """Changes of each prediction's own weight: an advantage is one for its row; a penalty, a correction, or ratios."""
    text = f"{text}, and each prediction has a change of its own"
    if words_of(facts, "kl", "beta"):
        return {"one_term": (FIRST, [text]), "old_logprobs": (SECOND, [text]), "ref_logprobs": (THIRD, [text])}
    if words_of(facts, "tis", "cap"):
        return {"one_term": (FIRST, [text]), "old_logprobs": (SECOND, [text]), "sampler_logprobs": (THIRD, [text])}
    return {"old_logprobs": (FIRST, [text]), "one_term": (SECOND, [text]), "ratio": (THIRD, [text])}


def _of_later_steps(outputs: OutputFacts) -> Found:
    """Of steps after a right one: advantages and masks are right, and what depends on ratios is not."""
    ratios = [ratio for _, _, ratio in outputs.ratios or ()]
    text = f"weights of rows are {min(ratios):.3g} to {max(ratios):.3g} times the trusted ones, and were right before"
    if outputs.uniform[1] and not outputs.uniform[0]:
        return {"old_logprobs": (LIKELY, [f"{text}; those within a row are one again: ratios stay 1"])}
    still = sum(abs(ratio - 1) <= outputs.bar for ratio in ratios) / len(ratios)
    order = ("clipping", "one_term", "old_logprobs") if still >= 0.5 else ("old_logprobs", "one_term", "ratio")
    return {name: (score, [text]) for name, score in zip(order, (FIRST, SECOND, THIRD), strict=True)}


def _of_pairs(facts: Facts, outputs: OutputFacts) -> Found:
    ratios = outputs.ratios or []
    text = f"rows weigh {min(r for *_, r in ratios):.3g} to {max(r for *_, r in ratios):.3g} times as much"
    if outputs.roughly_per_length:
        return {
            "other_loss": (FIRST, [f"{text}, about one over their lengths"]),
            "ref_logprobs": (SECOND, [text]),
            "one_term": (THIRD, [text]),
        }
    signs = {"chosen": True, "rejected": False}
    off = {
        name: any(abs(r - 1) > outputs.bar for one, _, r in ratios if (one.weight > 0) == sign)
        for name, sign in signs.items()
    }
    if sum(off.values()) == 1 or _other_shares(ratios):
        return {"one_term": (FIRST, [text]), "other_loss": (SECOND, [text]), "ref_logprobs": (THIRD, [text])}
    return {"ref_logprobs": (FIRST, [text]), "other_loss": (SECOND, [text]), "one_term": (THIRD, [text])}


def _other_shares(ratios: list[tuple[Row, Row, float]]) -> bool:
    """True if all of one sign are heavier than before, next to all of the other."""
    groups = [[r for one, _, r in ratios if (one.weight > 0) == sign] for sign in (True, False)]
    return all(groups) and (min(groups[0]) > max(groups[1]) or min(groups[1]) > max(groups[0]))


def _of_likelihood(facts: Facts, outputs: OutputFacts) -> Found:
    if outputs.within_rows:
        text = "predictions of a row have weights of their own"
        return {"other_loss": (FIRST, [text]), "uneven_weights": (SECOND, [text]), "other_mask": (THIRD, [text])}
    text = "rows have factors of their own"
    return {
        "uneven_weights": (FIRST, [text]),
        "mean_per_documents": (SECOND, [text]),
        "mean_per_ranks": (THIRD, [text]),
    }


_BY_OBJECTIVE: Mapping[str, Any] = {"policy": _of_policy, "preference": _of_pairs, "likelihood": _of_likelihood}
