"""Evidence that a recorder takes by itself: settings, dtypes, weights, replicas, modules in training mode.

A record keeps what there is at the start under ``observed`` in record.json, and what may change under ``observed`` in
the line of each step. Nothing is guessed: a key that is missing was not seen.

    start  parameters   name -> shape, dtype, "trains"; of the whole model, frozen ones too
           tied         groups of names that are one parameter
           optimizers   classes, in order
           left_out     trained parameters that no optimizer has, where optimizers have those of the model
           weights      checksum of this run's initial weights, of the part of the writing rank
           sharded      True if parameters are shards (DTensors, shards over tp, ZeRO 3)
           buffers      name -> shape and checksum, such as the frequencies of rotary positions
           config       numbers, switches and names of the model's ``config``, if it has one
    step   optimizers   for each, the settings of its groups (learning rate, betas, weight decay, ...)
           updates      that the optimizers' state has counted
           kept         names of the tensors of the optimizers' state, of those that are not all 0 for a first parameter
           repeated     tokens of the step that were noted twice and more, by their places
           weights      checksum before the step's update
           grid         "bfloat16" if every float32 weight is a number of bfloat16; else null
           inputs       fingerprints of what the model was given, see `workbench.records.inputs`
           cleared      False if the first backward of the step met a gradient that was there before
           met          of the later backwards of the writing rank, how many met a gradient, and their number
           gradient_grid  "bfloat16" if every float32 gradient is a number of bfloat16; else null
           replicas     "equal", or the first parameters whose copies differ between ranks
           dtypes       of gradients and of the optimizers' state
           dropout      modules that drop something
           training     whether the model is in training mode
           autocast     dtype of torch's autocast, where the model was called under it
           clip         the bound of the norm, where torch's function clipped
           clipped_after  backwards of the step before the first clipping
           given        norm of the gradient that the optimizers were given, and the smallest and largest factor of a
                        parameter's norm since it was taken, where gradients were taken earlier
           outputs      what the model gave and what flowed back into it, see `workbench.records.outputs`
           scale        of a GradScaler that was given
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.sharding.data_parallel import is_shard
from workbench.sharding.given_parameters import GivenParameters
from workbench.sharding.gradients import local_gradient, local_values, plain_names

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_start(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    given: GivenParameters,
) -> dict[str, Any]:
    """Evidence before the first step. ``parameters`` are those that train, by name."""
    named = plain_names(dict(model.named_parameters(remove_duplicate=False)))
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(id(value), []).append(name)
    weights = {name: given.weights(value) for name, value in parameters.items()}
    seen: dict[str, Any] = {
        "parameters": {
            names[0]: {
                "shape": list(given.weights(named[names[0]]).shape),
                "dtype": dtype_name(named[names[0]].dtype),
                "trains": named[names[0]].requires_grad,
            }
            for names in groups.values()
        },
        "tied": [names for names in groups.values() if len(names) > 1],
        "weights": checksum(weights),
        "sharded": any(is_shard(value) for value in weights.values()),
        "buffers": {
            name: [*value.shape, checksum({name: value})]
            for name, value in model.named_buffers()
            if not is_shard(value) and value.element_size() in _BITS
        },
        "config": config_of(model),
    }
    if optimizers:
        seen["optimizers"] = [type(each).__name__ for each in optimizers]
    if optimizers and not given.optimizer_has_copies:
        optimized = {id(value) for each in optimizers for group in each.param_groups for value in group["params"]}
        seen["left_out"] = [name for name, value in parameters.items() if id(value) not in optimized]
    return seen


def of_step(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    given: GivenParameters,
) -> dict[str, Any]:
    """Evidence of a step whose gradients are complete, before the update."""
    weights = {name: given.weights(value) for name, value in parameters.items()}
    states = [value for each in optimizers for kept in each.state.values() for value in kept.values()]
    seen: dict[str, Any] = {
        "weights": checksum(weights),
        "grid": _grid(weights.values()),
        "gradient_grid": _grid(
            gradient for value in parameters.values() if (gradient := local_gradient(value)) is not None
        ),
        "dropout": sum(drops(module) for module in model.modules()),
        "training": model.training,
        "dtypes": {
            "gradients": _dtypes(local_gradient(value) for value in parameters.values()),
            "state": _dtypes(value for value in states if isinstance(value, Tensor) and value.dim()),
        },
    }
    if optimizers:
        seen["optimizers"] = [[_settings(group) for group in each.param_groups] for each in optimizers]
        seen["updates"] = max((_updates(each) for each in optimizers), default=0)
        seen["kept"] = sorted({name for each in optimizers for name in _kept(each)})
    return seen


def _updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates that the state of an optimizer has counted, by its first parameter's; 0 without a count."""
    counted = next((kept["step"] for kept in optimizer.state.values() if "step" in kept), 0)
    return int(counted)


