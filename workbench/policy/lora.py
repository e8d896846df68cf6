"""LoRA: low-rank adapters on the linear layers of a decoder that is sharded already, and on the weights of experts.

One rule places an adapter in any layout. Its factors are cut as the weight is: A along the inputs, B along the outputs.
The factor that a rank holds whole acts on that rank's part of the layer alone, so its gradient is partial over tp:

    layer            A [r, I]                       B [O, r]
    column-parallel  whole, gradient partial        cut along O
    row-parallel     cut along I                    whole, gradient partial; added before the ranks' outputs are summed
    replicated       as the weight                  as the weight
    output head      whole, gradient complete       cut along the vocabulary
    experts          [E, r, I], over ep as the weight, over tp as above; [E, O, r]

An adapter computes scale (x A^T) B^T next to its layer. The weights of experts are added up as they are used,
W + scale B A, as grouped GEMMs need. The output head has no call: rows [h, scale h A^T] meet the weight [W, B], so
every implementation of the log-probabilities, fused ones too, has its adapter without knowing it.

Letters: I inputs | O outputs | r rank | E experts | D model dimension | V vocabulary | T tokens.

Source: Hu et al., arXiv 2106.09685, section 4.1. What peft computes: peft 0.21, `lora.Linear` and `lora.ParamWrapper`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.errors import SpecError, listed
from workbench.policy.lora_targets import FACTORS, Adapted, find_adapted, saved_whole, target_names
from workbench.policy.tensor_plan import probe_hidden_states
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ADDED, ParameterShard, local_part
from workbench.specs.lora import LoraSpec


@dataclass(frozen=True)
class Lora:
    """The adapters of a policy.

    Attributes:
        spec: their settings, with a rank.
        adapted: the adapted weights of the whole model, also those of other pipeline stages.
        trained: names of all trained parameters of the whole model: factors, and modules that are trained whole.
        target_modules, target_parameters: names of the adapted layers and weights of experts, as short as they can be.
    """

    spec: LoraSpec
    adapted: tuple[Adapted, ...]
    trained: tuple[str, ...]
    target_modules: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()

    @property
    def saved(self) -> list[str]:
        """Names of the parameters that are trained whole."""
        factors = {name for each in self.adapted for name in each.factors}
        return [name for name in self.trained if name not in factors]

    @property
    def head(self) -> Adapted | None:
        """The adapted output head; None: it has no adapter."""
        return next((each for each in self.adapted if each.is_head), None)


def install_lora(
    model: Any,
    mesh: Mesh,
    shards: Mapping[str, ParameterShard],
    spec: LoraSpec,
    *,
    shapes: Mapping[str, torch.Size],
    values: Mapping[str, Tensor] | None = None,
) -> tuple[Lora, dict[str, ParameterShard], dict[str, torch.Size]]:
    """Put adapters on a decoder that is sharded over tp and ep, freeze its weights, and check that each is used.

    Collective over tp and ep, as a forward of the model.

    Args:
        model: of `transformers`, before it is split into pipeline stages or over dp x cp.
        mesh: the axes.
        shards: of its parameters.
        spec: settings with a rank.
        shapes: whole shapes of its parameters.
        values: whole factors and whole trained modules, by name; None: initial values, from the seed.

    Returns:
        The adapters, and the shards and shapes of all parameters, in the order of the model.

    Raises:
        SpecError: targets that match nothing, or not what can be adapted; a layer that the model does not call.
    """
    adapted = find_adapted(model, spec, shapes)
    saved = saved_whole(model, spec)
    products, shards, shapes = [], dict(shards), dict(shapes)
    for each in adapted:
        module: Any = model.get_submodule(each.module)
        base_shard, names = shards[each.base], each.factors
        given = initial_values(each, spec) if values is None else tuple(values[name] for name in names)
        of_factors = adapter_shards(each, base_shard)
        for factor, name, whole, shard, shape in zip(
            FACTORS, names, given, of_factors, each.factor_shapes(spec.rank), strict=True
        ):
            if whole.shape != shape:
                raise SpecError(
                    f"the adapter of {each.weight}",
                    found=f"{name} of {tuple(whole.shape)}",
                    rule=f"rank {spec.rank} and a weight of {each.shape}: {tuple(shape)}",
                    fix="take the adapter of this model, with the rank in its adapter_config.json",
                )
            if not hasattr(module, factor):
                setattr(module, factor, nn.Module())
            weight = getattr(module, each.parameter)
            local = part_of(whole, shard, mesh).to(weight, copy=True).contiguous()
            getattr(module, factor).register_parameter(each.parameter, nn.Parameter(local))
            shards[name], shapes[name] = shard, shape
        products.append(_connect(module, each, spec, by_rows=base_shard.dim == each.inputs))
    for name in saved:
        if values is not None:
            model.get_parameter(name).data.copy_(part_of(values[name], shards[name], mesh))
    trained = {name for each in adapted for name in each.factors} | set(saved)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    _gradients_from_embedding(model)
    _check_used(model, mesh, products)
    order = [name for name, _ in model.named_parameters()]
    lora = Lora(spec, adapted, tuple(name for name in order if name in trained), *target_names(model, adapted))
    return lora, {name: shards[name] for name in order}, {name: shapes[name] for name in order}


# -- values and shards -------------------------------------------------------------------------------------------------


def initial_values(each: Adapted, spec: LoraSpec) -> tuple[Tensor, Tensor]:
    """Whole A and B at the start, in float32: from the seed and their names alone, so the same in every layout.

    Source: peft 0.21, `LoraLayer.reset_lora_parameters`: `kaiming_uniform_` with a = sqrt(5) is uniform, of at most
            1 / sqrt(inputs); a B that is not reset is a new ``nn.Linear``, of at most 1 / sqrt(r).
    """
    rank, shapes = spec.rank, each.factor_shapes(spec.rank)

    def generator(name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{spec.seed} {name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))

    def uniform(name: str, shape: torch.Size, bound: float) -> Tensor:
        return (2 * torch.rand(shape, generator=generator(name)) - 1) * bound

    name_a, name_b = each.factors
    if spec.init_lora_weights == "gaussian":
        a = torch.randn(shapes[0], generator=generator(name_a)) / rank
    else:
        a = uniform(name_a, shapes[0], 1 / math.sqrt(each.shape[each.inputs]))
    random = spec.init_lora_weights == "random"
    return a, uniform(name_b, shapes[1], 1 / math.sqrt(rank)) if random else torch.zeros(shapes[1])


def adapter_shards(each: Adapted, weight: ParameterShard) -> tuple[ParameterShard, ParameterShard]:
    """Shards of A and B of a weight; the table above."""
    if weight.dim is None:
        return weight, weight
    cut_inputs, last = weight.dim == each.inputs, len(each.shape) - 1
    whole = ParameterShard(gradient_is_partial=not each.is_head, over_ep=weight.over_ep)
    cut = replace(weight, dim=last if cut_inputs else last - 1, gradient_is_partial=False, on_both_ends=False)
    return (cut, whole) if cut_inputs else (whole, cut)


def part_of(whole: Tensor, shard: ParameterShard, mesh: Mesh) -> Tensor:
    """This rank's part over tp and ep of a whole parameter; a view."""
    part = local_part(whole, shard, mesh["tp"])
    return part.chunk(mesh["ep"].size)[mesh["ep"].rank] if shard.over_ep else part


