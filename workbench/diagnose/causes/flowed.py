"""Explanations from what the models gave and what flowed back into them, as recorders saw it.

They need no note (`workbench.records.outputs`). Each rule takes the parts of a loss in the order of its computation:
which predictions train, their targets, the forward pass, and the weights of the predictions; the first part that
differs explains the rest. A pattern that one cause alone leaves scores `PROVED`; one that a few leave scores less than
a half, and the likelier is told first, by the objective and by how often such a mistake is made.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.diagnose.causes import given
from workbench.diagnose.causes.objectives import FIRST, LAST, LIKELY, LOW, SECOND, THIRD, Found, begins_here
from workbench.diagnose.causes.predictions import other_predictions
from workbench.diagnose.causes.weights import other_weights
from workbench.diagnose.facts import Facts
from workbench.diagnose.output_facts import OutputFacts


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
    rules: tuple[Callable[[Facts, OutputFacts], Found], ...] = (other_predictions, _forward, other_weights)
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


def _forward(facts: Facts, outputs: OutputFacts) -> Found:
    if outputs.forward_same is not False or outputs.forward_apart is None:
        return {}
    if given.other_ids(facts)[0]:
        return {}
    mean, most = outputs.forward_apart
    text = f"log-probabilities and entropies of rows are apart by {mean:.2g} nats, at most {most:.2g}"
    if not begins_here(facts):
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
