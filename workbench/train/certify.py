"""The certificate of a finished step, from the weights, gradients and tokens of this rank. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from workbench.policy.model import Policy
from workbench.records.certificate import Certificate, label
from workbench.reproducible.fingerprints import fingerprint, fingerprints
from workbench.train.step import StepResult


class Marks(NamedTuple):
    """Fingerprints of this job's gradients, or weights, by parameter name; and the parameters whose replicas differ."""

    fingerprints: dict[str, int]
    differing_replicas: tuple[str, ...]


def fingerprint_gradients(policy: Policy) -> Marks:
    """Fingerprint the current gradients. Collective."""
    return _mark(policy, {name: parameter.grad for name, parameter in policy.model.named_parameters()})


def certify(policy: Policy, result: StepResult, gradients: Marks) -> Certificate:
    """Return the certificate of a finished step. Collective.

    Args:
        policy: with the weights after the step.
        result: of the step, with its tokens.
        gradients: from `mark_gradients`, before they were clipped.
    """
    parameters = dict(policy.model.named_parameters())
    weights = _mark(policy, parameters)
    logprobs_S = result.tokens["policy_logprobs"]
    labels = {"logprobs": label(logprobs_S.dtype, fingerprint(logprobs_S))}
    for name, scalar in result.loss.items():
        labels[f"loss/{name}/sum"] = label(torch.float64, fingerprint(torch.tensor(float(scalar), dtype=torch.float64)))
    for kind, marks, order in (("gradient", gradients, reversed(parameters)), ("weight", weights, parameters)):
        labels |= {f"{kind}/{name}": label(parameters[name].dtype, marks.fingerprints[name]) for name in order}
    unlike = [
        f"{kind}/{name}"
        for kind, marks in (("gradient", gradients), ("weight", weights))
        for name in marks.differing_replicas
    ]
    return Certificate(labels, tuple(unlike))


def _mark(policy: Policy, values: Mapping[str, Any]) -> Marks:
    return Marks(*fingerprints(values, policy.shards, policy.mesh))
