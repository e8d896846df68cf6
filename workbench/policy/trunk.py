"""Trunk of a decoder, which computes hidden states: layers, recomputed in backward if asked, and the head as a unit.

FSDP2 shards a trunk with its head as a whole; see `workbench.sharding.data_parallel`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.errors import SpecError
from workbench.policy.stages import Stages


class Trunk(nn.Module):
    """A model, or one of its stages, whose forward ends at the hidden states; its head stays a submodule.

    Args:
        model: the decoder.
        stages: those of this rank, if it has some of the layers only.
        head: which hidden states pass last; None: a head that is read, whenever it is.
    """

    def __init__(self, model: Any, stages: Stages | None = None, head: Head | None = None) -> None:
        super().__init__()
        self.model, self.stages, self.head = model, stages, head

    def forward(self, *stage: int, **inputs: Any) -> Any:
        """The output of the base model, or of a stage."""
        if self.stages is not None:
            return self.stages.forward(*stage, **inputs)
        out = self.model.base_model(**inputs)
        if self.head is not None:
            out.last_hidden_state = self.head(out.last_hidden_state)
        return out


class Head(nn.Module):
    """The output head of a model as a unit of its own, which hidden states pass before its weight is read.

    Sharded, its weight is gathered while the last layer computes, and its gradient is summed while backward passes
    through the layers. With all that is in no layer, the first layer would wait for the one, and the optimizer for the
    other.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @classmethod
    def apart(cls, model: Any) -> Head | None:
        """The head of a model, if it shares no parameter with the rest; else None."""
        head = model.get_output_embeddings()
        own, rest = ({id(one) for one in module.parameters()} for module in (head, model.base_model))
        return None if own & rest else cls(head)

    def forward(self, hidden: Tensor) -> Tensor:
        """The same hidden states."""
        return _Passed.apply(hidden)


class _Passed(torch.autograd.Function):
    """The same values in a tensor that is no view: hooks on a view of FSDP2's would not survive a change in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor) -> Tensor:
        return d_hidden


def decoder_layers(model: Any) -> list[nn.Module]:
    """Layers of a decoder, in order, as `transformers` marks them for checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: Any) -> None:
    """Recompute each decoder layer in backward, collectives included, at the same point on every rank.

    The switch of `transformers` does nothing in eval mode, and a policy is in eval mode to have no dropout. The layer's
    own forward is wrapped, so that names and hooks of the module do not change.

    Raises:
        SpecError: a model that does not mark its layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise SpecError(
            f"layout.checkpointing with model type {model.config.get_text_config().model_type!r}",
            found="no decoder layers",
            rule="layers that transformers marks for checkpointing",
            fix="leave layout.checkpointing out for this model",
        )
    for layer in layers:
        # A policy has no randomness, so generator states are not saved.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
