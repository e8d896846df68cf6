"""Reader of a finished run for a comparison: step records, whole gradients and per-token values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError
from workbench.metrics.evidence import Evidence
from workbench.records.certificate import read_certificate
from workbench.records.directory import RunDirectory
from workbench.records.integrity import check_certificate, check_gradients
from workbench.specs.run import RunSpec

Gradients = Mapping[str, Tensor]


class RunReader:
    """One finished run and what it recorded.

    Args:
        run: its directory.

    Example:
        >>> reader = RunReader(run)  # doctest: +SKIP
        >>> reader.loss(0), reader.diverged_step, reader.evidence.summary()  # doctest: +SKIP
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return self.run.name

    @property
    def spec(self) -> RunSpec:
        """Settings of the run."""
        return self.run.spec

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
        return next(
            (
                record["step"]
                for record in self.steps
                if not all(
                    isinstance(record.get(key), float | int) and math.isfinite(record[key])
                    for key in ("loss/total/sum", "gradient/norm/global")
                )
            ),
            None,
        )

    def loss(self, step: int) -> float:
        """The total loss of a step."""
        return self.steps[step]["loss/total/sum"]

    def norm(self, step: int) -> float:
        """The global gradient norm of a step, before clipping."""
        return self.steps[step]["gradient/norm/global"]

    def gradients(self, step: int) -> Gradients:
        """Whole gradients of a step, in the order of the model, checked against the norms that were recorded.

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
        tensors, norms = self.run.read_tensors(f"step{step:04d}.gradients"), self.steps[step].get("gradient_norms")
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
        certificate = read_certificate(self.run, step)
        if certificate is not None:
            check_certificate(tensors, certificate, where=where)
        return {name: tensors[name] for name in norms}  # in the order of the model; files are in alphabetical order

    def tokens(self, step: int) -> dict[str, Tensor] | None:
        """Per-token values of a step in source order; None if they were not recorded."""
        name = f"step{step:04d}.tokens"
        return self.run.read_tensors(name) if self.run.has_tensors(name) else None

    def log_ratios(self, step: int) -> Tensor | None:
        """Log importance ratios of trained tokens; None if they were not recorded."""
        tokens = self.tokens(step)
        if tokens is None:
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
