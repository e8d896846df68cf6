"""Losses that are recognised from a record's own log-probabilities, each computed here token by token."""

import math

import pytest
import torch

from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.record import Record, RecordedStep
from workbench.diagnose.surrogates import BOUNDS, explained

DOCUMENTS = (7, 4, 9, 5, 6, 8)
ROWS = (0, 0, 1, 1, 2, 2)


def values(on_policy=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = {name: [] for name in ("policy_logprobs", "old_logprobs", "advantages", "trained", "documents", "rows")}
    for document, (length, row) in enumerate(zip(DOCUMENTS, ROWS, strict=True)):
        advantage = float(torch.randn(1, generator=draw))
        for place in range(length):
            policy = -3 * float(torch.rand(1, generator=draw))
            moved = 0.0 if on_policy else 0.6 * float(torch.randn(1, generator=draw))
            entry = (policy, policy - moved, advantage, place > 1, document, row)
            for name, value in zip(tokens, entry, strict=True):
                tokens[name].append(value)
    return {name: torch.tensor(column) for name, column in tokens.items()}


def token_losses(tokens, low=0.2, high=0.28, kind="token", choose=max):
    """Values to be minimised, one number at a time."""
    losses = []
    for at in range(len(tokens["trained"])):
        same = [
            other
            for other in range(len(tokens["trained"]))
            if tokens["documents"][other] == tokens["documents"][at] and tokens["trained"][other]
        ]
        among = [at] if kind == "token" else same
        ratio = math.exp(
            sum(float(tokens["policy_logprobs"][i] - tokens["old_logprobs"][i]) for i in among) / len(among)
        )
        advantage = float(tokens["advantages"][at])
        losses.append(choose(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage))
    return losses


def mean(tokens, losses, pieces=None):
    """The mean over trained tokens, or of the means within pieces."""
    numbers = [0] * len(losses) if pieces is None else tokens[pieces].tolist()
    parts = {number: [] for number in numbers}
    for number, loss, trained in zip(numbers, losses, tokens["trained"], strict=True):
        if trained:
            parts[number].append(loss)
    return sum(sum(part) / len(part) for part in parts.values()) / len(parts)


def record(loss, tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    gradients = {"a": torch.randn(30, generator=draw), "b": torch.randn(20, generator=draw)}
    norms = {name: float(value.norm()) for name, value in gradients.items()}
    counts = {"documents": 6.0, "trained_tokens": float(tokens["trained"].sum())}
    step = RecordedStep(0, loss=loss, gradient_norms=norms, gradients=gradients, tokens=tokens, counts=counts)
    return Record({"precision": "float32", "micro_batches": 3}, [step])


@pytest.mark.parametrize(
    ("change", "pieces", "cause"),
    [
        ({}, "rows", "mean_per_rows"),
        ({}, "documents", "mean_per_documents"),
        ({"high": 0.2}, None, "clipping"),
        ({"choose": min}, None, "clipping"),
        ({"kind": "document"}, None, "ratio"),
        ({"low": math.inf, "high": math.inf}, None, "other_loss"),
    ],
)
def test_the_surrogate_or_denominator_that_gives_the_loss_is_named(change, pieces, cause):
    tokens = values()
    trusted = record(mean(tokens, token_losses(tokens)), tokens)
    suspect = record(mean(tokens, token_losses(tokens, **change), pieces), tokens, seed=1)
    diagnosis = diagnose_records(trusted, suspect)
    assert diagnosis.causes[0].name == cause, str(diagnosis)
    assert diagnosis.causes[0].score > 0.8


def test_on_policy_all_surrogates_give_the_same_loss_and_none_is_accused():
    tokens = values(on_policy=True)
    loss = mean(tokens, token_losses(tokens))
    names = {name for name, _ in explained(record(loss, tokens).steps[0], {})}
    assert len(names) > len(BOUNDS)
    diagnosis = diagnose_records(record(loss, tokens), record(loss, tokens, seed=1))
    assert not {"clipping", "ratio", "other_loss"} & {each.name for each in diagnosis.causes}


def test_ranges_of_the_context_are_tried_and_a_loss_with_other_terms_is_not_explained():
    tokens = values()
    step = record(mean(tokens, token_losses(tokens, low=0.15, high=0.4)), tokens).steps[0]
    assert explained(step, {}) == []
    [(name, way)] = explained(step, {"clip_ratio_low": 0.15, "clip_ratio_high": 0.4})
    assert name == "ratios clipped at 0.15 and 0.4"
    assert way.description == "all trained tokens of the step"
    other = record(0.01 + mean(tokens, token_losses(tokens)), tokens).steps[0]
    assert explained(other, {}) == []


def test_a_loss_in_half_precision_is_explained_by_its_own_values():
    tokens = values()
    tokens["policy_logprobs"] = tokens["policy_logprobs"].bfloat16()
    step = record(mean(tokens, token_losses(tokens)), tokens).steps[0]
    assert [name for name, _ in explained(step, {"precision": "bf16_mixed"})] == ["ratios clipped at 0.2 and 0.28"]


def test_a_record_with_values_of_the_loss_needs_no_guess():
    tokens = values()
    losses = torch.tensor(token_losses(tokens))
    assert explained(record(mean(tokens, losses.tolist()), tokens | {"losses": losses}).steps[0], {}) == []
