"""The policy of a run, and checkpoints: weights and optimizer state as full tensors, from which any layout can resume.

    checkpoints/step0020/weights.safetensors      every parameter after 20 steps, in the dtype that is updated; of a run
                                                  with LoRA its adapter instead, in peft's two files
    checkpoints/step0020/optimizer.safetensors    the optimizer's state, ``parameter/key``, the loss scale, and the
                                                  biases of routers
    checkpoints/step0020/sampler.safetensors      of an asynchronous online run: earlier weights that its sampler needs

Folders are written atomically, by a rename; only the newest is kept. A run that is resumed from is not changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import atomic as whole_files
from workbench.errors import RecordError
from workbench.policy.adapters import read_values, write_adapter
from workbench.policy.decoder import TINY, load_decoder
from workbench.policy.lora import Lora, merged_weights, untie
from workbench.policy.lora_targets import find_adapted, saved_whole
from workbench.policy.model import DTYPES, Policy, load_policy
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.prediction import add_prediction
from workbench.policy.tensor_plan import PREDICTION
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.records.requeued import REQUEUED
from workbench.sharding.gradients import copy_local_part, full_tensor
from workbench.sharding.mesh import Mesh
from workbench.sharding.pipeline import share_tensors
from workbench.specs.lora import read_settings
from workbench.specs.run import RunSpec
from workbench.train.optimizer import LossScale, dense_state

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
SCALE = "loss_scale"
"""In the optimizer's file: the loss scale and the steps since it last changed."""
SAMPLER = "sampler.safetensors"
STEP_FOLDERS = ("tensors", "certificates", "traces", "rollouts", "sync")
"""Folders of a run directory with one entry per step, whose name begins with the step."""

FRESH = "start a new run, with fresh=True or --fresh"


def build_policy(spec: RunSpec, mesh: Mesh, project: Path, *, temperature: float) -> Policy:
    """Load the decoder of a run and shard it for this rank; see `workbench.policy.model.load_policy`.

    The temperature is that of the rollouts; it divides logits unless the spec sets its own.
    """
    model, head, layout = spec.model, spec.policy, spec.layout
    return load_policy(
        model.source,
        mesh=mesh,
        precision=spec.dtypes,
        temperature=head.temperature or temperature,
        implementation=head.logprobs,
        project=project,
        tied=model.tied,
        seed=model.seed,
        fp32_head=head.fp32_head,
        chunk_tokens=head.chunk_rows,
        keep_bytes=head.keep_bytes,
        shard_parameters=layout.shard_parameters,
        reshard_after_forward=layout.reshard_after_forward,
        unit_layers=layout.unit_layers,
        checkpointing=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        fused_loss=head.fused_loss,
        kernels=dict(spec.kernels),
        pipeline_schedule=layout.pipeline_schedule,
        stages_per_rank=layout.stages_per_rank,
        stage_layers=layout.stage_layers,
        routing=spec.routing.on,
        depths=spec.prediction.depths,
        lora=spec.lora,
    )


