"""Compare a surrogate with its oracle, and the oracle's gradient with finite differences."""

from __future__ import annotations

import torch

from tests.helpers.loss_batches import flat, nasty_documents, packed, random_weights, weighted_total
from tests.oracles.surrogates import ORACLES, finite_differences
from workbench.losses.build import SURROGATES


def assert_is_the_oracle(kind, parameters, documents, *, seed=0, absolute=1e-14):
    """Values and per-token gradients, in float64, to rounding."""
    weights = random_weights(documents, seed)
    policy_T, inputs = packed(documents)
    term = SURROGATES[kind](inputs, **parameters)
    weighted_total(term, inputs, weights).backward()
    counts_T = inputs.loss_mask_T
    value, gradient = ORACLES[kind]
    values_T = flat(value(documents, documents, **parameters))
    torch.testing.assert_close(term.values_T[counts_T], values_T[counts_T], rtol=1e-12, atol=1e-14)
    gradients_T = flat(gradient(documents, weights, **parameters))
    torch.testing.assert_close(policy_T.grad, gradients_T, rtol=1e-11, atol=absolute)
    return term, inputs


def assert_finite_differences(kind, parameters, *, seed, **batch):
    """The gradient that autograd finds is the slope of the oracle's value, on ratios where that can be measured."""
    documents = nasty_documents(seed, **({"low": 0.5, "high": 2.0} | batch))
    weights = random_weights(documents, seed)
    policy_T, inputs = packed(documents)
    weighted_total(SURROGATES[kind](inputs, **parameters), inputs, weights).backward()
    slopes_T = flat(finite_differences(kind, documents, weights, **parameters))
    assert slopes_T.abs().max() > 1e-3
    torch.testing.assert_close(policy_T.grad, slopes_T, rtol=1e-7, atol=1e-8)
