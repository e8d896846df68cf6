"""Objective of a loss, and scores, for what flowed through the models: shared by its rules."""

from __future__ import annotations

import re

from workbench.diagnose.causes.cause import Judged
from workbench.diagnose.facts import Facts
from workbench.diagnose.output_facts import LIKELIHOODS, OutputFacts

PROVED = 0.93
"""Of a pattern with exact numbers that no other cause leaves."""
LIKELY = 0.7
"""Of a pattern that another cause leaves only by accident."""
FIRST, SECOND, THIRD, LAST = 0.45, 0.4, 0.36, 0.3
"""Of causes that leave the same pattern, none of which is told with confidence. The first is the one that the faults of
the blind sets 1 to 4, a stated prior, have most often; it is not counted again."""
LOW = 0.02
"""Nats or relative weight by which rounding to bfloat16 moves a prediction: 2^-9 of a logit of 10."""
EXACT = 1e-6
"""Relative distance of two losses that are one number, from sums in float32."""

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
    context_words: set[str] = set()
    for name, value in facts.evidence.trusted.context.items():
        if name != "observed" and "grad" not in name and value is not None:
            context_words |= set(re.split(r"[^a-z]+", name.lower())) | set(re.split(r"[^a-z]+", str(value).lower()))
    named = next((kind for kind, known in _WORDS.items() if context_words & set(known)), "")
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


def words_of(facts: Facts, *words: str) -> bool:
    """True if the name of a setting in the context has one of these words: of a penalty, a correction, a critic."""
    return any(set(words) & set(re.split(r"[^a-z]+", name.lower())) for name in facts.context if name != "observed")


def begins_here(facts: Facts) -> bool:
    """True if the first step of all differs: no earlier one has shown that masks and advantages are right."""
    return facts.step.number == facts.evidence.steps[0].number


def value_right(facts: Facts, outputs: OutputFacts) -> bool:
    """True if the losses are one number, and not one that terms of other signs cancel to."""
    losses, size = facts.step.losses, sum(row.size for row in outputs.rows[0])
    if losses is None:
        return False
    return abs(losses[0] - losses[1]) <= EXACT * max(abs(losses[0]), size)


def no_likelihood(facts: Facts) -> Found:
    """Gradients of whole distributions: a term that is no likelihood, or a teacher's distribution."""
    if facts.scaled:
        return {}
    kind, outputs = objective(facts), facts.outputs
    if outputs is not None and value_right(facts, outputs):
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
    if words_of(facts, "alpha", "weight", "coef", "ce"):  # of several terms
        return {"one_term": (FIRST, reason), "ref_logprobs": (SECOND, reason), "other_loss": (THIRD, reason)}
    return {"ref_logprobs": (FIRST, reason), "other_loss": (SECOND, reason), "temperature": (THIRD, reason)}
