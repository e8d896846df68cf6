"""Losses that are recognised from a record's own log-probabilities, each computed here token by token."""

import math
from dataclasses import replace

import pytest
import torch

from workbench.diagnose.diagnosis import diagnose_records
from workbench.diagnose.ratios import kinds_of_ratios
from workbench.diagnose.record import Record, RecordedStep
from workbench.diagnose.surrogates import BOUNDS, explained, forms_of_tokens

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
        far = sum(float(tokens["policy_logprobs"][i] - tokens["old_logprobs"][i]) for i in among)
        ratio = math.exp(far if kind == "sum" else far / len(among))
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
        ({"kind": "sum"}, None, "ratio"),
        ({"low": math.inf, "high": math.inf}, None, "clipping"),
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
    names = {form for form, _ in explained(record(loss, tokens).steps[0], {})}
    assert len(names) > len(BOUNDS)
    diagnosis = diagnose_records(record(loss, tokens), record(loss, tokens, seed=1))
    assert not {"clipping", "ratio", "other_loss"} & {each.name for each in diagnosis.causes}


def test_ranges_of_the_context_are_tried_and_a_loss_with_other_terms_is_not_explained():
    tokens = values()
    step = record(mean(tokens, token_losses(tokens, low=0.15, high=0.4)), tokens).steps[0]
    assert explained(step, {}) == []
    [(form, way), *same] = explained(step, {"clip_ratio_low": 0.15, "clip_ratio_high": 0.4})
    assert str(form) == "ratios clipped at 0.15 and 0.4"
    assert all("clipped at 0.15 and 0.4, and at 3" in str(other) for other, _ in same)  # no ratio is that large
    assert way.description == "all trained tokens of the step"
    other = record(0.01 + mean(tokens, token_losses(tokens)), tokens).steps[0]
    assert explained(other, {}) == []


def test_a_loss_in_half_precision_is_explained_by_its_own_values():
    tokens = values()
    tokens["policy_logprobs"] = tokens["policy_logprobs"].bfloat16()
    step = record(mean(tokens, token_losses(tokens)), tokens).steps[0]
    assert str(explained(step, {"precision": "bf16_mixed"})[0].form) == "ratios clipped at 0.2 and 0.28"


def with_terms(tokens, kind="k3", coefficient=0.05, entropy=0.01, **change):
    """Values with a penalty and an entropy bonus, one number at a time."""
    losses = token_losses(tokens, **change)
    for at, (policy, ref, nats) in enumerate(
        zip(
            *(tokens[name].double().tolist() for name in ("policy_logprobs", "ref_logprobs", "entropy_nats")),
            strict=True,
        )
    ):
        far = ref - policy
        penalty = {"k1": -far, "k2": far**2 / 2, "k3": math.exp(far) - 1 - far}[kind]
        losses[at] += coefficient * penalty - entropy * nats
    return losses


def with_reference(seed):
    tokens, draw = values(seed=seed), torch.Generator().manual_seed(100 + seed)
    size = len(tokens["trained"])
    return tokens | {
        "ref_logprobs": tokens["policy_logprobs"] + 0.5 * torch.randn(size, generator=draw),
        "entropy_nats": 2 * torch.rand(size, generator=draw),
    }


TERMS = [
    ({}, {"kind": "k1"}, "one_term"),
    ({}, {"coefficient": 0.1}, "one_term"),
    ({}, {"entropy": -0.01}, "one_term"),
    ({"entropy": 0.0}, {"entropy": 0.0, "kind": "k2"}, "one_term"),
    ({}, {"high": 0.2}, "clipping"),
]


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(("right", "wrong", "cause"), TERMS)
def test_terms_are_recognised_token_by_token_or_from_the_losses_of_several_steps(noted, right, wrong, cause):
    pair = []
    for seed, change in enumerate((right, wrong)):
        steps = []
        for number in range(4):
            tokens = with_reference(number)
            losses = with_terms(tokens, **change)
            more = {"losses": torch.tensor(losses)} if noted else {}
            [step] = record(mean(tokens, losses), tokens | more, seed=seed).steps
            steps.append(replace(step, number=number))
        pair.append(Record({"precision": "float32", "micro_batches": 3}, steps))
    diagnosis = diagnose_records(*pair)
    assert diagnosis.causes[0].name == cause, str(diagnosis)
    assert diagnosis.causes[0].score > 0.9


def test_terms_of_one_step_are_recognised_by_the_coefficients_of_the_context_alone():
    tokens = with_reference(0)
    step = record(mean(tokens, with_terms(tokens)), tokens).steps[0]
    assert explained(step, {}) == []
    [(form, _), *_] = explained(step, {"kl_coef": 0.05, "entropy_coef": 0.01})
    assert (form.penalty, form.entropy) == ("plus 0.05 times k3 of the reference", "minus 0.01 times the entropy")


def test_coefficients_that_nobody_would_set_explain_nothing():
    tokens = with_reference(0)
    losses = torch.tensor(with_terms(tokens, coefficient=0.0531))
    assert forms_of_tokens(record(0.0, tokens | {"losses": losses}).steps[0], {}) == []


