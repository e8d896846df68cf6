"""The weights of a decoder that LoRA adapts, and the modules that it trains whole: settings matched with names.

A target is a linear layer, matched by the end of its name or by a regular expression of all of it, or a weight of
experts [experts, ., .]. Everything else is refused by name, as are targets that match nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError, listed
from workbench.policy.tensor_plan import of_prediction
from workbench.sharding.expert_parallel import expert_modules
from workbench.specs.lora import ALL_LINEAR, LoraSpec

FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Adapted:
    """An adapted weight.

    Attributes:
        module, parameter: their names; of a layer, the parameter is "weight".
        base: name of the weight among the model's parameters: that of the embedding, for a head that is tied to it.
        shape: of the whole weight.
        inputs, outputs: dimensions of the weight.
        is_head: it is the output head.
    """

    module: str
    parameter: str
    base: str
    shape: tuple[int, ...]
    inputs: int
    outputs: int
    is_head: bool = False

    @property
    def weight(self) -> str:
        """Name of the weight."""
        return f"{self.module}.{self.parameter}"

    @property
    def factors(self) -> tuple[str, str]:
        """Names of A and B."""
        a, b = (f"{self.module}.{factor}.{self.parameter}" for factor in FACTORS)
        return a, b

    @property
    def of_experts(self) -> bool:
        """True if the first dimension is that of experts."""
        return len(self.shape) == 3

    def factor_shapes(self, rank: int) -> tuple[torch.Size, torch.Size]:
        """Shapes of the whole A and B."""
        stack = self.shape[:1] if self.of_experts else ()
        return torch.Size((*stack, rank, self.shape[self.inputs])), torch.Size((*stack, self.shape[self.outputs], rank))

    def product(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Scale B A, laid out as the weight."""
        delta = torch.matmul(b, a) * scale
        return delta if self.outputs < self.inputs else delta.transpose(-2, -1)


def find_adapted(model: Any, spec: LoraSpec, shapes: Mapping[str, torch.Size]) -> tuple[Adapted, ...]:
    """Adapted weights, in the order of the model; ``shapes`` are those of its whole parameters.

    Raises:
        SpecError: a name that matches no linear layer, or no weight of experts.
    """
    head, linear = model.get_output_embeddings(), _linear_layers(model)
    listed_names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen: dict[str, Adapted] = {}
    for name in _targets(spec, linear, head):
        base = listed_names[id(linear[name].weight)]
        inputs = 0 if _is_transposed(linear[name]) else 1
        chosen[name] = Adapted(name, "weight", base, tuple(shapes[base]), inputs, 1 - inputs, linear[name] is head)
    for name in _target_parameters(model, spec, shapes):
        module, _, parameter = name.rpartition(".")
        inputs = 1 if getattr(model.get_submodule(module), "is_transposed", False) else 2
        chosen[name] = Adapted(module, parameter, name, tuple(shapes[name]), inputs, 3 - inputs)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(chosen.values(), key=lambda each: order[each.module]))


def target_names(model: Any, adapted: tuple[Adapted, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Short names of adapted layers, and of weights of experts, for an adapter_config.json; whole ones if ambiguous."""
    layers = [each.module for each in adapted if not each.of_experts]
    short = sorted({name.rpartition(".")[2] for name in layers})
    also = [name for name in _linear_layers(model) if name.rpartition(".")[2] in short]
    experts = [each.weight for each in adapted if each.of_experts]
    ends = sorted({".".join(name.split(".")[-3:]) for name in experts})
    return tuple(short if sorted(also) == sorted(layers) else layers), tuple(ends)


def _targets(spec: LoraSpec, linear: Mapping[str, nn.Module], head: nn.Module) -> list[str]:
    targets = spec.target_modules
    saved = [name for name in linear if _ends_with_any(name, spec.modules_to_save)]
    names = [name for name in linear if name not in saved]
    if targets == ALL_LINEAR:
        return [name for name in names if linear[name] is not head]
    if isinstance(targets, str):
        try:
            matched = [name for name in names if re.fullmatch(targets, name)]
        except re.error as error:
            raise SpecError(
                f"lora.target_modules = {targets!r}",
                found=f"no regular expression: {error}",
                rule="one text is a regular expression of the whole name of a layer, or all-linear",
                fix="correct it, or give a list of names",
            ) from None
        unmatched = [] if matched else [targets]
    else:
        matched = [name for name in names if _ends_with_any(name, targets)]
        unmatched = [target for target in targets if not any(_ends_with_any(name, (target,)) for name in names)]
    if unmatched:
        raise SpecError(
            f"lora.target_modules: {listed(map(repr, unmatched))}",
            found=f"linear layers {listed(sorted({name.rpartition('.')[2] for name in linear}))}"
            + (f", of which {listed(saved)} are trained whole" if saved else ""),
            rule="a target is a linear layer of the model; an embedding, a norm and a router are none",
            fix="name those, the weights of experts in target_parameters, and modules trained whole in modules_to_save",
        )
    return matched


def _target_parameters(model: Any, spec: LoraSpec, shapes: Mapping[str, torch.Size]) -> list[str]:
    experts = [
        f"{module}.{parameter}"
        for module, mixture in expert_modules(model).items()
        for parameter, value in mixture.named_parameters(recurse=False)
        if value.dim() == 3 and not of_prediction(module)
    ]
    for target in spec.target_parameters:
        if not any(_ends_with_any(name, (target,)) for name in experts):
            raise SpecError(
                f"lora.target_parameters: {target!r}",
                found=f"weights of experts {listed(experts)}" if experts else "a model without experts",
                rule="a parameter that is adapted is a weight of experts [experts, ., .]",
                fix="name those, such as mlp.experts.down_proj; linear layers are target_modules",
            )
    return [name for name in experts if name in shapes and _ends_with_any(name, spec.target_parameters)]


def saved_whole(model: Any, spec: LoraSpec) -> list[str]:
    """Names of the parameters of modules that are trained whole."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    saved: list[str] = []
    for target in spec.modules_to_save:
        modules = [(name, module) for name, module in model.named_modules() if _ends_with_any(name, (target,))]
        parameters = [(name, parameter) for name, module in modules for parameter in module.parameters()]
        if not parameters:
            raise SpecError(
                f"lora.modules_to_save: {target!r}",
                found="no module of that name with parameters",
                rule="modules of the model",
                fix="correct the name",
            )
        for name, parameter in parameters:
            if others := sorted(other for other in owners[id(parameter)] if not f"{other}.".startswith(f"{name}.")):
                raise SpecError(
                    f"lora.modules_to_save: {target!r}",
                    found=f"a weight that is also that of {listed(others)}",
                    rule="a module that is trained whole has weights of its own: peft trains a copy, and unties them",
                    fix="adapt it (target_modules), or take a model whose head is not tied",
                )
            saved.append(names[id(parameter)])
    return saved


def _linear_layers(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or (hasattr(module, "nf") and hasattr(module, "weight")))
        and not of_prediction(name)
    }


def _is_transposed(module: Any) -> bool:
    return not isinstance(module, nn.Linear)


def _ends_with_any(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
