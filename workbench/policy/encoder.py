"""The encoder: a Hugging Face vision model and a projector, sharded for this rank, from pixels to features.

A feature replaces a token's embedding in the policy's input: one for each row of the vision model's last hidden
states. The encoder has its own layout over the ranks. Its tensor-parallel plan is derived from the names of its
layers if its configuration has none; over cp each rank holds some patches of each image, and attention gathers the
keys and values of the other ranks.

Letters: b images | c channels | h, w pixels | s features of an image | R cp ranks | d head dimension | D model
dimension of the policy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.model import DTYPES
from workbench.policy.tensor_plan import check_sharded, plan_by_names
from workbench.sharding.bridge.delivery import owned_positions
from workbench.sharding.collectives import gather_scatter
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard, apply_tensor_parallel, check_heads

ATTENTION = "workbench_images"


@dataclass(frozen=True)
class Encoder:
    """One rank's part of an encoder.

    Attributes:
        model: vision model and projector, sharded for this rank.
        mesh: the axes of the encoder, which are not the policy's.
        shards: how every parameter is sharded over tp, by name.
        tokens: s, the features of an image.
        order: how features are dealt to cp ranks; one of `workbench.sharding.orders.ORDERS`.
    """

    model: nn.Module
    mesh: Mesh
    shards: dict[str, ParameterShard]
    tokens: int
    order: str = "contiguous"

    @property
    def places_Rs(self) -> Tensor:
        """[R, s / R] indices of the features of each image that each cp rank holds."""
        return owned_positions(self.order, self.tokens, self.mesh["cp"].size)

    def features(self, pixels_bchw: Tensor) -> Tensor:
        """Compute this rank's features of its images.

        Shapes:   [b, c, h, w] -> [b, s / cp, D].
        Layout:   dp: sharded(b); cp: replicated -> sharded(s); tp: replicated.
        Backward: parameters get this rank's part of a sum over dp x cp. Expects the complete gradient on each tp rank,
                  as bridges provide it.
        """
        return self.model(pixels_bchw)


def make_encoder(
    vision: Any,
    width: int,
    *,
    mesh: Mesh | None = None,
    precision: str = "float32",
    seed: int = 0,
    order: str = "contiguous",
) -> Encoder:
    """Append a projector to a vision model, and shard both for this rank. Collective over tp and cp.

    Args:
        vision: a `transformers` vision model with the same unsharded weights on every rank, on CPU; modified in place.
        width: D of the policy.
        mesh: the axes; one rank if None.
        precision: float64, float32 or bfloat16.
        seed: of the projector's weights.
        order: see `Encoder`.

    Raises:
        SpecError: a vision model that pools, or whose sharded features differ from the unsharded ones.
        ShardingError: heads or features that tp does not divide, features that cp does not divide.
    """
    from transformers import AttentionInterface

    mesh = mesh or single_process_mesh()
    if getattr(vision, "use_head", False):
        raise SpecError(
            f"encoder of model type {vision.config.model_type!r}",
            found="a pooling head",
            rule="features are the last hidden states, and every parameter acts on them",
            fix="vision_use_head=False",
        )
    model = _WithProjector(vision.eval(), width, seed)
    AttentionInterface.register(ATTENTION, image_attention)
    vision.set_attn_implementation(ATTENTION)
    _set_cp(vision, Axis("cp"))
    pixels_bchw = _probe_pixels(vision.config)
    with torch.no_grad():
        expected = model(pixels_bchw)
    encoder = Encoder(model, mesh, _shard(model, mesh["tp"]), expected.shape[1], order)
    if mesh["cp"].size > 1:
        places_s = encoder.places_Rs[mesh["cp"].rank]
        vision.embeddings.register_forward_hook(lambda _, __, out: out.index_select(1, places_s.to(out.device)))
        _set_cp(vision, mesh["cp"])
        expected = expected[:, places_s]
    model.to(mesh.device)
    with torch.no_grad():
        check_sharded(
            f"encoder of model type {vision.config.model_type!r} over tp={mesh['tp'].size}, cp={mesh['cp'].size}",
            "features",
            expected,
            lambda: model(pixels_bchw.to(mesh.device)).cpu(),
            rule="sharded and unsharded encoder give the same features",
            fix="use tp=1 and cp=1 for this encoder",
        )
    model.to(DTYPES[precision])
    return encoder


def image_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each feature to all features of its image, which may be sharded over cp ranks.

    Has the signature of a `transformers` attention function. The calling layer has its cp axis as an attribute; the
    mask is unused, because features of an image attend to each other without one.

    Shapes:   query, key and value [b, H, s / cp, d] -> [b, s / cp, H, d].
    Layout:   cp: sharded(s) in and out; tp: sharded(heads) in and out.
    Backward: gradients of keys and values are summed over cp, and each rank gets its own.
    """
    axis = module.images_cp
    whole_key, whole_value = (gather_scatter(one, axis, dim=2) for one in (key, value))
    mixed = nn.functional.scaled_dot_product_attention(query, whole_key, whole_value, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


class _WithProjector(nn.Module):
    """A vision model followed by a projector to the policy's width: a norm and two linear layers."""

    def __init__(self, vision: Any, width: int, seed: int) -> None:
        super().__init__()
        self.vision = vision
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = vision.config.hidden_size
            layers = {"norm": nn.LayerNorm(inputs), "fc1": nn.Linear(inputs, width), "gelu": nn.GELU()}
            self.projector = nn.Sequential(OrderedDict(layers, fc2=nn.Linear(width, width)))

    def forward(self, pixels_bchw: Tensor) -> Tensor:
        return self.projector(self.vision(pixel_values=pixels_bchw).last_hidden_state)


def _set_cp(vision: Any, axis: Axis) -> None:
    for module in vision.modules():
        if hasattr(module, "is_causal"):  # marks the attention layers of transformers
            module.images_cp = axis


def _probe_pixels(config: Any) -> Tensor:
    """[2, c, h, w] two images."""
    shape = (2, config.num_channels, config.image_size, config.image_size)
    return torch.linspace(-1, 1, torch.Size(shape).numel()).cos().view(shape)


def _shard(model: _WithProjector, axis: Axis) -> dict[str, ParameterShard]:
    if axis.size == 1:
        return {name: ParameterShard() for name, _ in model.named_parameters()}
    config = model.vision.config
    check_heads({"encoder": config.num_attention_heads}, axis)
    own_plan = getattr(config, "base_model_tp_plan", None)
    plan = {f"vision.{name}": style for name, style in (own_plan or {}).items()}
    plan = plan or plan_by_names(model, "vision.", config.model_type)
    return apply_tensor_parallel(model, plan | plan_by_names(model, "projector.", "projector"), axis)
