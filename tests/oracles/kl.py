"""KL penalties of one token at a time: value and derivative, derived manually.

Sources: Schulman, "Approximating KL divergence" (2020), for k1, k2, k3; arXiv 2402.03300, equation 4, for k3 in a
loss. The derivative of an expectation under the policy, E[k], is E[k' + k (log policy)'].
"""

from __future__ import annotations

import math

ESTIMATES = {
    "k1": (lambda d: -d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: -d),
    "k3": (lambda d: math.exp(d) - 1 - d, lambda d: 1 - math.exp(d)),
    "abs": (lambda d: abs(d), lambda d: 0.0 if d == 0 else -math.copysign(1, d)),
    "squared": (lambda d: d * d, lambda d: -2 * d),
}
"""Value, and derivative with respect to log policy, as functions of d = log other - log policy."""


def penalty(policy, other, *, estimator, gradient="path", anchor=None, input_clamp=None, output_clamp=None):
    """(value, derivative) of one token.

    Args:
        anchor: log-probability under the policy that the importance weight divides by; None: weight 1.
    """
    value_of, slope_of = ESTIMATES[estimator]
    d = other - policy
    weight = 1.0 if anchor is None else math.exp(policy - anchor)
    inside = d if input_clamp is None else max(-input_clamp, min(input_clamp, d))
    estimate = value_of(inside)
    value = weight * estimate
    free = inside == d
    if output_clamp is not None and abs(value) > output_clamp:
        value, free = math.copysign(output_clamp, value), False
    if gradient == "straight_through":
        return value, weight * -d
    if not free:
        return value, 0.0
    slope = slope_of(d)
    if gradient == "score":
        slope += estimate
    return value, weight * slope
