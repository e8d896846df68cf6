"""Rollouts that train nothing, each for its own reason, and the message of a spec: finding V1, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import save
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

FROM_REWARDS = ("groups of one", "equal rewards")
CASES = ("advantages of zero", "empty loss mask", "one token", *FROM_REWARDS)
_BASE = {"model": {"source": "tiny-qwen3"}, "precision": "float64", "device": "cpu", "record": {"gradients": "full"}}


def rollouts(case: str, documents: int = 8) -> RolloutBatch:
    """Return documents of two prompt and three completion tokens, advantages +1 and -1, with the changes of a case.

    Where advantages come from rewards, the recorded ones are zero.
    """
    tokens = 1 if case == "one token" else 5
    drawn = torch.Generator().manual_seed(0)
    made = []
    for number in range(1 if case == "one token" else documents):
        mask = [0] * tokens if case == "empty loss mask" else [int(place > 1) for place in range(tokens)]
        made.append(
            {
                "tokens": torch.randint(4, 19, (tokens,), generator=drawn).tolist(),
                "loss_mask": mask,
                "advantages": 0.0 if case in ("advantages of zero", *FROM_REWARDS) else 1.0 - 2 * (number % 2),
                "old_logprobs": (-torch.rand(tokens, generator=drawn)).tolist(),
            }
        )
        if case in FROM_REWARDS:
            made[-1] |= {
                "reward": 1.0 if case == "equal rewards" else float(number % 2),
                "group_id": number if case == "groups of one" else number // 4,
            }
    return RolloutBatch.from_documents(made, temperature=1.0)


def settings(case: str) -> dict[str, Any]:
    """Return the estimator that a spec adds where advantages come from rewards."""
    return {"data": {"advantages": {"name": "grpo"}}} if case in FROM_REWARDS else {}


def ran(folder: Path, case: str, name: str, **changes: Any) -> RunDirectory:
    """A run of one step on such rollouts, over."""
    if not (folder / "rollouts").exists():
        save(rollouts(case), folder / "rollouts", provenance={})
    base = _BASE | {"data": {"path": str(folder / "rollouts")}}
    spec = RunSpec.model_validate(merge(merge(base, settings(case)), changes))
    run = RunDirectory.create(folder / "runs", name, spec)
    run_here(run, folder)
    return run
