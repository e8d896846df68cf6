"""Refusals of a step of two modules, and its metrics next to the policy's own."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.image_steps import Case, batch_of, dealt_for, modules, problem, steps_of
from workbench.errors import ShardingError, SpecError
from workbench.rollouts.batch import Extension
from workbench.sharding.bridge import Grid, GridGroups, connect
from workbench.sharding.simulated import simulate
from workbench.train import encoder_step, step

ONE = Case((1, 1, 1), (1, 1, 1), images=7)
TWO = Case((1, 1, 2), (1, 1, 2), images=7, delivery="whole")


def on_one_rank(function):
    [result] = simulate(function)
    return result


def prepared(mesh, *, change=lambda batch: batch, grid=None, images=None):
    documents, reads, pixels = problem(ONE)
    groups = GridGroups(mesh["dp"])
    grid = grid or Grid.of()
    bridge = connect(grid, Grid.of(), groups, delivery="sharded")
    encoder, policy = modules(ONE, mesh, mesh)
    batch = change(batch_of(ONE, documents, reads))
    return encoder, policy, encoder_step.prepare_image_rows(batch, pixels[:images], ONE.spec, mesh, encoder, bridge)


def test_a_batch_assigns_features_to_tokens():
    def without(batch):
        return replace(batch, extensions={})

    def at_the_target(batch):
        values = batch.extensions[encoder_step.IMAGE_FEATURES].values
        return replace(batch, extensions={encoder_step.IMAGE_FEATURES: Extension(values, "token", "", "", pad=-1)})

    for change in (without, at_the_target):
        with pytest.raises(SpecError, match="no token field 'image_features' at the input"):
            on_one_rank(lambda mesh, change=change: prepared(mesh, change=change))
    with pytest.raises(SpecError, match="feature 27, of image 6"):
        on_one_rank(lambda mesh: prepared(mesh, images=6))


def test_modules_lie_in_the_grids_of_the_bridge():
    def crosswise(mesh):
        documents, reads, pixels = problem(TWO)
        bridge = connect(Grid.of(tp=2), Grid.of(dp=2), GridGroups(mesh["dp"]), delivery="sharded")
        encoder, _ = modules(TWO, mesh, mesh)
        return encoder_step.prepare_image_rows(batch_of(TWO, documents, reads), pixels, TWO.spec, mesh, encoder, bridge)

    with pytest.raises(ShardingError, match="step over a bridge, encoder"):
        simulate(crosswise, dp=2)


def test_a_bridge_with_a_required_order_is_refused():
    case = Case((1, 1, 2), (1, 2, 1), images=7, delivery="whole", bridge_order="zigzag")
    with pytest.raises(ShardingError, match="whole images with order 'zigzag'"):
        simulate(lambda mesh: steps_of(case, mesh["dp"], problem(case)), dp=2)


def test_a_bridge_joins_the_shards_of_the_encoder():
    case = Case((1, 2, 1), (1, 1, 2), images=7, delivery="whole", source_order="zigzag")

    def otherwise(mesh):
        documents, reads, pixels = problem(case)
        groups = GridGroups(mesh["dp"])
        source, destination = Grid.of(cp=2), Grid.of(dp=2)
        bridge = connect(source, destination, groups, delivery="whole", source_order="contiguous")
        encoder, policy = modules(case, groups.mesh(source), groups.mesh(destination))
        return encoder_step.prepare_image_rows(
            batch_of(case, documents, reads),
            pixels,
            case.spec,
            policy.mesh,
            encoder,
            bridge,
            dealt_for(case, documents),
        )

    with pytest.raises(ShardingError, match="source_order 'contiguous'"):
        simulate(otherwise, dp=2)


def test_whole_images_are_dealt_in_order_or_refused():
    def dealt(mesh, rows):
        documents, reads, pixels = problem(TWO)
        bridge = connect(Grid.of(dp=2), Grid.of(dp=2), GridGroups(mesh["dp"]), delivery="whole")
        encoder, _ = modules(TWO, mesh, mesh)
        rows, _ = encoder_step.prepare_image_rows(
            batch_of(TWO, documents, reads), pixels, TWO.spec, mesh, encoder, bridge, rows or dealt_for(TWO, documents)
        )
        return len(rows[0].pixels_bchw)

    assert simulate(lambda mesh: dealt(mesh, None), dp=2) == [4, 3]
    count = len(problem(TWO)[0])
    with pytest.raises(SpecError, match=r"\[1, 6\] images"):
        simulate(lambda mesh: dealt(mesh, [[0], list(range(1, count))]), dp=2)


def test_a_step_that_reads_no_image_is_a_step_of_the_policy_alone():
    def blind(batch):
        numbers_T = torch.full_like(batch.extensions[encoder_step.IMAGE_FEATURES].values, -1)
        return replace(batch, extensions={encoder_step.IMAGE_FEATURES: encoder_step.image_features(numbers_T)})

    def both(mesh):
        encoder, policy, (rows, totals) = prepared(mesh, change=blind)
        loss = step.build_loss(ONE.spec.loss)
        with_images = encoder_step.run_image_step(encoder, policy, loss, rows, totals, keep_gradients=True)
        documents, reads, _ = problem(ONE)
        alone = step.run_step(
            policy, loss, *step.prepare_rows(batch_of(ONE, documents, reads), ONE.spec, mesh), keep_gradients=True
        )
        return with_images, alone

    with_images, alone = on_one_rank(both)
    for name, gradient in alone.gradients.items():
        assert torch.equal(with_images.gradients[name], gradient), name
    of_encoder = [gradient for name, gradient in with_images.gradients.items() if name.startswith("encoder.")]
    assert len(of_encoder) > 40
    assert not any(gradient.any() for gradient in of_encoder)


def test_norms_of_both_modules_are_reported_and_clipped_together():
    def clipped(mesh):
        encoder, policy, (rows, totals) = prepared(mesh)
        loss = step.build_loss(ONE.spec.loss)
        result = encoder_step.run_image_step(encoder, policy, loss, rows, totals)
        norm = encoder_step.clip_both(encoder, policy, result.norms, 0.5)
        after = [parameter.grad for module in (encoder, policy) for parameter in module.model.parameters()]
        return result, norm, float(torch.cat([gradient.flatten() for gradient in after]).norm())

    result, norm, after = on_one_rank(clipped)
    assert norm > 0.5
    assert after == pytest.approx(0.5, rel=1e-12)
    parts = {
        part: sum(value**2 for name, value in result.norms.items() if name.startswith(f"encoder.{part}.")) ** 0.5
        for part in ("vision", "projector")
    }
    assert {part: result.metrics[f"gradient/norm/{part}"] for part in parts} == pytest.approx(parts)
    assert not result.gradients


def test_without_metrics_there_are_none_of_the_encoder():
    def silent(mesh):
        encoder, policy, (rows, totals) = prepared(mesh)
        return encoder_step.run_image_step(encoder, policy, step.build_loss(ONE.spec.loss), rows, totals, level="none")

    assert not [key for key in on_one_rank(silent).metrics if key.startswith("gradient/")]


def test_features_stand_at_their_own_tokens_and_not_at_the_ones_that_predict_them():
    def row(mesh):
        return prepared(mesh)[2][0][0]

    local = on_one_rank(row)
    numbers = local.row.extensions[encoder_step.IMAGE_FEATURES]
    assert torch.equal(local.is_image_t, numbers >= 0)
    assert set(local.row.tokens_T[local.is_image_t].tolist()) == {0}, "documents hold token 0 in the place of an image"


def test_unread_features_have_no_gradient_and_are_no_error():
    case = Case((1, 1, 2), (1, 2, 1), images=7)
    documents, reads, pixels = problem(case)
    batch = batch_of(case, documents, reads)
    numbers_T = batch.extensions[encoder_step.IMAGE_FEATURES].values
    partly = torch.where(numbers_T % 4 == 1, -1, numbers_T)
    batch = replace(batch, extensions={encoder_step.IMAGE_FEATURES: encoder_step.image_features(partly)})

    def on(mesh, source, destination, layout):
        groups = GridGroups(mesh["dp"])
        bridge = connect(source, destination, groups, delivery="sharded", order="zigzag")
        encoder, policy = modules(case, groups.mesh(source), groups.mesh(destination))
        spec = case.spec.model_copy(update={"layout": case.spec.layout.model_copy(update=layout)})
        rows, totals = encoder_step.prepare_image_rows(batch, pixels, spec, policy.mesh, encoder, bridge)
        return encoder_step.run_image_step(
            encoder, policy, step.build_loss(spec.loss), rows, totals, keep_gradients=True
        ).gradients

    [alone] = simulate(lambda mesh: on(mesh, Grid.of(), Grid.of(), {"cp": 1}))
    cut, _ = simulate(lambda mesh: on(mesh, Grid.of(dp=2), Grid.of(cp=2), {}), dp=2)
    assert_float64_parity(cut, alone, context="partly read")
