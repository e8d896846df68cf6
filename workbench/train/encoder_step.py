"""One optimizer step of an encoder and a policy on the same ranks, each in a layout of its own.

    images of a micro-batch -> encoder, over its dp x cp x tp -> bridge -> features at the positions of their tokens
    -> policy, over its dp x cp x tp -> loss -> backward, over the bridge too -> each module's own sum of gradients

Everything else is `workbench.train.step`. Weights are data of the whole step, so that numerator and denominator go over
the policy's dp x cp, and the gradient that reaches the encoder is already divided. The bridge completes it over the
policy's cp; what is left is one sum over the *encoder's* dp x cp.

The token field `IMAGE_FEATURES` of the batch assigns features to tokens: feature f of image i has the number i s + f.
Images are those of the step; each micro-batch encodes the images of its rows. Several documents may read one image.

Letters: N images of the step | b images of a rank | c channels | h, w pixels | s features of an image | t tokens of a
rank | D model dimension of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShardingError, SpecError
from workbench.losses.terms import Loss
from workbench.policy.encoder import Encoder
from workbench.policy.model import Policy
from workbench.policy.routers import Routes
from workbench.reduction.weights import StepTotals
from workbench.rollouts.batch import PADDING, Extension, RolloutBatch
from workbench.sharding.bridge import Bridge, Crossing
from workbench.sharding.bridge.sides import blocks, sharded
from workbench.sharding.collectives import slice_gather
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.rows import LocalRow
from workbench.train.step import StepResult

IMAGE_FEATURES = "image_features"
"""The token field with the number of the feature that replaces a token's embedding; -1: none."""

ENCODER = "encoder."
"""Prefix of the encoder's parameter names, next to the policy's."""

Deliver = Callable[[Tensor], Tensor]


def image_features(numbers_T: Tensor) -> Extension:
    """Return the field `IMAGE_FEATURES` of a batch, from the number of each token's feature."""
    return Extension(
        numbers_T.long(),
        "token",
        "feature number",
        "The feature of an image that stands in the place of the token; -1 where none does.",
        pad=PADDING,
        at="input",
    )


@dataclass(frozen=True, kw_only=True)
class ImageRow(LocalRow):
    """This rank's shard of one micro-batch with images.

    Attributes:
        encoder: this rank's shard.
        pixels_bchw: the images that this rank encodes.
        is_image_t: True for this rank's tokens whose embedding is a feature.
        deliver: maps the features that this rank computed to those of its tokens, over the bridge; None: no token of
            the micro-batch reads an image.
    """

    encoder: Encoder
    pixels_bchw: Tensor
    is_image_t: Tensor
    deliver: Deliver | None

    def hidden_states(self, policy: Policy, routes: Routes | None = None) -> Tensor:
        """[t, D] hidden states of this rank's tokens, images included, with the routes of this pass."""
        row = self.row
        embeddings_tD = policy.embeddings(row.tokens_T)
        if self.deliver is not None:
            features = (
                self.encoder.features(self.pixels_bchw)
                if len(self.pixels_bchw)
                else embeddings_tD.new_zeros(0, self.encoder.places_Rs.shape[1], embeddings_tD.shape[1])
            )
            embeddings_tD = torch.where(self.is_image_t[:, None], self.deliver(features), embeddings_tD)
        return policy.hidden_states(
            row.tokens_T, row.positions_T, self.attention, embeddings_TD=embeddings_tD, routes=routes
        )


