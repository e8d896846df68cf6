"""Completions of online runs, read from their folders and reduced to what is saved next to a comparison.

Letters: S sampled tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.atomic import from_json
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.rollouts.files import load

Completions = list[tuple[int, ...]]
"""Vocabulary ids of each document, prompt and completion."""


def succeeded(comparison: Comparison) -> list[Configuration]:
    """Return the configurations of an ablation; no run may be missing.

    Raises:
        RecordError: one failed.
    """
    if failed := [c for c in comparison.configurations if c.state != "succeeded" or not c.steps]:
        raise RecordError(
            f"report {comparison.experiment}",
            found="; ".join(f"{c.name}: {c.why}" for c in failed),
            rule="every run ended well",
            fix="run the ablation again, and read why it failed",
        )
    return list(comparison.configurations)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record of measurements.

    Raises:
        RecordError: missing or damaged.
    """
    try:
        return from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(
            f"read {path.name}",
            found=f"{type(error).__name__}: {error}",
            rule="a record that the experiment's report.py wrote",
            fix="measure again",
        ) from None


def run_of(experiment: Path, configuration: Configuration) -> RunDirectory:
    """Open the run directory of a configuration.

    Raises:
        RecordError: it failed, or no longer exists.
    """
    if configuration.state != "succeeded" or not (experiment / configuration.run).is_dir():
        raise RecordError(
            f"read what {configuration.name} sampled",
            found=configuration.why or "no run directory",
            rule="a finished run under the experiment's runs folder",
            fix="run the ablation again",
        )
    return RunDirectory.open(experiment / configuration.run)


def completions_of(run: RunDirectory, step: int) -> Completions:
    """Read what a run sampled for a step.

    Raises:
        RecordError: the run recorded no tokens.
    """
    batch = load(run.path / "rollouts" / f"step{step:04d}")
    return [tuple(tokens.tolist()) for tokens in torch.split(batch.tokens_T, batch.lengths_N.tolist())]


def share_alike(completions: Completions, others: Completions) -> float:
    """Return the share of documents that are the same token for token.

    Example:
        >>> share_alike([(1, 2), (3,)], [(1, 2), (4,)])
        0.5
    """
    return sum(one == other for one, other in zip(completions, others, strict=True)) / len(completions)


def digest(completions: Completions) -> str:
    """Return sixteen hex digits that identify what was sampled.

    Example:
        >>> digest([(1, 2), (3,)]) == digest([(1,), (2, 3)])
        False
    """
    return hashlib.sha256(repr(completions).encode()).hexdigest()[:16]


def log_ratios(run: RunDirectory, step: int = 0) -> Tensor:
    """Return the log-probability under the policy minus that under the old one, of each trained token.

    Shapes: [S]. Units: nats, float64.

    Raises:
        RecordError: the run recorded no tokens.
    """
    tokens = run.read_tensors(f"step{step:04d}.tokens")
    return (tokens["policy_logprobs"].double() - tokens["old_logprobs"].double())[tokens["trained"]]


def shares_beyond(distances_S: Tensor, bounds: Sequence[float]) -> list[float]:
    """Return the share of tokens whose distance is above each bound.

    Example:
        >>> shares_beyond(torch.tensor([0.5, 2.0]), [0.1, 1.0, 2.0])
        [1.0, 0.5, 0.0]
    """
    return [float((distances_S > bound).double().mean()) for bound in bounds]