def test_a_weight_for_the_sampler_is_recognised():
    tokens = with_reference(0)
    draw = torch.Generator().manual_seed(5)
    tokens["sampler_logprobs"] = tokens["old_logprobs"] + 0.8 * torch.randn(len(tokens["trained"]), generator=draw)
    weights = (tokens["old_logprobs"] - tokens["sampler_logprobs"]).double().exp()
    names = {}
    for most in (2.0, math.inf):
        losses = torch.tensor(token_losses(tokens)) * weights.clamp_max(most)
        [form, *_] = forms_of_tokens(record(0.0, tokens | {"losses": losses}).steps[0], {})
        names[most] = form.correction
    assert names == {2.0: "weighed by old over sampler up to 2", math.inf: "weighed by old over sampler"}


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        ({}, "preferences between neighbours at beta 0.1"),
        ({"beta": 0.3}, "preferences between neighbours at beta 0.3"),
        ({"swapped": True}, "preferences between neighbours, the second preferred at beta 0.1"),
        ({"some": (4, 5)}, "preferences between neighbours, the second preferred in 1 of 3 at beta 0.1"),
        ({"no_reference": True}, "preferences between neighbours without a reference at beta 0.1"),
    ],
)
def test_preferences_between_pairs_of_documents_are_recognised(planted, text):
    tokens = with_reference(1)
    del tokens["old_logprobs"], tokens["advantages"]
    far = [0.0] * len(DOCUMENTS)
    for at, (policy, ref) in enumerate(zip(tokens["policy_logprobs"], tokens["ref_logprobs"], strict=True)):
        ref = 0 * ref if planted.get("no_reference") else ref
        far[int(tokens["documents"][at])] += float(policy.double() - ref.double()) * bool(tokens["trained"][at])
    losses = []
    for good, bad in ((0, 1), (2, 3), (4, 5)):
        if planted.get("swapped") or planted.get("some") == (good, bad):
            good, bad = bad, good
        margin = far[good] - far[bad]
        losses.append(math.log1p(math.exp(-planted.get("beta", 0.1) * margin)))
    step = record(sum(losses) / 3, tokens).steps[0]
    assert [str(form) for form, _ in explained(step, {})] == [text]


@pytest.mark.parametrize("kind", ["token", "document", "sum"])
def test_the_kind_of_noted_ratios_is_told_where_they_are_not_all_1(kind):
    names = {"token": "ratios", "document": "ratios of documents", "sum": "ratios multiplied over documents"}
    tokens = values()
    noted = torch.tensor([-loss for loss in token_losses(tokens | {"advantages": torch.ones(39)}, 9, 9e9, kind)])
    assert kinds_of_ratios(record(0.0, tokens | {"ratios": noted}).steps[0]) == {names[kind]}
    assert kinds_of_ratios(record(0.0, values(on_policy=True) | {"ratios": torch.ones(39)}).steps[0]) == set()
    assert kinds_of_ratios(record(0.0, tokens | {"ratios": noted * 1.01}).steps[0]) == set()


def test_a_record_with_values_of_the_loss_needs_no_guess():
    tokens = values()
    losses = torch.tensor(token_losses(tokens))
    assert explained(record(mean(tokens, losses.tolist()), tokens | {"losses": losses}).steps[0], {}) == []


@pytest.mark.parametrize(
    ("inverted", "text"), [(False, "old over sampler up to 2"), (True, "sampler over old up to 2")]
)
def test_a_correction_for_the_sampler_may_be_inverted(inverted, text):
    tokens = values(on_policy=True)
    draw = torch.Generator().manual_seed(3)
    tokens["sampler_logprobs"] = tokens["old_logprobs"] - torch.randn(len(tokens["trained"]), generator=draw)
    far = tokens["old_logprobs"] - tokens["sampler_logprobs"]
    weights = [min(math.exp(-float(each) if inverted else float(each)), 2.0) for each in far]
    losses = [-weight * float(advantage) for weight, advantage in zip(weights, tokens["advantages"], strict=True)]
    forms = forms_of_tokens(record(0.0, tokens | {"losses": torch.tensor(losses)}).steps[0], {})
    assert {form.correction for form in forms} == {f"weighed by {text}"}


def test_a_sum_of_log_ratios_over_another_count_than_the_documents_tokens():
    tokens = values()
    noted, padded = [], 12
    for at, document in enumerate(tokens["documents"].tolist()):
        there = (tokens["documents"] == document) & tokens["trained"]
        far = float((tokens["policy_logprobs"] - tokens["old_logprobs"])[there].sum())
        noted.append(math.exp(far / padded) if tokens["trained"][at] else 1.0)
    [kind] = kinds_of_ratios(record(0.0, tokens | {"ratios": torch.tensor(noted)}).steps[0])
    assert kind == "ratios summed over documents and divided by 12"
    others = [value + 0.01 * (at % 2) for at, value in enumerate(noted)]
    assert not kinds_of_ratios(record(0.0, tokens | {"ratios": torch.tensor(others)}).steps[0])
