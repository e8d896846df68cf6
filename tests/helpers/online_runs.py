"""Online runs of the smallest size, on a task whose rewards differ although its policy is untrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.task import ArithmeticTask, Task
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train.checkpoint import build_policy
from workbench.train.online import Online
from workbench.train.worker import run_here

BASE = {
    "model": {"source": "tiny-qwen3"},
    "precision": "float64",
    "device": "cpu",
    "data": {"advantages": {"name": "rloo"}},
    "online": {"task": f"{__file__}:Digits", "prompts": 3, "answers": 3, "max_new_tokens": 6, "prompts_at_once": 1},
    "optimizer": {"learning_rate": 1e-2},
}


class Digits(ArithmeticTask):
    """Rewards large digits: the reward is the mean digit of the completion, over 9."""

    def reward(self, prompt: str, completion: str) -> float:
        """The mean digit of the completion, over 9; other characters count as 0."""
        return sum(int(symbol) for symbol in completion if symbol.isdigit()) / 9 / len(completion)


class Solved(ArithmeticTask):
    """Every completion earns 1, so no group has a signal."""

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 for any completion."""
        return 1.0


def spec_of(**changes: Any) -> RunSpec:
    """The settings above with some changed."""
    return RunSpec.model_validate(merge(BASE, changes))


def done(folder: Path, name: str = "run", continues: str | None = None, **changes: Any) -> RunDirectory:
    """A run of `spec_of`, over."""
    run = RunDirectory.create(folder, name, spec_of(**changes), **({"continues": continues} if continues else {}))
    run_here(run, folder)
    assert run.status == "succeeded"
    return run


def online_of(spec: RunSpec, mesh: Mesh | None = None, task: Task | None = None) -> Online:
    """A policy at its first weights, and its sampler."""
    policy = build_policy(spec, mesh or single_process_mesh(), Path(), temperature=spec.online.temperature)
    return Online(spec, policy, Path(), task=task or Digits())


def sampled(number: int = 0, **changes: Any) -> RolloutBatch:
    """A sampling of `spec_of` with some settings changed, of all prompts at once."""
    return online_of(spec_of(**merge({"online": {"prompts_at_once": 3}}, changes))).sample(number)[0]


def fields(batch: RolloutBatch) -> dict[str, Tensor]:
    """All fields of a batch, by name."""
    return batch.token_fields() | batch.document_fields()
