"""Explanations from what the models gave and what flowed back into them, as recorders saw it.

They need no note (`workbench.records.outputs`). Each rule takes the parts of a loss in the order of its computation:
which predictions train, their targets, the forward pass, and the weights of the predictions; the first part that
differs explains the rest. A pattern that one cause alone leaves scores `PROVED`; one that a few leave scores less than
a half, and the likelier is told first, by the objective and by how often such a mistake is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from workbench.diagnose.causes import given
from workbench.diagnose.causes.cause import Judged
from workbench.diagnose.facts import Facts
from workbench.diagnose.output_facts import FEW, LIKELIHOODS, OutputFacts
from workbench.diagnose.output_rows import Row

PROVED = 0.93
"""Of a pattern with exact numbers that no other cause leaves."""
LIKELY = 0.7
"""Of a pattern that another cause leaves only by accident."""
FIRST, SECOND, THIRD, LAST = 0.45, 0.4, 0.36, 0.3
"""Of causes that leave the same pattern, none of which is told with confidence. The first is the one that the faults of
the blind sets 1 to 4, a stated prior, have most often; it is not counted again."""
LOW = 0.02
"""Nats or relative weight by which rounding to bfloat16 moves a prediction: 2^-9 of a logit of 10."""
ROUGH = 0.15
"""Relative spread of mean weights of rows that only lost or gained predictions: those left are others."""
MUCH = 0.05
"""Share of the whole gradient of a parameter whose agreement tells something."""
TURNED = 0.1
"""Share of predictions whose weights turn, beyond which a penalty, which is small beside advantages, is no cause."""
EVERY_ROW = 0.7
"""Share of the rows whose weights move by more than a factor, from which on each prediction has a change of its own, as
of a penalty or a correction; an advantage is one for its row."""
EXACT = 1e-6
"""Relative distance of two losses that are one number, from sums in float32."""
WIDE = 1.6
"""Ratio of the weights of rows beyond which importance ratios are no cause: a clip of 0.2 leaves them within 1.5."""
_GRADIENT = 2**-8
"""Relative distance of norms of gradients that were rounded to bfloat16."""

Found = dict[str, Judged]
_WORDS = {
    "preference": ("dpo", "ipo", "kto", "orpo", "simpo", "preference", "pairs", "chosen", "rejected"),
    "distillation": ("distill", "distillation", "teacher", "gkd", "opd", "student"),
    "likelihood": ("sft", "lm", "pretrain", "pretraining", "cross", "likelihood"),
    "policy": (
        *("grpo", "ppo", "gspo", "dapo", "cispo", "rloo", "reinforce", "drgrpo", "vapo", "gae", "gamma", "lam"),
        *("advantage", "advantages", "rollout", "clip", "kl", "group", "groups", "reward", "rewards", "entropy"),
    ),
}
"""Words of a context that name the objective; the first kind of which there is one is taken."""


def objective(facts: Facts) -> str:
    """Kind of the loss: by the weights of predictions, where they tell it, or else by words of the context."""
    words: set[str] = set()
    for name, value in facts.evidence.trusted.context.items():
        if name != "observed" and "grad" not in name and value is not None:
            words |= set(re.split(r"[^a-z]+", name.lower())) | set(re.split(r"[^a-z]+", str(value).lower()))
    named = next((kind for kind, known in _WORDS.items() if words & set(known)), "")
    outputs = facts.outputs
    if outputs is None:
        return named
    likelihoods = outputs.trusted["likelihoods"]
    if likelihoods >= LIKELIHOODS and all(row.positive == row.trained for row in outputs.rows[0]):
        return "likelihood"
    if likelihoods < 0.5 and outputs.values is None:
        return "likelihood" if named == "likelihood" and not outputs.of_tokens else "distillation"
    if outputs.opposed:
        return "preference"
    return named if named in ("preference", "policy") else "policy"


def flowed(facts: Facts) -> Found:
    """Cause -> score and reasons, from the outputs of the first step that differs; {} if they are not known."""
    outputs = facts.outputs
    if outputs is None or not (facts.loss_same is False or facts.gradient_same is False):
        return {}
    if facts.turned_before:
        text = "every prediction pulls the other way, from a step on in which losses and norms of gradients agree"
        return {"other_loss": (FIRST, [text]), "other_data": (SECOND, [text]), "advantages": (THIRD, [text])}
    if (temperatures := outputs.temperatures) is not None and facts.step.token_same("policy_logprobs") is not True:
        right, wrong = temperatures
        text = f"gradients of logits are those of temperature {wrong:.4g}, and of {right:.4g} in the trusted run"
        return {"temperature": (0.95, [text])}
    rules: tuple[Callable[[Facts, OutputFacts], Found], ...] = (_other_predictions, _forward, _weights)
    return next(filter(None, (rule(facts, outputs) for rule in rules)), {})


def spoken_against(facts: Facts) -> frozenset[str]:
    """Causes that change weights of predictions or data, where all of them are known to be the same."""
    outputs = facts.outputs
    if outputs is None:
        return frozenset()
    same = outputs.same_targets and facts.forward_same is True and facts.other_tokens == 0
    data = frozenset(("other_data",) if same else ())
    if not outputs.weights_same:
        return data
    weights = frozenset(
        ("uneven_weights", "other_loss", "term_without_gradient", "other_count", "added_repeatedly")
        if facts.forward_same
        else ("uneven_weights", "other_loss", "term_without_gradient", "other_count", "ranks_lost", "added_repeatedly")
    )
    return weights | data


def _begins_here(facts: Facts) -> bool:
    """True if the first step of all differs: no earlier one has shown that masks and advantages are right."""
    return facts.step.number == facts.evidence.steps[0].number


def _value_right(facts: Facts, outputs: OutputFacts) -> bool:
    """True if the losses are one number, and not one that terms of other signs cancel to."""
    losses, size = facts.step.losses, sum(row.size for row in outputs.rows[0])
    if losses is None:
        return False
    return abs(losses[0] - losses[1]) <= EXACT * max(abs(losses[0]), size)


# ---- which predictions --------------------------------------------------------------------------------------


def _other_predictions(facts: Facts, outputs: OutputFacts) -> Found:
    if outputs.same_targets and outputs.shifted is None:
        return {}
    (right, wrong), kind = outputs.trained, objective(facts)
    text = f"{wrong} predictions train, not {right}"
    if not outputs.of_tokens:
        if given.other_ids(facts)[0]:
            return {}
        if right == wrong and not outputs.moved:
            return _no_likelihood(facts)
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
    if kind == "policy" and not _begins_here(facts):  # a mask would have shown before
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


def _no_likelihood(facts: Facts) -> Found:
    """Gradients of whole distributions: a term that is no likelihood, or a teacher's distribution."""
    if facts.scaled:
        return {}
    kind, outputs = objective(facts), facts.outputs
    if outputs is not None and _value_right(facts, outputs):
        reason = ["the loss is right, and the gradient that flows back is another one"]
        return {"term_without_gradient": (FIRST, reason), "one_term": (SECOND, reason), "ratio": (LAST, reason)}
    if kind == "likelihood":
        reason = ["a likelihood of tokens has a term of whole distributions next to it in one run, or another one"]
        return {"one_term": (FIRST, reason), "other_loss": (SECOND, reason), "other_targets": (LAST, reason)}
    if kind == "policy":
        reason = [
            "weights of predictions cannot be read next to a term of whole distributions, and something is another"
        ]
        return {"advantages": (FIRST, reason), "one_term": (SECOND, reason), "old_logprobs": (THIRD, reason)}
    reason = ["the gradient is that of whole distributions, and another one"]
    if _words_of(facts, "alpha", "weight", "coef", "ce"):  # of several terms
        return {"one_term": (FIRST, reason), "ref_logprobs": (SECOND, reason), "other_loss": (THIRD, reason)}
    return {"ref_logprobs": (FIRST, reason), "other_loss": (SECOND, reason), "temperature": (THIRD, reason)}


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
    found = {name: (score, [text]) for name, score in zip(order, (FIRST, SECOND, THIRD), strict=True)}
    return found | ({"ranks_lost": (LAST, [text])} if calls else {})


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