def prepare_image_rows(
    batch: RolloutBatch,
    pixels_Nchw: Tensor,
    spec: RunSpec,
    mesh: Mesh,
    encoder: Encoder,
    bridge: Bridge,
    document_rows: Sequence[Sequence[int]] | None = None,
) -> tuple[list[ImageRow], StepTotals]:
    """Split the documents and the images of one optimizer step into this rank's micro-batches.

    Every rank sees the whole step, so no collective is needed. The images of a micro-batch are split over the
    encoder's dp ranks in order, as evenly as possible.

    Args:
        batch: the documents of the whole step, with `IMAGE_FEATURES`.
        pixels_Nchw: its images.
        spec: of the run; its layout is the policy's.
        mesh: the axes of the policy.
        encoder: this rank's shard.
        bridge: from the encoder's grid to the policy's. "sharded": each rank gets the features that its own tokens
            read, for any rows. "whole": each rank gets all features of its dp rank's rows, which must read images of
            their own, as many on each dp rank as `blocks` assigns.
        document_rows: the documents of each row, see `pack_step`.

    Raises:
        SpecError: see `workbench.train.step.prepare_rows`; a batch without the field, a feature of a missing image;
            images that a bridge of whole sequences would split otherwise.
        ShardingError: a bridge between other grids, one whose features or tokens are sharded otherwise than those of
            the modules, or one that has an order for whole images, which packed rows do not keep.
    """
    _check(batch, pixels_Nchw, spec, mesh, encoder, bridge)
    rows, totals = flow.prepare_rows(batch, spec, mesh, document_rows)
    whole = flow.pack_step(batch, spec, document_rows)
    parameter, axis, prepared = next(encoder.model.parameters()), encoder.mesh["dp"], []
    for number, local in enumerate(rows):
        row_of_dp = whole[number :: len(rows)]
        reads = [row.extensions[IMAGE_FEATURES].values for row in row_of_dp]
        if bridge.delivery.kind == "sharded":
            plans = [flow.plan_row(row.document_ids_T, spec.layout) for row in row_of_dp]
            images, is_image_t, deliver = _sharded_images(reads, plans, mesh, encoder, bridge)
        else:
            split = mesh["tp"] if spec.layout.sequence_parallel else Axis("tp")
            numbers_t = local.row.extensions[IMAGE_FEATURES]
            images, is_image_t, deliver = _whole_images(numbers_t, reads, split, mesh, encoder, bridge)
        begin, end = blocks(len(images), axis.size)[axis.rank]
        pixels_bchw = pixels_Nchw[images[begin:end]].to(parameter.device, parameter.dtype)
        prepared.append(
            ImageRow(**vars(local), encoder=encoder, pixels_bchw=pixels_bchw, is_image_t=is_image_t, deliver=deliver)
        )
    return prepared, totals


def run_image_step(
    encoder: Encoder, policy: Policy, loss: Loss, rows: Sequence[ImageRow], totals: StepTotals, **options: Any
) -> StepResult:
    """Compute loss, gradients and metrics of one optimizer step of both modules; gradients stay in ``parameter.grad``.

    ``rows`` and ``totals`` are from `prepare_image_rows`, options those of `workbench.train.step.run_step`, and so is
    the result, with the encoder's parameters next to the policy's, under the prefix `ENCODER`.
    """
    encoder.model.zero_grad(set_to_none=True)
    result = flow.run_step(policy, loss, rows, totals, **options)
    sum_gradients(encoder.model, encoder.shards, encoder.mesh)
    own, metrics = (encoder.model, encoder.shards, encoder.mesh), {}
    norms = _prefixed(gradient_norms(*own))
    gradients = _prefixed(full_gradients(*own)) if result.gradients else {}
    if options.get("level", "basic") != "none":
        for part in ("vision", "projector"):
            of_part = [norm for name, norm in norms.items() if name.startswith(f"{ENCODER}{part}.")]
            metrics[f"gradient/norm/{part}"] = sum(norm**2 for norm in of_part) ** 0.5
    return replace(
        result,
        metrics={**result.metrics, **metrics},
        norms={**result.norms, **norms},
        gradients={**result.gradients, **gradients},
    )


def clip_both(encoder: Encoder, policy: Policy, norms: Mapping[str, float], max_norm: float | None) -> float:
    """Clip the gradients of both modules to one global norm; return the norm before clipping."""
    norm = flow.clip_gradients(policy, norms, max_norm)
    scale_gradients(encoder.model, encoder.shards, flow.clip_coefficient(norm, max_norm))
    return norm


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{ENCODER}{name}": value for name, value in values.items()}


def _check(
    batch: RolloutBatch, pixels_Nchw: Tensor, spec: RunSpec, mesh: Mesh, encoder: Encoder, bridge: Bridge
) -> None:
    field = batch.extensions.get(IMAGE_FEATURES)
    if field is None or field.level != "token" or field.at != "input":
        raise SpecError(
            "a step with images",
            found=f"no token field {IMAGE_FEATURES!r} at the input",
            rule="the batch assigns features to tokens",
            fix="image_features(numbers_T)",
        )
    last = int(field.values.max())
    if last >= len(pixels_Nchw) * encoder.tokens:
        raise SpecError(
            "a step with images",
            found=f"feature {last}, of image {last // encoder.tokens}",
            rule=f"{len(pixels_Nchw)} images of {encoder.tokens} features each",
            fix="feature f of image i has the number i s + f",
        )
    for of, grid, own in (("encoder", bridge.pair.source, encoder.mesh), ("policy", bridge.pair.destination, mesh)):
        sizes = {name: own[name].size for name in ("dp", "cp", "tp")}
        if sizes != {name: grid[name] for name in sizes}:
            raise ShardingError(
                f"step over a bridge, {of}",
                found=f"a mesh of {sizes}",
                rule=f"the mesh has the sizes of the bridge's grid {grid}",
                fix="make the mesh of the bridge's grid: groups.mesh(grid)",
            )
    delivery = bridge.delivery
    if delivery.kind == "whole" and delivery.order is not None and mesh["cp"].size > 1:
        raise ShardingError(
            f"step over a bridge of whole images with order {delivery.order!r}",
            found="packed rows, split over cp at any position of their images",
            rule="an order assigns the same tokens of every image to a cp rank; in a packed row these differ by image",
            fix="connect without an order, or with delivery='sharded'",
        )
    if delivery.kind == "whole" and encoder.mesh["cp"].size > 1 and delivery.source_order != encoder.order:
        raise ShardingError(
            f"step over a bridge with source_order {delivery.source_order!r}",
            found=f"an encoder whose cp ranks hold features in order {encoder.order!r}",
            rule="the bridge joins features in the order in which the encoder splits them",
            fix="give both one order",
        )
    if delivery.kind == "sharded" and delivery.sequence_parallel != (
        spec.layout.sequence_parallel and spec.layout.tp > 1
    ):
        raise ShardingError(
            "step over a bridge of shards",
            found=f"sequence_parallel={delivery.sequence_parallel}",
            rule="each tp rank gets the tokens that its policy reads: its own part with sequence parallelism",
            fix="connect with the layout's sequence_parallel",
        )


