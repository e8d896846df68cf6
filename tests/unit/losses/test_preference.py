"""DPO against the oracle, on pairs of unequal documents with others between them."""

import math

import pytest
import torch

from tests.helpers.loss_batches import flat, nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_is_the_oracle
from tests.oracles.surrogates import counted, finite_differences, margin, pairs_of
from workbench.losses import LossInputs
from workbench.losses.preference import dpo


def pairs(seed, *, low=0.5, high=2.0):
    """Three pairs, the chosen one first or second, with an empty document in between."""
    trained = [d for d in nasty_documents(seed, low=low, high=high) if sum(d["mask"])][:6]
    order = [0, 1, 2, 1, 0, 2]
    documents = [d | {"group": order[n], "reward": 1.0 if order.index(order[n]) == n else -0.5}
                 for n, d in enumerate(trained)]
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
        dpo(LossInputs(policy_T, zero_T, zero_T, ref_logprobs_T=zero_T, document_ids_T=documents_T,
                       group_ids_T=torch.zeros(2, dtype=torch.long),
                       rewards_T=torch.tensor([1.0, 0.0]))).values_T[0].backward()
        assert policy_T.grad.tolist() == pytest.approx([slope, -slope], abs=1e-7)
