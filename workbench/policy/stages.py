"""Pipeline stages of a decoder: runs of its layers, of which a rank has some, under the names of the whole model.

The first stage has the embedding, the last one the norm, the head and layers that predict further tokens; each
runs the decoder's own forward, in which the layers of other stages are skipped and its input takes the place of the
embedding. An embedding that is the head too, or that those layers read, is a parameter of both ends. The stages of
every model are measured: one after another, they must give the hidden states of the whole decoder.

Letters: t tokens of this rank | D model dimension.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.precision import cast
from workbench.policy.tensor_plan import PREDICTION, check_sharded, probe_hidden_states
from workbench.sharding.divisibility import check_stages
from workbench.sharding.mesh import Mesh
from workbench.sharding.pipeline import Action, schedule
from workbench.sharding.tensor_parallel import ParameterShard


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a decoder, and those of this rank.

    Attributes:
        base: the decoder without its head.
        list_name: attribute of the base that holds its layers.
        tail: names of the modules behind the layers, of the last stage.
        layers: of every stage, the numbers of its layers.
        own: numbers of this rank's stages.
        schedule_name: see `sharding.pipeline.schedule`.
        ranks: of the axis pp.
        width: D.
        sharing: tp ranks that share the tokens between stages; 1 without sequence parallelism.
    """

    base: Any
    list_name: str
    tail: tuple[str, ...]
    layers: tuple[range, ...]
    own: tuple[int, ...]
    schedule_name: str
    ranks: int
    width: int
    sharing: int = 1

    @property
    def last(self) -> int:
        """Number of the last stage, which evaluates the loss."""
        return len(self.layers) - 1

    def actions(self, micro_batches: int) -> list[Action]:
        """Return the actions of this rank for a step of so many micro-batches."""
        every = schedule(
            self.schedule_name,
            ranks=self.ranks,
            stages_per_rank=len(self.layers) // self.ranks,
            micro_batches=micro_batches,
        )
        return every[self.own[0]]

    def forward(self, stage: int, **inputs: Any) -> Tensor:
        """Return the output of a stage: the input of the next one, or the last hidden states.

        ``inputs`` are those of the decoder: ``input_ids`` of the first stage, ``inputs_embeds`` [1, t, D] of others.

        Shapes:   [1, t, D]; with sequence parallelism [1, t / tp, D] between stages.
        """
        with self._only(stage):
            # Without hooks between stages: that of sequence parallelism gathers the tokens behind the last norm.
            forward = self.base if stage == self.last else self.base.forward
            return forward(**inputs).last_hidden_state

    @contextlib.contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """Hide the modules of other stages from the decoder's forward; they stay registered."""
        own, layers = self.layers[stage], getattr(self.base, self.list_name)
        hidden: dict[str, Any] = {
            self.list_name: [layer if number in own else skip for number, layer in enumerate(layers)]
        }
        if stage != self.last:
            hidden |= dict.fromkeys(self.tail, skip)
        with instead(self.base, hidden):
            yield


@contextlib.contextmanager
def instead(base: Any, shown: Mapping[str, Any]) -> Iterator[None]:
    """Show other modules to a decoder's forward, by attribute; its own ones stay registered."""
    own = vars(base)
    own |= shown
    try:
        yield
    finally:
        for name in shown:
            del own[name]


