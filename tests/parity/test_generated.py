"""Generated combinations (`tests.parity.generated`): each matches the oracle, or is refused with its reason.

Some of them in every run; all of them in `make test-all`, and in the record under experiments.
"""

import itertools
import json
import random

import pytest
import torch

from tests.parity.generated import (
    ALL,
    CHOICES,
    GROUPS,
    RECORD,
    axes_together,
    drawn,
    fingerprint,
    group,
    judged,
    pairs,
    refusal,
    truth,
    verdict,
)

SAMPLE = [random.Random(7).choice([g for g in GROUPS if g[0] == world]) for world in (2, 4)]


def named(chosen):
    return f"{chosen[0]} ranks, from {chosen[1]}"


def check(chosen, folder):
    wrong = [verdict for verdict in judged(group(*chosen), folder) if verdict["verdict"] == "wrong"]
    assert wrong == []


@pytest.mark.parametrize("chosen", SAMPLE, ids=named)
def test_a_sample_of_all_combinations_meets_the_oracle(chosen, tmp_path):
    check(chosen, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [chosen for chosen in GROUPS if chosen not in SAMPLE], ids=named)
def test_every_combination_meets_the_oracle(chosen, tmp_path):
    check(chosen, tmp_path)


def answer(combination):
    """Return the result of a rank that is bitwise correct."""
    loss, gradients, logprobs = truth(*combination.ask)[1]
    text = torch.tensor([value for document in logprobs for value in document], dtype=torch.float64)
    trained = torch.tensor([m for document in truth(*combination.ask)[0] for m in document["loss_mask"]]).bool()
    norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    tokens = {"trained": trained, "policy_logprobs": text}
    return {"loss": loss, "gradients": gradients, "norms": norms, "tokens": tokens, "trained_here": 1}


def test_one_rank_that_is_wrong_is_enough():
    combination = next(c for c in (drawn(2, number) for number in range(9)) if refusal(c) is None)
    right = answer(combination)
    assert verdict(combination, [right, right])["verdict"] == "met"
    name = next(iter(right["gradients"]))
    for wrong in (
        right | {"loss": right["loss"] + 1e-11},
        right | {"gradients": right["gradients"] | {name: right["gradients"][name] * (1 + 1e-11)}},
        right | {"gradients": right["gradients"] | {name: right["gradients"][name] * float("nan")}},
        right | {"norms": right["norms"] | {name: right["norms"][name] * (1 + 1e-11)}},
        right | {"tokens": right["tokens"] | {"policy_logprobs": right["tokens"]["policy_logprobs"] + 1e-11}},
        {"refused": "heads"},
    ):
        assert verdict(combination, [right, wrong])["verdict"] == "wrong"


def test_an_invalid_spec_is_refused_by_every_rank_with_its_reason():
    combination = next(c for c in ALL if refusal(c) == "heads")
    assert verdict(combination, [{"refused": "4 heads over 3 ranks"}] * 2)["verdict"] == "refused"
    assert verdict(combination, [{"refused": "4 heads over 3 ranks"}, answer(combination)])["verdict"] == "wrong"
    assert verdict(combination, [{"refused": "no such order"}] * 2)["verdict"] == "wrong"
    assert verdict(combination, [answer(combination)] * 2)["verdict"] == "wrong"


def test_choices_that_can_meet_do_meet():
    possible = pairs([c for c in ALL if refusal(c) is None])
    for (one, ones), (other, others) in itertools.combinations(sorted(CHOICES.items()), 2):
        for left, right in itertools.product(ones, others):
            assert ((one, str(left)), (other, str(right))) in possible, f"{one}={left} never met {other}={right}"


def test_some_generated_specs_are_invalid():
    refused = [c for c in ALL if refusal(c) is not None]
    assert {refusal(c) for c in refused} == {"ulysses", "heads", "experts", "stages"}
    assert len(refused) <= 0.15 * len(ALL)


def test_at_least_400_are_valid_and_every_two_axes_meet_in_40():
    valid = [c for c in ALL if refusal(c) is None]
    assert len(valid) >= 400
    assert min(axes_together(valid).values()) >= 40
    assert {c.chosen["mixture"] for c in valid} == {c.chosen["tied"] for c in valid} == {True, False}


def test_the_record_is_of_these_combinations():
    record = json.loads(RECORD.read_text())
    assert record["drawn"] == fingerprint(), f"{RECORD.name} is of other draws: {record['command']} makes it again"
    assert record["combinations"] == len(ALL) == record["met"] + record["refused"]
    assert record["refused"] == sum(refusal(c) is not None for c in ALL)
    assert max(record["worst"].values()) <= record["bar"] == 1e-12