# -- computation -------------------------------------------------------------------------------------------------------


class _Product:
    """scale (x A^T) B^T of a layer, from the factors that it holds now, which may be gathered or copies."""

    def __init__(self, module: Any, each: Adapted, spec: LoraSpec) -> None:
        self.module, self.each, self.spec, self.used = module, each, spec, False

    def __call__(self, inputs: Tensor) -> Tensor:
        self.used = True
        low_rank = functional.linear(inputs, self.module.lora_A.weight)
        return functional.linear(low_rank, self.module.lora_B.weight) * self.spec.scale

    def before_sum(self, inputs: Tensor) -> Tensor:
        """This rank's part of a row-parallel layer's adapter, from its part of the inputs."""
        return self(inputs)

    def after(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook of a layer whose output is this rank's alone."""
        return output + self(inputs[0])


class _Sum:
    """W + scale B A in the place of a weight of experts, while they compute."""

    def __init__(self, module: Any, each: Adapted, spec: LoraSpec) -> None:
        self.module, self.each, self.spec, self.used = module, each, spec, False

    def begin(self, *_: Any) -> None:
        """Forward pre-hook. An attribute hides the parameter of its name, which stays registered."""
        self.used, name = True, self.each.parameter
        a, b = (getattr(getattr(self.module, factor), name) for factor in FACTORS)
        vars(self.module)[name] = self.module._parameters[name] + self.each.product(a, b, self.spec.scale)

    def end(self, *_: Any) -> None:
        """Forward hook, also after an error."""
        vars(self.module).pop(self.each.parameter, None)


def _connect(module: Any, each: Adapted, spec: LoraSpec, *, by_rows: bool) -> _Product | _Sum:
    if each.of_experts:
        added = _Sum(module, each, spec)
        module.register_forward_pre_hook(added.begin)
        module.register_forward_hook(added.end, always_call=True)
        return added
    product = _Product(module, each, spec)
    if by_rows:
        vars(module)[ADDED] = lambda inputs: product.before_sum(inputs)
    else:
        module.register_forward_hook(product.after, prepend=True)  # before a hook that gathers the ranks' outputs
    return product


def head_operands(head: Any, scale: float, hidden_TD: Tensor, *, trained: bool = True) -> Tensor:
    """Rows [h, scale h A^T] of an adapted output head. Shapes: [T, D] -> [T, D + r]. Backward: to A if ``trained``."""
    a = head.lora_A.weight if trained else head.lora_A.weight.detach()
    return torch.cat([hidden_TD, functional.linear(hidden_TD, a.to(hidden_TD.dtype)) * scale], dim=-1)


def head_weight(head: Any) -> Tensor:
    """The weight [W, B] of an adapted output head. Shapes: [V, D], [V, r] -> [V, D + r]."""
    return torch.cat([head.weight, head.lora_B.weight], dim=1)


def _gradients_from_embedding(model: Any) -> None:
    """Let every hidden state have a gradient, although the embedding is frozen.

    Backward then passes through all layers of all ranks, and so do its collectives and the hooks of FSDP2, wherever the
    adapters are; transformers' ``enable_input_require_grads`` does the same.
    """

    def require(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    model.get_input_embeddings().register_forward_hook(require)


def _check_used(model: Any, mesh: Mesh, products: list[_Product | _Sum]) -> None:
    """Raise if a forward of the model passes an adapter by: its layer is not called, and its weight read elsewhere."""
    probe_hidden_states(model, mesh["tp"])
    head = model.get_output_embeddings()
    if unused := [product.each.weight for product in products if not product.used and product.module is not head]:
        raise SpecError(
            f"LoRA on model type {model.config.get_text_config().model_type!r}",
            found=f"{listed(unused)}, which a forward of the model does not call",
            rule="an adapted layer is called: the adapter is added to what it returns",
            fix="leave these layers out of lora.target_modules",
        )


# -- merging -----------------------------------------------------------------------------------------------------------


def merged(each: Adapted, weight: Tensor, a: Tensor, b: Tensor, scale: float, how: str = "merged") -> Tensor:
    """W + scale B A: in float32 at least, or all of it in bfloat16 ("merged_bfloat16").

    Source: of the latter, peft 0.21, `Linear.get_delta_weight` and `merge`, with base and adapters in bfloat16 on a
            GPU: B A, its product with the scale, and the sum are rounded. On a CPU it rounds scale B A once.
    """
    dtype = torch.bfloat16 if how == "merged_bfloat16" else torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) + each.product(a.to(dtype), b.to(dtype), scale)


def prepare_sampler(model: Any, lora: Lora) -> None:
    """Give an unsharded model of the same source the parameters that `sampler_weights` has."""
    if lora.spec.sampler == "unmerged":
        named = dict(model.named_parameters())
        shards = dict.fromkeys(named, ParameterShard())
        shapes = {name: value.shape for name, value in named.items()}
        install_lora(model, single_process_mesh(), shards, lora.spec, shapes=shapes)
    elif lora.head is not None and lora.head.base != lora.head.weight:
        untie(model)


def sampler_weights(lora: Lora, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the sampler, by name, from the whole parameters of the policy; `LoraSpec.sampler` says how.

    A merged head that was tied to the embedding is a weight of its own.
    """
    how = lora.spec.sampler
    return dict(weights) if how == "unmerged" else merged_weights(lora, weights, how)


def sampled_names(lora: Lora) -> set[str]:
    """Names of the weights of `sampler_weights` that training changes."""
    if lora.spec.sampler == "unmerged":
        return set(lora.trained)
    return {each.weight for each in lora.adapted} | set(lora.saved)


def merged_weights(lora: Lora, weights: Mapping[str, Tensor], how: str = "merged") -> dict[str, Tensor]:
    """All weights, each adapter merged into its own; without the adapters."""
    factors = {name for each in lora.adapted for name in each.factors}
    results = {name: weight for name, weight in weights.items() if name not in factors}
    for each in lora.adapted:
        a, b = (weights[name] for name in each.factors)
        results[each.weight] = merged(each, weights[each.base], a, b, lora.spec.scale, how)
    return results


def untie(model: Any) -> None:
    """Give the output head a weight of its own, equal to that of the embedding."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
