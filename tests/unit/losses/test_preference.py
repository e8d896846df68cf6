"""DPO against the oracle, on pairs of unequal documents with others between them."""

import math

import pytest
import torch

from tests.helpers.loss_batches import flat, nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_is_the_oracle
from tests.oracles.surrogates import counted, finite_differences, margin, pairs_of, sigmoid
from workbench.errors import SpecError
from workbench.losses import LossInputs
from workbench.losses.preference import document_rewards, dpo, implied_rewards, mean_over_pairs, pair_losses


def pairs(seed, *, low=0.5, high=2.0):
    """Three pairs, the chosen one first or second, with an empty document in between."""
    trained = [d for d in nasty_documents(seed, low=low, high=high) if sum(d["mask"])][:6]
    order = [0, 1, 2, 1, 0, 2]
    documents = [
        d | {"group": order[n], "reward": 1.0 if order.index(order[n]) == n else -0.5} for n, d in enumerate(trained)
    ]
    documents[5]["reward"], documents[2]["reward"] = 2.0, 1.0
    empty = documents[1] | {"mask": [0] * len(documents[1]["mask"]), "group": 9}
    return [*documents[:3], empty, *documents[3:]]


@pytest.mark.parametrize("parameters", [{"beta": 0.1}, {"beta": 0.5, "label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle_and_its_gradient_the_slope(parameters, seed):
    documents = pairs(seed)
    assert_is_the_oracle("dpo", parameters, documents, seed=seed)
    policy_T, inputs = packed(documents)
    weights = random_weights(documents, seed)
    weighted_total(dpo(inputs, **parameters), inputs, weights).backward()
    slopes_T = flat(finite_differences("dpo", documents, weights, **parameters))
    assert slopes_T.abs().max() > 1e-2
    torch.testing.assert_close(policy_T.grad, slopes_T, rtol=1e-7, atol=1e-8)


def test_with_the_documents_mean_it_is_the_mean_over_pairs():
    documents = pairs(0)
    _, inputs = packed(documents)
    trained = sum(1 for document in documents if sum(document["mask"]))
    weights = [[1 / (trained * max(1, len(counted(document))))] * len(document["mask"]) for document in documents]
    losses = [math.log1p(math.exp(-0.1 * margin(documents, *pair))) for pair in pairs_of(documents)]
    assert len(losses) == 3
    assert weighted_total(dpo(inputs), inputs, weights).item() == pytest.approx(sum(losses) / 3, rel=1e-13)


def test_a_margin_beyond_every_exponent_is_finite():
    documents_T = torch.tensor([0, 1])
    for gap, slope in ((5e4, 0.0), (-5e4, -0.1)):
        policy_T = torch.tensor([gap, 0.0], requires_grad=True)
        zero_T = torch.zeros(2)
        dpo(
            LossInputs(
                policy_T,
                zero_T,
                zero_T,
                ref_logprobs_T=zero_T,
                document_ids_T=documents_T,
                group_ids_T=torch.zeros(2, dtype=torch.long),
                rewards_T=torch.tensor([1.0, 0.0]),
            )
        ).values_T[0].backward()
        assert policy_T.grad.tolist() == pytest.approx([slope, -slope], abs=1e-7)


def test_implied_rewards_are_sums_or_means_and_0_for_an_empty_document():
    documents = pairs(1)
    policy_T, inputs = packed(documents)
    for against, average in (("ref", False), ("ref", True), (None, False), (None, True)):
        expected = []
        for document in documents:
            gaps = [document["policy"][t] - (document[against][t] if against else 0.0) for t in counted(document)]
            expected.append(math.fsum(gaps) / (max(1, len(gaps)) if average else 1))
        found_N = document_rewards(inputs, len(documents), against=against, average=average)
        assert found_N.tolist() == pytest.approx(expected, rel=1e-13)
        assert found_N[3].item() == 0.0
    policy_T.grad = None
    found_N.sum().backward()
    slopes = [[1 / max(1, len(counted(d))) if m else 0.0 for m in d["mask"]] for d in documents]
    torch.testing.assert_close(policy_T.grad, flat(slopes))


def test_a_token_that_does_not_count_may_name_a_document_that_does_not_exist():
    """Padding has an id of its own, and every id is a place in the result."""
    policy_T, zero_T = torch.tensor([-1.0, -2.0, -4.0]), torch.zeros(3)
    for padding in (-1, 7):
        inputs = LossInputs(
            policy_T,
            zero_T,
            zero_T,
            ref_logprobs_T=zero_T,
            loss_mask_T=torch.tensor([1, 1, 0]).bool(),
            document_ids_T=torch.tensor([0, 0, padding]),
        )
        assert document_rewards(inputs, 1).tolist() == [-3.0]
        assert document_rewards(inputs, 1, average=True).tolist() == [-1.5]


@pytest.mark.parametrize(
    ("settings", "value", "slope"),
    [
        ({}, lambda h: -math.log(sigmoid(h)), lambda h: -sigmoid(-h)),
        ({"beta": 0.3}, lambda h: -math.log(sigmoid(0.3 * h)), lambda h: -0.3 * sigmoid(-0.3 * h)),
        (
            {"beta": 0.3, "label_smoothing": 0.1},
            lambda h: -0.9 * math.log(sigmoid(0.3 * h)) - 0.1 * math.log(sigmoid(-0.3 * h)),
            lambda h: -0.27 * sigmoid(-0.3 * h) + 0.03 * sigmoid(0.3 * h),
        ),
        ({"beta": 0.2, "kind": "ipo"}, lambda h: (h - 2.5) ** 2, lambda h: 2 * (h - 2.5)),
    ],
)
def test_the_loss_of_a_pair_and_its_slope(settings, value, slope):
    chosen_P = torch.tensor([1.0, -2.0, 0.5, 7.0], dtype=torch.float64, requires_grad=True)
    rejected_P = torch.tensor([0.25, 1.0, 0.5, -6.0], dtype=torch.float64, requires_grad=True)
    margins = (chosen_P - rejected_P).tolist()
    found_P = pair_losses(chosen_P, rejected_P, **settings)
    found_P.sum().backward()
    assert found_P.tolist() == pytest.approx([value(h) for h in margins], rel=1e-12)
    assert chosen_P.grad.tolist() == pytest.approx([slope(h) for h in margins], rel=1e-12)
    assert rejected_P.grad.tolist() == pytest.approx([-slope(h) for h in margins], rel=1e-12)


def test_a_margin_beyond_every_exponent_has_a_finite_loss():
    gap_P = torch.tensor([1e4, -1e4], dtype=torch.float64)
    assert pair_losses(gap_P, torch.zeros_like(gap_P)).tolist() == pytest.approx([0.0, 1e4])


def test_implied_rewards_of_given_sums_are_their_difference():
    policy_P = torch.tensor([-3.0, -5.0], requires_grad=True)
    implied_P = implied_rewards(policy_P, torch.tensor([-4.0, -2.0]))
    implied_P.sum().backward()
    assert implied_P.tolist() == [1.0, -3.0]
    assert policy_P.grad.tolist() == [1.0, 1.0]


def test_the_mean_over_pairs_skips_uncounted_pairs_and_uses_the_steps_count():
    values_P = torch.tensor([2.0, math.nan, 4.0], dtype=torch.float64)
    counts_P = torch.tensor([1.0, 0.0, 1.0])
    assert mean_over_pairs(values_P, counts_P).item() == 3.0
    assert mean_over_pairs(values_P, counts_P, pairs=10, epsilon=2.0).item() == 0.5
    assert mean_over_pairs(values_P[[0, 2]]).item() == 3.0


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "kto"},
        {"kind": "exo_pair"},
        {"kind": "hinge", "label_smoothing": 0.1},
        {"kind": "sppo_hard", "beta": 0.0},
        {"label_smoothing": 0.5},
        {"kind": "ipo", "beta": 0.0},
        {"kind": "ipo", "label_smoothing": 0.1},
    ],
)
def test_losses_of_pairs_that_there_are_not_are_refused(settings):
    with pytest.raises(SpecError, match="kind is one of sigmoid, ipo"):
        pair_losses(torch.ones(1), torch.ones(1), **settings)