def _sharded_images(
    reads: Sequence[Tensor], plans: Sequence[ShardPlan], mesh: Mesh, encoder: Encoder, bridge: Bridge
) -> tuple[Tensor, Tensor, Deliver | None]:
    """Images of a micro-batch, `ImageRow.is_image_t` and ``deliver``; each rank gets the features that its tokens read.

    ``reads``, the feature numbers of the tokens, and ``plans`` are by dp rank.
    """
    tp, size = mesh["tp"], encoder.tokens
    needed = torch.unique(torch.cat([numbers_T[numbers_T >= 0] for numbers_T in reads]))
    images = torch.unique(needed // size)
    parts_over_tp = tp.size if bridge.delivery.sequence_parallel else 1

    def read(dp: int, cp: int, at: int) -> Tensor:
        return plans[dp].split(reads[dp], cp).chunk(parts_over_tp)[at]

    own_t = read(mesh["dp"].rank, mesh["cp"].rank, tp.rank if parts_over_tp > 1 else 0).to(mesh.device)
    if not len(images):
        return images, own_t >= 0, None
    parts = blocks(len(images), encoder.mesh["dp"].size)

    def sent(dp: int, cp: int, _: int) -> Tensor:
        tokens = (images[slice(*parts[dp])][:, None] * size + encoder.places_Rs[cp]).flatten()
        return torch.where(torch.isin(tokens, needed), tokens, PADDING)  # features without a reader are not sent

    crossing = Crossing.make(
        sharded(bridge.pair.source, sent),
        sharded(bridge.pair.destination, read, over_tp=bridge.delivery.sequence_parallel),
    )
    return images, own_t >= 0, lambda features: crossing.cross(features.flatten(0, 1), bridge.all_ranks)


def _whole_images(
    numbers_t: Tensor, reads: Sequence[Tensor], split: Axis, mesh: Mesh, encoder: Encoder, bridge: Bridge
) -> tuple[Tensor, Tensor, Deliver | None]:
    """As `_sharded_images`, but each rank gets all features of its dp rank's rows, and selects those that it reads.

    ``numbers_t`` are the feature numbers of this micro-batch's tokens, ``split`` the tp ranks that share these.
    """
    size = encoder.tokens
    of_dp = [torch.unique(numbers_T[numbers_T >= 0] // size) for numbers_T in reads]
    images, counts = torch.cat(of_dp), [len(one) for one in of_dp]
    dealt = [end - begin for begin, end in blocks(len(images), len(of_dp))]
    if counts != dealt:
        raise SpecError(
            "a bridge that delivers whole images",
            found=f"{counts} images read by the rows of each dp rank",
            rule=f"images are split in order, {dealt}",
            fix="deal the documents accordingly, or connect with delivery='sharded'",
        )
    is_image_t = numbers_t >= 0
    own = of_dp[mesh["dp"].rank].to(mesh.device)
    image_t = torch.searchsorted(own, (numbers_t // size).clamp_min(0)).clamp_max(max(len(own) - 1, 0))
    place_t = torch.where(is_image_t, image_t * size + numbers_t % size, 0)
    samples = [end - begin for begin, end in blocks(len(images), encoder.mesh["dp"].size)]

    def deliver(features: Tensor) -> Tensor:
        features_tD = bridge.cross(features, samples).flatten(0, 1)
        taken_tD = (
            features_tD.index_select(0, place_t)
            if len(features_tD)
            else features_tD.sum() + features_tD.new_zeros(len(place_t), features.shape[2])
        )
        return slice_gather(taken_tD, split, dim=0)

    return images, is_image_t.chunk(split.size)[split.rank], deliver if len(images) else None
