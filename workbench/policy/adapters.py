"""Adapters in peft's file format, read and written.

    adapter_config.json          settings
    adapter_model.safetensors    factors, whole, in the dtype that is trained, and modules that are trained whole

Names in the file are those of the model under ``base_model.model.``. Adapters of experts are stacked: A [E r, I] expert
by expert, B [O, r E] rank by rank; where several weights of one module have adapters, the last one has the module's own
name, and each one before it another ``base_layer``.

Letters: I inputs | O outputs | r rank | E experts.

Source: peft 0.21, `get_peft_model_state_dict`, and `ParamWrapper` for experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import atomic
from workbench.errors import SpecError, listed
from workbench.policy.lora import Lora, install_lora, part_of
from workbench.policy.lora_targets import FACTORS, Adapted, find_adapted, saved_whole
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.lora import ADAPTER_CONFIG, LoraSpec, read_settings, to_peft

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FIX = "name a folder that save_pretrained of peft, or a checkpoint of a run with LoRA, has written"


def read_values(
    folder: Path,
    adapted: Sequence[Adapted],
    saved: Iterable[str],
    *,
    requested: str,
    is_base: Callable[[str, Tensor], bool] = lambda name, value: False,
) -> dict[str, Tensor]:
    """Return the whole factors and whole trained modules of an adapter, by their names in the model.

    ``is_base`` tells of a name and a tensor whether it is that weight of the base: peft repeats those of adapted heads.

    Raises:
        SpecError: tensors of the file that the model has no place for, or the reverse.
        RecordError: a damaged file.
    """
    file = dict(atomic.read_tensors(folder / WEIGHTS, requested=requested, fix=_FIX))
    values, missing = dict[str, Tensor](), list[str]()
    for key, name, each in _keys(adapted, saved):
        if key in file:
            values[name] = _from_file(file.pop(key), name, each)
        else:
            missing.append(key)
    repeated = [key for key in file if ".base_layer." in key and ".lora_" not in key]
    unknown = [
        key
        for key in file
        if key not in repeated or not is_base(key.removeprefix(_PREFIX).replace(".base_layer", ""), file[key])
    ]
    if missing or unknown:
        parts = [f"without {listed(missing)}"] if missing else []
        parts += [f"with {listed(sorted(unknown))}, for which the model has no place"] if unknown else []
        raise SpecError(
            requested,
            found=f"{WEIGHTS} {' and '.join(parts)}",
            rule="the file has exactly the adapters that its settings name, on the base that it was trained on",
            fix="take the base model of this adapter (base_model_name_or_path in its adapter_config.json)",
        )
    return values


def load_adapters(
    model: Any,
    mesh: Mesh,
    shards: Mapping[str, ParameterShard],
    spec: LoraSpec,
    *,
    shapes: Mapping[str, torch.Size],
    project: Path | None = None,
) -> tuple[Lora, dict[str, ParameterShard], dict[str, torch.Size]]:
    """`lora.install_lora`, from the adapter that a source names, or from a seed. Collective over tp and ep."""
    if spec.source is None:
        return install_lora(model, mesh, shards, spec, shapes=shapes)
    folder = (project or Path()) / spec.source
    read = read_settings(folder, spec)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = {name: first[id(value)] for name, value in model.named_parameters(remove_duplicate=False)}

    def is_base(name: str, value: Tensor) -> bool:
        name = every.get(name, "")
        if name not in shapes or value.shape != shapes[name]:
            return False
        weight = model.get_parameter(name)
        return bool(part_of(value, shards[name], mesh).to(weight).equal(weight))

    values = read_values(
        folder,
        find_adapted(model, read, shapes),
        saved_whole(model, read),
        requested=f"lora.source = {spec.source!r}",
        is_base=is_base,
    )
    return install_lora(model, mesh, shards, read, shapes=shapes, values=values)


def write_adapter(folder: Path, lora: Lora, values: Mapping[str, Tensor], *, base: str) -> None:
    """Write an adapter that peft reads, from whole factors by name; ``base`` is the source of its model."""
    keys = _keys(lora.adapted, lora.saved)
    tensors = {key: _to_file(values[name], name, each).contiguous() for key, name, each in keys}
    config = to_peft(lora.spec, base=base, targets=lora.target_modules, parameters=lora.target_parameters)
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_tensors(folder / WEIGHTS, tensors)
    atomic.write_whole(folder / ADAPTER_CONFIG, atomic.to_json(config))


def _keys(adapted: Iterable[Adapted], saved: Iterable[str]) -> list[tuple[str, str, Adapted | None]]:
    """Name in the file, name in the model, and the adapted weight of each tensor."""
    keys: list[tuple[str, str, Adapted | None]] = [(_PREFIX + name, name, None) for name in saved]
    adapted = tuple(adapted)
    for each in adapted:
        together = [other.parameter for other in adapted if other.module == each.module]
        outer = len(together) - 1 - together.index(each.parameter)
        module = _PREFIX + each.module + ".base_layer" * outer
        keys += [(f"{module}.{factor}.weight", name, each) for factor, name in zip(FACTORS, each.factors, strict=True)]
    return keys


def _to_file(value: Tensor, name: str, each: Adapted | None) -> Tensor:
    if each is None or not each.of_experts:
        return value
    if name == each.factors[0]:
        return value.flatten(0, 1)
    return value.permute(1, 2, 0).flatten(1)


def _from_file(value: Tensor, name: str, each: Adapted | None) -> Tensor:
    if each is None or not each.of_experts:
        return value
    experts = each.shape[0]
    if name == each.factors[0]:
        return value.unflatten(0, (experts, -1))
    return value.unflatten(1, (-1, experts)).permute(2, 0, 1)