def save_checkpoint(
    run: RunDirectory,
    steps: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scale: LossScale | None = None,
    sampler: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights and optimizer state after a number of steps. Collective; the first rank writes.

    ``sampler`` is the state of a sampler's weights (`workbench.train.weight_sync`), whole on each rank.

    Tensors are gathered one at a time and leave the device at once, on the first rank for its host's memory.
    """
    mesh, weights, state = policy.mesh, dict[str, Tensor](), dict[str, Tensor]()
    parameters = dict(policy.model.named_parameters())
    for name in policy.shapes or parameters if policy.lora is None else policy.lora.trained:
        local: dict[str, Tensor] = {}
        if (parameter := parameters.get(name)) is not None:  # else it is of another pipeline stage
            shard = policy.shards[name]
            local[name] = full_tensor(parameter, shard, mesh)
            for key, stored in optimizer.state.get(parameter, {}).items():
                value = dense_state(stored, parameter)
                sharded = value.shape == parameter.shape  # if not, a count, the same on every rank
                local[f"{name}/{key}"] = full_tensor(value, shard, mesh) if sharded else value
        for key, whole in share_tensors(local, mesh).items():
            (weights if key == name else state)[key] = _on_first(whole, mesh)
    state |= share_tensors(router_biases(policy), mesh)
    if scale is not None and scale.interval is not None:
        state[SCALE] = torch.tensor([scale.value, scale.good_steps], dtype=torch.float64)
    if not mesh.is_first:
        return
    folder = run.path / "checkpoints" / f"step{steps:04d}"
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if policy.lora is None:
        whole_files.write_tensors(temporary / WEIGHTS, weights)
    else:
        write_adapter(temporary, policy.lora, weights, base=run.spec.model.source)
    whole_files.write_tensors(temporary / OPTIMIZER, state)
    if sampler:
        whole_files.write_tensors(temporary / SAMPLER, {name: value.cpu() for name, value in sampler.items()})
    earlier = run.checkpoints()
    temporary.rename(folder)
    for path in earlier.values():  # only the newest is kept (DECISIONS.md, row 104)
        shutil.rmtree(path)


def load_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, scale: LossScale | None = None
) -> None:
    """Load this rank's shard of a checkpoint into a new policy and optimizer of the same settings.

    Raises:
        RecordError: missing or damaged, or of another model.
    """
    lora, state = policy.lora, _read(folder / OPTIMIZER)
    parameters = {name: value for name, value in policy.model.named_parameters() if value.requires_grad}
    if lora is not None:
        weights: Mapping[str, Tensor] = read_values(
            folder, lora.adapted, lora.saved, requested=f"continue from {folder.name}"
        )
    else:
        weights = _read(folder / WEIGHTS)
    if lora is None and (unlike := sorted((policy.shapes or parameters).keys() ^ weights.keys())):
        raise RecordError(
            f"continue from {folder.name}",
            found=f"only one of model and checkpoint has {unlike[0]}",
            rule="a checkpoint is of the same model",
            fix=FRESH,
        )
    for name, parameter in parameters.items():
        copy_local_part(parameter, weights[name], policy.shards[name], policy.mesh)
        entries = {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == name}
        optimizer.state[parameter] |= {key: _shard(value, parameter, policy, name) for key, value in entries.items()}
    _place_counts(optimizer)
    for name, bias_E in router_biases(policy).items():
        if name not in state:
            raise RecordError(
                f"continue from {folder.name}",
                found=f"no {name}",
                rule="routers resume with the biases of their checkpoint",
                fix=FRESH,
            )
        bias_E.copy_(state[name])
    if scale is not None and SCALE in state:
        scale.value, scale.good_steps = float(state[SCALE][0]), int(state[SCALE][1])


def router_biases(policy: Policy) -> dict[str, Tensor]:
    """Biases of the routers of this rank's stages, which are no parameters, by the names of their buffers."""
    routers = policy.routers
    if routers is None or not routers.have_bias:
        return {}
    return {routers.buffer(number): bias_E for number, bias_E in routers.biases(policy.model).items()}


def continue_run(
    run: RunDirectory,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scale: LossScale | None = None,
    restore: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> int:
    """Resume from the newest checkpoint: of this run if its job was requeued, else of the run that it continues.

    ``restore`` takes the state of a sampler's weights, {} if the checkpoint has none.

    Returns:
        The step to resume at, 0 for a new run.

    Raises:
        RecordError: the earlier run, or its checkpoint, is missing or damaged.
    """
    if own := run.checkpoints() if run.state.get(REQUEUED) else {}:
        done, folder = list(own.items())[-1]
        load_checkpoint(folder, policy, optimizer, scale)
        _restore(folder, restore)
        return done
    name = run.state.get("continues")
    if name is None:
        return 0
    earlier = RunDirectory.open(run.path.parent / name)
    rule = "a run resumes from its newest checkpoint"
    done, folder = _newest(earlier, f"continue {name}", rule, FRESH)
    load_checkpoint(folder, policy, optimizer, scale)
    _restore(folder, restore)
    if policy.mesh.is_first and not run.steps():
        for kind in STEP_FOLDERS:
            for path in sorted((earlier.path / kind).glob("step[0-9]*")):
                if int(path.name[4:].partition(".")[0]) < done:
                    (run.path / kind).mkdir(exist_ok=True)
                    (shutil.copytree if path.is_dir() else shutil.copy)(path, run.path / kind / path.name)
        for record in earlier.steps():
            if record["step"] < done:
                run.append_step(record)
    return done


def _restore(folder: Path, restore: Callable[[Mapping[str, Tensor]], None] | None) -> None:
    if restore is not None:
        restore(_read(folder / SAMPLER) if (folder / SAMPLER).exists() else {})


def continued_from(run: RunDirectory) -> str:
    """Name of the run whose checkpoint this run has resumed from: itself if its job was requeued."""
    return run.path.name if run.state.get(REQUEUED) and run.checkpoints() else str(run.state["continues"])


def trained_policy(run: RunDirectory | Path | str, *, project: Path | None = None) -> Any:
    """Return the stock `transformers` decoder with the weights of a run's newest checkpoint, to sample, test or save.

    Adapters of a run with LoRA are merged, in float32 at least; the checkpoint's folder is the adapter itself.

    ``save_pretrained(folder)`` writes a folder that ``model.source`` of another run can name.

    Relative paths in the run's spec begin at ``project``; None takes `project_root`. A run may be given by its folder.

    Raises:
        RecordError: no run at this path, or the run has no checkpoint.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    rule = "a run saves its weights only with record.checkpoint_every"
    fix = "set record.checkpoint_every, and run again"
    _, folder = _newest(run, f"the policy that {run.path.name} trained", rule, fix)
    spec, dtype = run.spec.model, run.spec.dtypes.weights
    model = load_decoder(spec.source, project=project or project_root(), tied=spec.tied, seed=spec.seed).eval()
    model = lift_to_float64(model) if dtype == "float64" else cast(model, DTYPES[dtype])
    weights = _merged(run, folder, model) if run.spec.lora.on else _read(folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def _merged(run: RunDirectory, folder: Path, model: Any) -> Mapping[str, Tensor]:
    """Weights of a model with the adapter of a checkpoint merged; a tied head that has one is untied.

    Layers that predict further tokens, which an adapter may hold whole, are none of the stock decoder's.
    """
    model_spec, depths = run.spec.model, run.spec.prediction.depths
    if depths:
        add_prediction(model, depths, seed=model_spec.seed, from_checkpoint=model_spec.source not in TINY)
    base = {name: value.detach() for name, value in model.named_parameters()}
    settings = read_settings(folder, run.spec.lora)
    adapted = find_adapted(model, settings, {name: value.shape for name, value in base.items()})
    lora = Lora(settings, adapted, ())
    if lora.head is not None and lora.head.base != lora.head.weight:
        untie(model)
    values = read_values(folder, adapted, saved_whole(model, settings), requested=f"read {folder.name}")
    if depths:
        delattr(model.base_model, PREDICTION)
    return merged_weights(lora, base | values)


def _newest(run: RunDirectory, requested: str, rule: str, fix: str) -> tuple[int, Path]:
    """The newest checkpoint of a run, with its number of steps."""
    if not (checkpoints := run.checkpoints()):
        raise RecordError(requested, found="no checkpoint", rule=rule, fix=fix)
    return list(checkpoints.items())[-1]


def _on_first(whole: Tensor, mesh: Mesh) -> Tensor:
    return whole.cpu() if mesh.is_first else whole.new_empty(0)


def _shard(value: Tensor, parameter: Tensor, policy: Policy, name: str) -> Tensor:
    """This rank's shard of a state; a 0-dimensional state is a count, which stays on the host."""
    if value.dim() == 0:
        return value
    local = torch.zeros_like(parameter, dtype=value.dtype)
    copy_local_part(local, value, policy.shards[name], policy.mesh)
    return local


def _place_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move counts of steps to the device where the optimizer is torch's fused kernel, which reads them there."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            state = optimizer.state[parameter]
            state |= {key: value.to(parameter.device) for key, value in state.items() if value.dim() == 0}


def _read(path: Path) -> Mapping[str, Tensor]:
    return whole_files.read_tensors(path, requested=f"read {path.parent.name}/{path.name}", fix=FRESH)
