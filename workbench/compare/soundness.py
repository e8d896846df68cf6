"""Preconditions of a verdict: something to compare, and a sound baseline.

Two runs of nothing agree, and a bad baseline gives a generous budget. Neither proves anything about a configuration, so
both are verdicts of their own:

    vacuous              nothing was trained in either run: no trained token, no document with a gradient, or every
                         gradient zero. Two runs that agree are *equal* only if there was something to disagree about.
    unsound baseline     the baseline or the float64 ground truth is not finite, or the baseline lies further from the
                         ground truth than rounding in its precision explains
"""

from __future__ import annotations

import math

from workbench.compare.reading import Gradients, RunReader, flipped_clips
from workbench.diagnose.noise import Noise
from workbench.metrics.evidence import Evidence, weaker

MOST = 0.4
"""A baseline is unsound above this relative error in any precision: 1 / 2.5, as a budget of 2.5 times its error would
admit a gradient of zero."""


def explained_error(baseline: RunReader, truth: RunReader, step: int) -> float:
    """The relative error of a whole gradient that rounding in the baseline's precision explains in a step.

    Tolerances of `workbench.diagnose.noise`: by precision, for the first step and for later ones, wider where the
    gradient is smaller than it has been (the rounding of single tokens does not cancel with them) and where
    rounding flipped clip decisions; never more than `MOST`. Float32 baselines of the saved experiments lie a hundred
    times below their tolerances (1.3e-6 of 2e-4 in the first step, 5.1e-6 of 5e-3 later:
    ``experiments/layout_parity/comparison.json``).
    """
    noise = Noise.between({"precision": baseline.spec.precision}, {"precision": "float64"}, step)
    largest, norm = max(truth.norm(each) for each in range(step + 1)), truth.norm(step)
    if norm:
        noise = noise.as_tokens_cancel(largest / norm)
    return min(noise.with_flips(_flip_share(baseline, truth, step)).gradient, MOST)


def _flip_share(baseline: RunReader, truth: RunReader, step: int) -> float:
    """Tokens that one of two runs clips and the other does not, as a share of those trained and not clipped."""
    flips = flipped_clips(baseline, truth, step)
    tokens = truth.tokens(step)
    if not flips or tokens is None:
        return 0.0
    return flips / max(int((tokens["trained"] & ~tokens["clipped"]).sum()), 1)


def not_finite(role: str, run: RunReader, step: int) -> str:
    """Reason why a baseline or ground truth cannot serve as one in a step; "" if its loss and gradient are finite."""
    for quantity, value in (("loss", run.loss(step)), ("gradient norm", run.norm(step))):
        if not (isinstance(value, float | int) and math.isfinite(value)):
            return f"the {quantity} of {role} {run.name} is {value} in step {step}"
    return ""


def too_small(role: str, run: RunReader, step: int, gradients: Gradients) -> str:
    """Reason why a nonzero gradient cannot be measured: its squares underflow float64; "" if it can."""
    if run.norm(step) != 0:
        return ""
    largest = max((float(values.abs().max()) for values in gradients.values() if values.numel()), default=0.0)
    return (
        f"in step {step} the gradient of {role} {run.name} is too small to measure: its largest element is "
        f"{largest:.2g}, and the squares of such numbers are 0 in float64"
        if largest
        else ""
    )


def too_far(baseline: RunReader, truth: RunReader, step: int, error: float, norm: float) -> str:
    """Reason why a baseline is further from the ground truth than rounding explains; "" if it is not.

    Args:
        baseline: the run of the configuration's precision.
        truth: the float64 run.
        step: of both.
        error: L2 distance of the two whole gradients.
        norm: L2 norm of the ground truth's.
    """
    allowed = explained_error(baseline, truth, step)
    if error <= allowed * norm:
        return ""
    if not norm:
        return (
            f"in step {step} the gradient of the float64 ground truth {truth.name} is zero and that of baseline "
            f"{baseline.name} is rounding, of norm {error:.2g}"
        )
    return (
        f"in step {step} the gradient of baseline {baseline.name} has a relative error of {error / norm:.2g} "
        f"against the float64 ground truth {truth.name}; rounding in {baseline.spec.precision} explains at most "
        f"{allowed:.2g}"
    )


def evidence_of(run: RunReader, baseline: RunReader | None) -> Evidence | None:
    """Evidence of a comparison of two runs: the weaker of both; None if neither recorded it."""
    return weaker(run.evidence, baseline.evidence if baseline else None)


def why_vacuous(run: RunReader, baseline: RunReader) -> str:
    """Reason why the agreement of two runs is vacuous; "" if there was something to disagree about.

    Records of earlier versions have no counts: there every gradient must be zero.
    """
    evidence = evidence_of(run, baseline)
    if evidence is not None and evidence.nothing:
        return evidence.nothing
    zero = all(each.norm(step) == 0 for each in (run, baseline) for step in range(each.spec.steps))
    return "every gradient is zero in every step" if zero else ""
