"""Reader of a finished run for a comparison, and the preconditions of a verdict: evidence, and a sound baseline.

Two runs of nothing agree, and a bad baseline gives a generous budget. Neither proves anything about a configuration, so
both are verdicts of their own, *vacuous* and *unsound baseline*: README.md has when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose.noise import Noise
from workbench.errors import RecordError
from workbench.metrics.evidence import Evidence, weaker
from workbench.records.certificate import check_certificate, read_certificate
from workbench.records.directory import RunDirectory
from workbench.records.integrity import STEP_KEYS, check_gradients

Gradients = Mapping[str, Tensor]

MOST = 0.4
"""A baseline is unsound above this relative error in any precision: 1 / 2.5, as a budget of 2.5 times its error would
admit a gradient of zero."""


KEPT_BYTES = 2**28
"""Tensors that the reader of a run keeps in memory; a convention: all of the tiny policies, one step of others."""


class RunReader:
    """One finished run and what it recorded, for one comparison: files of `KEPT_BYTES` are read and checked once.

    The tensors of a larger file are read one at a time, whenever one is used.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self.name, self.spec = run, run.name, run.spec
        self._computed: dict[Any, Any] = {}
        self._kept: dict[str, Gradients] = {}

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return the result of ``compute``, which is called for the first of equal keys only."""
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]

    def _keep(self, name: str, read: Callable[[], Gradients]) -> Gradients:
        if (tensors := self._kept.pop(name, None)) is None:
            tensors = read()
        self._kept[name] = tensors  # last: the first ones make room
        while len(self._kept) > 1 and sum(t.nbytes for each in self._kept.values() for t in each.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return tensors

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The step records, one for each step of the spec.

        Raises:
            RecordError: the file is damaged, or has another number of steps than the run.
        """
        records = self.run.steps()
        if [record.get("step") for record in records] != list(range(self.spec.steps)):
            raise RecordError(
                f"read {self.run.path.name}/metrics.jsonl",
                found=f"records of {len(records)} steps: {_numbers(records)}",
                rule=f"one record for each of the {self.spec.steps} steps of a run that succeeded",
                fix="the file was cut or changed after it was written; run the configuration again",
            )
        return records

    @cached_property
    def evidence(self) -> Evidence | None:
        """Counts of tokens and documents that have a gradient; None for records of earlier versions."""
        return Evidence.of_steps(self.steps)

    @cached_property
    def diverged_step(self) -> int | None:
        """The first step whose loss or gradient norm is not finite; None if all are."""
        return next((r["step"] for r in self.steps if not all(_is_finite(r.get(key)) for key in STEP_KEYS)), None)

    def loss(self, step: int) -> float:
        """The total loss of a step."""
        return self.steps[step]["loss/total/sum"]

    def norm(self, step: int) -> float:
        """The global gradient norm of a step, before clipping."""
        return self.steps[step]["gradient/norm/global"]

    def gradients(self, step: int) -> Gradients:
        """Full gradients of a step, in the order of the model, checked against the norms that were recorded.

        Raises:
            RecordError: not recorded, damaged, or inconsistent with the step record.
        """
        if self.spec.record.gradients != "full":
            raise RecordError(
                f"compare {self.name}",
                found=f"record.gradients = {self.spec.record.gradients}",
                rule="verdicts need every element of every gradient",
                fix="set record: {gradients: full}",
            )
        file = self.run.path / "tensors" / f"step{step:04d}.gradients.safetensors"
        if file.exists() and file.stat().st_size > KEPT_BYTES:
            return self.once(("gradients", step), lambda: self._checked_gradients(step, self.run.stored_tensors))
        return self._keep(f"gradients {step}", lambda: self._checked_gradients(step, self._whole))

    def _whole(self, name: str, order: Iterable[str] = ()) -> Gradients:
        tensors = self.run.read_tensors(name)
        return {key: tensors[key] for key in order if key in tensors} | tensors

    def _checked_gradients(self, step: int, read: Callable[[str, Iterable[str]], Gradients]) -> Gradients:
        norms = self.steps[step].get("gradient_norms")
        # in the order of the model; files are in alphabetical order
        tensors = read(f"step{step:04d}.gradients", norms or ())
        if norms is None:
            return tensors
        where = f"{self.run.path.name}/tensors/step{step:04d}.gradients.safetensors"
        if differing := sorted(norms.keys() ^ tensors.keys()):
            raise RecordError(
                f"read {where}",
                found=f"{', '.join(differing[:4])} in only one of file and step record",
                rule="a gradient for each parameter whose norm was recorded",
                fix="the file was changed after it was written; run the configuration again",
            )
        check_gradients(tensors, norms, where=where)
        if (certificate := read_certificate(self.run, step)) is not None:
            check_certificate(tensors, certificate, where=where)
        return tensors

    def tokens(self, step: int) -> Gradients | None:
        """Per-token values of a step in source order; None if they were not recorded."""
        name = f"step{step:04d}.tokens"
        return self._keep(name, lambda: self.run.read_tensors(name)) if self.run.has_tensors(name) else None

    def log_ratios(self, step: int) -> Tensor | None:
        """Log importance ratios of trained tokens; None if they were not recorded."""
        if (tokens := self.tokens(step)) is None:
            return None
        return (tokens["policy_logprobs"].double() - tokens["old_logprobs"].double())[tokens["trained"]]