def skip(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand for a module that a forward skips: its output is its input."""
    return hidden


class Elsewhere(nn.Module):
    """Placeholder of a module whose parameters are on another rank of the pipeline."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise: no stage of this rank calls it."""
        raise AssertionError("a stage calls only its own modules")


def split_stages(
    model: Any,
    mesh: Mesh,
    shards: Mapping[str, ParameterShard],
    *,
    schedule_name: str,
    stages_per_rank: int,
    stage_layers: Sequence[int] = (),
    sequence_parallel: bool = False,
) -> tuple[Stages | None, dict[str, ParameterShard]]:
    """Keep the layers of this rank's stages, in place, after `shard_decoder`; the whole decoder if pp is one rank.

    Layers are dealt as ``stage_layers`` says, or in equal runs, of which the first have one more where they do not
    divide. Collective over tp.

    Returns:
        The stages, and the sharding of the parameters that this rank keeps.

    Raises:
        SpecError: a model that does not consist of an embedding, layers and modules behind them.
        ShardingError: more stages than layers, or stages that do not have all of them.
    """
    axis = mesh["pp"]
    if axis.size == 1:
        return None, dict(shards)
    base, embedding, head = model.base_model, model.get_input_embeddings(), model.get_output_embeddings()
    list_name, tail = anatomy(model)
    layers = getattr(base, list_name)
    count = axis.size * stages_per_rank
    check_stages(len(layers), axis.size, stages_per_rank, stage_layers)
    equal = [len(layers) // count + (stage < len(layers) % count) for stage in range(count)]
    bounds = list(itertools.accumulate(stage_layers or equal, initial=0))
    runs = tuple(range(begin, end) for begin, end in itertools.pairwise(bounds))
    own = tuple(range(axis.rank, count, axis.size))
    width = model.config.get_text_config().hidden_size
    sharing = mesh["tp"].size if sequence_parallel else 1
    stages = Stages(base, list_name, tail, runs, own, schedule_name, axis.size, width, sharing)
    _check(model, mesh, stages)

    tied = head.weight is embedding.weight
    first, last = 0 in own, stages.last in own
    keeps = {number for stage in own for number in runs[stage]}
    names = {id(module): name for name, module in model.named_modules()}
    absent = [layer for number, layer in enumerate(layers) if number not in keeps]
    both = tied or hasattr(base, PREDICTION)  # these layers, on the last stage, read embeddings
    absent += [] if first or (last and both) else [embedding]
    absent += [] if last else [head, *(getattr(base, name) for name in tail)]
    shared = next(name for name, value in model.named_parameters() if value is embedding.weight) if both else ""
    for module in absent:
        model.set_submodule(names[id(module)], Elsewhere())
    kept = {name: shards[name] for name, _ in model.named_parameters()}
    if shared in kept:
        kept[shared] = replace(kept[shared], on_both_ends=True)
    return stages, kept


def anatomy(model: Any) -> tuple[str, tuple[str, ...]]:
    """Attribute of the list of decoder layers, and those of the modules with parameters behind it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    base, embedding = model.base_model, model.get_input_embeddings()
    children = dict(base.named_children())
    lists = [
        name
        for name, child in children.items()
        if isinstance(child, nn.ModuleList) and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]
    order = list(children)
    at = order.index(lists[0]) if len(lists) == 1 else -1
    with_weights = [name for name, child in children.items() if any(True for _ in child.parameters())]
    before = [name for name in with_weights if order.index(name) < at and children[name] is not embedding]
    if at < 0 or before or base._parameters:
        found = f"{len(lists)} lists of decoder layers" if at < 0 else ", ".join(before or base._parameters)
        raise SpecError(
            f"pipeline stages of model type {model.config.get_text_config().model_type!r}",
            found=found,
            rule="one embedding, then one list of layers, then the last norm: what a stage gets is all that it needs",
            fix="leave layout.pp out for this model",
        )
    return lists[0], tuple(name for name in with_weights if order.index(name) > at)


def _check(model: Any, mesh: Mesh, stages: Stages) -> None:
    """Raise if the stages, one after another, do not give the hidden states of the decoder."""

    def one_after_another(**inputs: Any) -> Tensor:
        hidden = stages.forward(0, **inputs)
        del inputs["input_ids"]
        for stage in range(1, stages.last + 1):
            hidden = stages.forward(stage, inputs_embeds=hidden, **inputs)
        return hidden

    # In float32: a mixture sums its experts with atomics on a GPU, whose rounding in bfloat16 passes for another model.
    dtype = model.get_input_embeddings().weight.dtype
    model, axis = cast(model.to(mesh.device), torch.promote_types(dtype, torch.float32)), mesh["tp"]
    check_sharded(
        f"pipeline stages of model type {model.config.get_text_config().model_type!r}",
        "hidden states",
        probe_hidden_states(model, axis),
        lambda: probe_hidden_states(model, axis, one_after_another),
        rule="its stages, one after another, give the hidden states of the decoder",
        fix="leave layout.pp out for this model",
    )
    cast(model, dtype)