def test_rewards_of_documents_need_documents():
    zero_T = torch.zeros(2)
    with pytest.raises(SpecError, match="no document_ids_T"):
        document_rewards(LossInputs(zero_T, zero_T, zero_T, ref_logprobs_T=zero_T), 1)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"kind": "hinge"}, lambda c, r: max(0.0, 1 - c + r)),
        (
            {"kind": "robust", "label_smoothing": 0.1},
            lambda c, r: (-0.9 * math.log(sigmoid(c - r)) + 0.1 * math.log(sigmoid(r - c))) / 0.8,
        ),
        ({"kind": "robust"}, lambda c, r: -math.log(sigmoid(c - r))),
        (
            {"kind": "exo_pair", "label_smoothing": 0.2},
            lambda c, r: (
                sigmoid(c - r) * math.log(sigmoid(c - r) / 0.8) + sigmoid(r - c) * math.log(sigmoid(r - c) / 0.2)
            ),
        ),
        (
            {"kind": "nca_pair"},
            lambda c, r: -math.log(sigmoid(c)) - math.log(sigmoid(-c)) / 2 - math.log(sigmoid(-r)) / 2,
        ),
        ({"kind": "bco_pair"}, lambda c, r: -math.log(sigmoid(c)) - math.log(sigmoid(-r))),
        ({"kind": "sppo_hard"}, lambda c, r: (c / 0.4 - 1.25) ** 2 + (r / 0.4 + 1.25) ** 2),
        ({"kind": "apo_zero"}, lambda c, r: 1 - sigmoid(c) + sigmoid(r)),
        ({"kind": "apo_down"}, lambda c, r: sigmoid(c) + 1 - sigmoid(c - r)),
        (
            {"kind": "discopop", "modulation": 0.5},
            lambda c, r: (
                -math.log(sigmoid(c - r)) * (1 - sigmoid(2 * (c - r))) + math.exp(r - c) * sigmoid(2 * (c - r))
            ),
        ),
    ],
)
def test_other_losses_of_a_pair_and_their_slopes(settings, value):
    chosen_P = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    rejected_P = torch.tensor([0.25, 1.0, 0.5, -2.0], dtype=torch.float64, requires_grad=True)
    pairs = [(0.4 * c, 0.4 * r) for c, r in zip(chosen_P.tolist(), rejected_P.tolist(), strict=True)]
    found_P = pair_losses(chosen_P, rejected_P, beta=0.4, **settings)
    found_P.sum().backward()
    assert found_P.tolist() == pytest.approx([value(c, r) for c, r in pairs], rel=1e-12)
    step = 1e-6
    for leaf, (a, b) in ((chosen_P, (step, 0.0)), (rejected_P, (0.0, step))):
        slopes = [0.4 * (value(c + a, r + b) - value(c - a, r - b)) / (2 * step) for c, r in pairs]
        assert leaf.grad.tolist() == pytest.approx(slopes, rel=1e-7, abs=1e-8)