def same_tokens(run: RunReader, other: RunReader, step: int) -> bool | None:
    """True if two runs trained on the same tokens in a step; None if that was not recorded."""
    first, second = run.tokens(step), other.tokens(step)
    if first is None or second is None:
        return None
    return all(torch.equal(first[key], second[key]) for key in {"targets", "trained"} & first.keys() & second.keys())


def flipped_clips(run: RunReader, truth: RunReader, step: int) -> int | None:
    """Number of tokens whose clip decision in the run differs from the ground truth's; None if not recorded."""
    if not same_tokens(run, truth, step):
        return None
    tokens, true = run.tokens(step), truth.tokens(step)
    return int((tokens["would_clip"] != true["clipped"]).sum()) if tokens and true else None


def ratio_histograms(run: RunReader, reference: RunReader, bins: int = 41) -> dict[str, dict[str, list[float]]]:
    """Per step, the distribution of the importance ratios of trained tokens.

    Bins of equal width in log ratio over the baseline's range (at least 5 % either way), so that all
    configurations share them; the outermost bins hold everything beyond. Ratios that are not finite are left out.
    The range ends at 1e-300 and 1e300, so that every edge is a number that float64 and JSON can hold.
    """
    histograms = {}
    for step in range(min(run.spec.steps, reference.spec.steps)):
        ratios, baseline = run.log_ratios(step), reference.log_ratios(step)
        if ratios is None or baseline is None:
            continue
        ratios, baseline = ratios[~ratios.isnan()], baseline[baseline.isfinite()]
        if not ratios.numel() or not baseline.numel():
            continue
        reach = min(max(0.05, float(baseline.abs().max())) * (1 + 1e-9), math.log(1e300))
        counts, edges = torch.histogram(ratios.clamp(-reach, reach), bins=bins, range=(-reach, reach))
        histograms[str(step)] = {"edges": edges.exp().tolist(), "counts": counts.tolist()}
    return histograms


def _numbers(records: list[dict[str, Any]]) -> str:
    numbers = [str(record.get("step")) for record in records]
    return ", ".join(numbers if len(numbers) <= 6 else [*numbers[:3], "...", *numbers[-2:]]) or "none"


# ---- preconditions ---------------------------------------------------------------------------------------


def explained_error(baseline: RunReader, truth: RunReader, step: int) -> float:
    """The relative error of a whole gradient that rounding in the baseline's precision explains in a step.

    Tolerances of `workbench.diagnose.noise`: by precision, for the first step and for later ones, wider where the
    gradient is smaller than it has been (the rounding of single tokens does not cancel with them) and where
    rounding flipped clip decisions; never more than `MOST`. Float32 baselines of the saved experiments lie a hundred
    times below their tolerances (1.3e-6 of 2e-4 in the first step, 5.1e-6 of 5e-3 later:
    ``experiments/layout_parity/comparison.json``).
    """
    noise = Noise.between({"precision": baseline.spec.dtypes.coarsest}, {"precision": "float64"}, step)
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
        if not _is_finite(value):
            return f"the {quantity} of {role} {run.name} is {value} in step {step}"
    return ""


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def too_small(role: str, run: RunReader, step: int, gradients: Gradients) -> str:
    """Reason why a nonzero gradient cannot be measured: its squares underflow float64; "" if it can."""
    if run.norm(step) != 0:
        return ""
    largest = max((float(values.abs().max()) for values in gradients.values() if values.numel()), default=0.0)
    if not largest:
        return ""
    return (
        f"in step {step} the gradient of {role} {run.name} is too small to measure: its largest element is "
        f"{largest:.2g}, and the squares of such numbers are 0 in float64"
    )


def too_far(baseline: RunReader, truth: RunReader, step: int, error: float, norm: float) -> str:
    """Reason why a baseline is further from the ground truth than rounding explains; "" if it is not."""
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
    if (evidence := evidence_of(run, baseline)) is not None and evidence.nothing:
        return evidence.nothing
    zero = all(each.norm(step) == 0 for each in (run, baseline) for step in range(each.spec.steps))
    return "every gradient is zero in every step" if zero else ""