def _kept(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors of the state that are not all 0, of the first parameter that has any."""
    for state in optimizer.state.values():
        if tensors := {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}:
            return [name for name, value in tensors.items() if bool(local_values(value).any())]
    return []


@torch.no_grad()
def checksum(parameters: Mapping[str, Any]) -> str:
    """Sixteen digits that depend on every bit of this rank's parameters, or of its shards, and on their places.

    Each row's bits are summed as integers of 64, and the sums weighed by the number of their row: one pass over the
    weights, and the same digits on every device.
    """
    rows = [_sums_of_rows(local_values(value)) for value in parameters.values()]
    if not rows:
        return hashlib.sha256(b"[]").hexdigest()[:16]
    whole = torch.cat([of_one.to(rows[0].device) for of_one in rows])
    weighed = whole * torch.arange(1, len(whole) + 1, device=whole.device)
    numbers = [*map(len, rows), *torch.stack([whole.sum(), weighed.sum()]).tolist()]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def _sums_of_rows(local: Tensor) -> Tensor:
    """The sum of the bits of each row, modulo 2^64; of a vector, of all. The digits do not depend on alignment."""
    if not local.numel():
        return torch.zeros(1, dtype=torch.int64, device=local.device)
    bits = local.contiguous()
    bits = bits.reshape(len(bits) if bits.dim() > 1 else 1, -1)
    if bits.shape[1] * bits.element_size() % 8:
        return bits.view(_BITS[bits.element_size()]).sum(1, dtype=torch.int64)
    return (bits.clone() if bits.data_ptr() % 8 else bits).view(torch.int64).sum(1)


@torch.no_grad()
def _grid(tensors: Iterable[Tensor]) -> str | None:
    """bfloat16, if the lower halves of all float32 numbers of matrices are zero; vectors may be ones."""
    matrices = [local_values(value) for value in tensors if value.dtype == torch.float32 and value.dim() > 1]
    matrices = [value for value in matrices if value.numel()]
    first = [value.flatten()[:4096] for value in matrices[:1]]  # settles it almost always
    return "bfloat16" if matrices and not _has_lower_halves(first) and not _has_lower_halves(matrices) else None


def _has_lower_halves(values: Iterable[Tensor]) -> bool:
    return bool(torch.stack([(value.contiguous().view(torch.int32) & 0xFFFF).any() for value in values]).any())


@torch.no_grad()
def checksums(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The checksum of every parameter that this rank holds whole, or of its shard over tp."""
    whole = {name: value for name, value in parameters.items() if not is_shard(value) and value.numel()}
    return {name: checksum({name: value}) for name, value in whole.items()}


def drops(module: nn.Module) -> bool:
    """True if a module in training mode drops something: a dropout, or one with a rate of its own, as attention has."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(isinstance(value, float) and value > 0 and _RATE.search(name) for name, value in vars(module).items())


_RATE = re.compile("dropout|drop_prob|drop_rate|pdrop")
"""Names under which modules keep the rate of a functional dropout: transformers' ``attention_dropout``, ``attn_pdrop``,
timm's ``drop_prob``."""
_NO_EFFECT = re.compile(
    r"^_|dtype|token_id|^(use_cache|transformers_version|architectures|return_dict|output_|torchscript|id2label|"
    r"label2id|initializer_|param_init|name_or_path|pretraining_tp|problem_type)"
)
"""Settings of a config, of transformers or torchtitan, that change no number of a training step, or that say which
version wrote it. Weights are recorded by what they are."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Part of the text of a function or an object that is another in each process."""


def config_of(model: nn.Module) -> dict[str, Any]:
    """Settings of a model's ``config`` that are numbers, switches or names, those of parts of it by dotted name."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    config: Any = getattr(model, "config", None)
    given = config.to_dict() if callable(getattr(config, "to_dict", None)) else getattr(config, "__dict__", config)
    return dict(_flat(given)) if isinstance(given, Mapping) else {}


def _flat(given: Mapping[str, Any], begin: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if not isinstance(name, str) or _NO_EFFECT.search(name):
            continue
        if isinstance(value, Mapping) and len(begin) < 100:
            yield from _flat(value, f"{begin}{name}.")
        elif isinstance(value, str):
            yield f"{begin}{name}", _ADDRESS.sub("", value)
        elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            yield f"{begin}{name}", value


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _dtypes(values: Iterable[Tensor | None]) -> list[str]:
    return sorted({dtype_name(value.dtype) for value in values if value is not None})


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's group that are numbers, switches, or pairs of them."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
        return [plain(each) for each in value] if isinstance(value, tuple | list) else value

    kept = {name: plain(value) for name, value in group.items() if name != "params" and not name.startswith("_")}
    return {name: value for name, value in kept.items() if isinstance(value, int | float | list | bool | str)}