# ---- forward ------------------------------------------------------------------------------------------------


def _forward(facts: Facts, outputs: OutputFacts) -> Found:
    if outputs.forward_same is not False or outputs.forward_apart is None:
        return {}
    if given.other_ids(facts)[0]:
        return {}
    mean, most = outputs.forward_apart
    text = f"log-probabilities and entropies of rows are apart by {mean:.2g} nats, at most {most:.2g}"
    if not _begins_here(facts):
        before = facts.evidence.steps[0]
        if before.gradient_same and (before.loss_same is not False):
            return {
                "update": (LIKELY, [f"{text}, after updates from equal gradients"]),
                "lower_precision": (LAST, [text]),
            }
        return {}
    first, second = ("lower_precision", "model_settings")
    if mean > LOW / 10 or not outputs.scatters:
        first, second = second, first
    return {
        first: (FIRST, [f"{text}, from the same inputs and weights"]),
        second: (SECOND, [text]),
        "other_logprobs": (LAST, [text]),
        "dropout": (0.2, [text]),
        "position_ids": (0.15, [text]),
        "attention_across_documents": (0.12, [text]),
    }


# ---- weights ------------------------------------------------------------------------------------------------


def _weights(facts: Facts, outputs: OutputFacts) -> Found:
    if outputs.forward_same is not True:
        return {}
    if outputs.ratios is None:
        return _no_likelihood(facts)
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
        by_objective if outputs.of_tokens else lambda facts, _: _no_likelihood(facts),
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
    if kind == "preference" and _begins_here(facts) and not facts.loss_follows and not facts.factor_names:
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
        found = [texts[kind] for kind in texts if outputs.follows(kind, of_rows=of_rows)]
        score = PROVED if len(found) == 1 else FIRST
        if found:
            what = " of rows" if of_rows else ""
            result: Found = {name: (score - 0.05 * at, [text + what]) for at, (name, text) in enumerate(found)}
            if found[0][0] == "mean_per_rows" and outputs.sums_means(of_rows=of_rows):
                why = [f"{found[0][1]}{what}, and the means of calls are added and not averaged"]
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
    if not _value_right(facts, outputs):
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
    if not _begins_here(facts) or kind not in ("policy", "preference"):
        return {}
    if kind == "preference":
        return {"other_loss": (FIRST, [text]), "term_without_gradient": (SECOND, [text]), "one_term": (THIRD, [text])}
    return {"ratio": (FIRST, [text]), "term_without_gradient": (SECOND, [text]), "one_term": (THIRD, [text])}


def _of_policy(facts: Facts, outputs: OutputFacts) -> Found:
    """Advantages, ratios, clips and penalties, which give each prediction its weight."""
    if not _begins_here(facts):
        return _of_later_steps(outputs)
    ratios = [ratio for _, _, ratio in outputs.ratios or ()]
    text = f"weights of rows are {min(ratios):.3g} to {max(ratios):.3g} times the trusted ones"
    of_tokens = outputs.values is not None or _words_of(facts, "gae", "gamma", "lam", "lambda")
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
    if _words_of(facts, "kl", "beta"):
        return {"one_term": (FIRST, [text]), "old_logprobs": (SECOND, [text]), "ref_logprobs": (THIRD, [text])}
    if _words_of(facts, "tis", "cap"):
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


def _words_of(facts: Facts, *words: str) -> bool:
    """True if the name of a setting in the context has one of these words: of a penalty, a correction, a critic."""
    return any(set(words) & set(re.split(r"[^a-z]+", name.lower())) for name in facts.context if name != "observed")


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
