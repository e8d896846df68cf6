"""Weights and optimizer state of a run, whole tensors whatever its layout, so that it can be continued or looked at.

    checkpoints/step0020/weights.safetensors      every parameter after 20 steps, in the run's own precision
    checkpoints/step0020/optimizer.safetensors    the optimizer's state, ``parameter/what``

A folder is written under another name and renamed, so it is whole or absent; only the newest stays. A run that is
continued is a new run directory: it begins with the records of the steps before, and the old one stays as it ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import atomic as whole_files
from workbench.errors import RecordError
from workbench.policy.model import DTYPES, Policy, load_decoder
from workbench.policy.precision import cast, lift_to_float64
from workbench.records.directory import RunDirectory, project_root
from workbench.sharding.gradients import keep_own_part, whole_tensor
from workbench.sharding.mesh import Mesh

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
KEPT_OF_STEPS = ("tensors", "certificates", "traces", "rollouts")
"""Folders of a run directory that hold what belongs to one step, under names that begin with it."""


def save_checkpoint(run: RunDirectory, steps: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Keep weights and optimizer state as they are after so many steps. Collective; the first rank writes.

    Whole tensors come one after another, and leave the device at once: on the first rank for its host's memory.
    """
    mesh, weights, state = policy.mesh, {}, {}
    for name, parameter in policy.model.named_parameters():
        weights[name] = _on_first(whole_tensor(parameter, policy.shards[name], mesh), mesh)
    for name, key, value, shard in _state(policy, optimizer):
        state[f"{name}/{key}"] = _on_first(value if shard is None else whole_tensor(value, shard, mesh), mesh)
    if not mesh.is_first:
        return
    folder = run.path / "checkpoints" / f"step{steps:04d}"
    making = folder.with_name(f".{folder.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    whole_files.write_tensors(making / WEIGHTS, weights)
    whole_files.write_tensors(making / OPTIMIZER, state)
    earlier = run.checkpoints()
    making.rename(folder)
    for path in earlier.values():
        shutil.rmtree(path)


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Give a policy and its optimizer, fresh and of the same settings, what a checkpoint holds; this rank's part of it.

    Raises:
        RecordError: missing or damaged, or of another model.
    """
    weights, state = (_read(folder / name) for name in (WEIGHTS, OPTIMIZER))
    parameters = dict(policy.model.named_parameters())
    if unlike := sorted(parameters.keys() ^ weights.keys()):
        raise RecordError(
            f"continue from {folder.name}",
            found=f"only one of model and checkpoint has {unlike[0]}",
            rule="a checkpoint is of the same model",
            fix="run anew, with fresh=True or --fresh",
        )
    for name, parameter in parameters.items():
        keep_own_part(parameter, weights[name], policy.shards[name], policy.mesh)
        held = {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] |= {key: _like(value, parameter, policy, name) for key, value in held.items()}


def continue_run(run: RunDirectory, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Go on where the run that this one continues was interrupted, if it continues one.

    Returns:
        The step to go on with, 0 for a run of its own.

    Raises:
        RecordError: the earlier run, or its checkpoint, is not there or damaged.
    """
    name = run.state.get("continues")
    if name is None:
        return 0
    earlier = RunDirectory.open(run.path.parent / name)
    found = earlier.checkpoints()
    if not found:
        raise RecordError(
            f"continue {name}",
            found="no checkpoint",
            rule="a run is continued from its newest one",
            fix="run anew, with fresh=True or --fresh",
        )
    done, folder = list(found.items())[-1]
    load_checkpoint(folder, policy, optimizer)
    if policy.mesh.is_first and not run.steps():
        for kept in KEPT_OF_STEPS:
            for path in sorted((earlier.path / kept).glob("step[0-9]*")):
                if int(path.name[4:].partition(".")[0]) < done:
                    (run.path / kept).mkdir(exist_ok=True)
                    (shutil.copytree if path.is_dir() else shutil.copy)(path, run.path / kept / path.name)
        for record in earlier.steps():
            if record["step"] < done:
                run.append_step(record)
    return done


def trained_policy(run: RunDirectory, *, project: Path | None = None) -> Any:
    """The stock `transformers` decoder with the weights of a run's newest checkpoint, for answers, tests or a folder.

    Its ``save_pretrained(folder)`` writes what ``model.source`` of another run can name.

    Args:
        run: with ``record.checkpoint_every``.
        project: folder that relative paths in its spec begin at; None takes `project_root`.

    Raises:
        RecordError: the run kept no checkpoint.
    """
    found = run.checkpoints()
    if not found:
        raise RecordError(
            f"the policy that {run.path.name} trained",
            found="no checkpoint",
            rule="a run keeps its weights where it is told to",
            fix="set record.checkpoint_every, and run again",
        )
    spec, precision = run.spec.model, run.spec.precision
    weights = _read(list(found.values())[-1] / WEIGHTS)
    model = load_decoder(spec.source, project=project or project_root(), tied=spec.tied, seed=spec.seed).eval()
    model = lift_to_float64(model) if precision == "float64" else cast(model, DTYPES[precision])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def _on_first(whole: Tensor, mesh: Mesh) -> Tensor:
    return whole.cpu() if mesh.is_first else whole.new_empty(0)


def _state(policy: Policy, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor, Any]]:
    """Name of the parameter, of its state, the tensor, and how it lies; None for a count, the same everywhere."""
    for name, parameter in policy.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield name, key, value, policy.shards[name] if value.shape == parameter.shape else None


def _like(value: Tensor, parameter: Tensor, policy: Policy, name: str) -> Tensor:
    """This rank's part of a state; what is not of the parameter's shape is a count, which lies on the host."""
    if value.dim() == 0:
        return value
    mine = torch.zeros_like(parameter, dtype=value.dtype)
    keep_own_part(mine, value, policy.shards[name], policy.mesh)
    return mine


def _read(path: Path) -> Mapping[str, Tensor]:
    return whole_files.read_tensors(
        path, asked=f"read {path.parent.name}/{path.name}", fix="run anew, with fresh=True or --fresh"
    )
