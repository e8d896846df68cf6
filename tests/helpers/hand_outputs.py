"""Records whose only notes are a loss, norms, and what a recorder read off the outputs of a model."""

import dataclasses

import torch

from workbench.diagnose.record import Record, RecordedStep
from workbench.records.inputs import mixed

LENGTHS = ((4, 6), (5, 9))
"""Trained predictions of the rows of two calls."""
WEIGHTS = ((0.5, -0.2), (0.3, -0.6))
"""Weight of each prediction, of a policy."""


def digits(values):
    return f"{int(mixed(torch.tensor(values)).sum()) % 2**64:016x}"


def row(weights, *, places=None, targets=None, logprob=-3.0, entropy=2.5):
    """One row: as many predictions as weights."""
    n = len(weights)
    places = list(range(n)) if places is None else places
    targets = list(range(10, 10 + n)) if targets is None else targets
    sums = [sum(weights), sum(map(abs, weights)), sum(w * w for w in weights), n * logprob, n * entropy]
    return [n, sum(w > 0 for w in weights), digits(places), digits(targets), *sums]


def calls(change=lambda call, at, n, w: {"weights": [w] * n}, weights=WEIGHTS):
    """Rows of both calls, each as ``change`` makes it."""
    return [
        [
            row(**{"targets": [100 * (2 * call + at) + k for k in range(n)]} | change(call, at, n, weights[call][at]))
            for at, n in enumerate(lengths)
        ]
        for call, lengths in enumerate(LENGTHS)
    ]


def record(rows, *, loss=0.5, norms=(1.0, 2.0, 3.0), slope=1.0, likelihoods=1.0, values=None, context=(), number=0):
    outputs = {"rows": rows, "every": 1, "likelihoods": likelihoods, "slope": slope}
    observed = {"outputs": outputs | ({"values": list(values)} if values else {})}
    named = {f"layers.{at}.weight": norm for at, norm in enumerate(norms)}
    step = RecordedStep(number, loss=loss, gradient_norms=named, observed=observed)
    return Record(dict(context), (step,))


def before(right, wrong):
    """The same records behind an equal first step."""
    return tuple(
        dataclasses.replace(each, steps=(dataclasses.replace(right.steps[0], number=-1), *each.steps))
        for each in (right, wrong)
    )
