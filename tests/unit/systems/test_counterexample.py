"""Batches that tell losses apart have the promised shapes, and never change."""

import pytest
import torch

from workbench.reduction.evaluate import CORRECTION_WEIGHTS
from workbench.specs.losses import LossSpec
from workbench.systems.counterexample import Outcome, adversarial_logits, adversarial_row, outcome, relative_distance

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_is_nasty(seed):
    row, text = adversarial_row(seed)
    again, _ = adversarial_row(seed)
    assert torch.equal(row.old_logprobs_T, again.old_logprobs_T)
    trained = torch.bincount(row.document_ids_T, weights=row.loss_mask_T.double())
    assert trained[1] == 0
    assert trained.unique().numel() > 2
    advantages = row.advantages_T[row.loss_mask_T]
    assert (advantages > 0).any()
    assert (advantages < 0).any()
    for values_T in (text.logprobs_T, row.old_logprobs_T, row.sampler_logprobs_T, row.ref_logprobs_T):
        assert (values_T < 0).all()
        assert (text.logprobs_T - values_T).abs().max() < 20
    assert row.extensions.keys() == {CORRECTION_WEIGHTS, "truncated", "group_tokens"}


def test_over_all_batches_there_is_one_of_every_kind():
    rows = [adversarial_row(seed) for seed in SEEDS]
    moved = [(text.logprobs_T - row.old_logprobs_T)[row.loss_mask_T] for row, text in rows]
    assert sum(bool((d > 11).any()) for d in moved) == sum(bool((d < -11).any()) for d in moved) == 3
    assert any((row.advantages_T[row.loss_mask_T][d < -11] < 0).any() for (row, _), d in zip(rows, moved, strict=True))
    constant = [
        all(row.advantages_T[row.document_ids_T == d].unique().numel() == 1 for d in row.document_ids_T.unique())
        for row, _ in rows
    ]
    assert sum(constant) == 8
    holes = [
        (row.document_ids_T[1:] == row.document_ids_T[:-1]) & ~row.loss_mask_T[1:] & row.loss_mask_T[:-1]
        for row, _ in rows
    ]
    assert sum(bool(h.any()) for h in holes) > 20


def test_rewards_of_documents_are_1_or_minus_a_half_and_the_same_for_ever():
    rows = [adversarial_row(seed)[0] for seed in SEEDS]
    assert {reward for row in rows for reward in row.rewards_T.tolist()} == {1.0, -0.5}
    first = rows[0]
    assert [
        first.rewards_T[first.document_ids_T == number].unique().tolist()
        for number in range(int(first.document_ids_T.max()) + 1)
    ] == [[-0.5], [-0.5], [-0.5], [1.0], [1.0], [1.0]]


def test_an_outcome_is_the_evaluators():
    spec = LossSpec(name="reinforce", entropy_coefficient=0.5)
    row, text = adversarial_row(3)
    result = outcome(spec, 3)
    mask_T, count = row.loss_mask_T, row.loss_mask_T.sum()
    expected = -(row.advantages_T * text.logprobs_T + 0.5 * text.entropy_T)[mask_T].sum() / count
    assert result.loss == pytest.approx(float(expected), rel=1e-12)
    by_logprob, by_entropy, *others = result.gradient_S.chunk(5)
    torch.testing.assert_close(by_logprob, torch.where(mask_T, -row.advantages_T, 0.0) / count)
    torch.testing.assert_close(by_entropy, torch.where(mask_T, -0.5, 0.0).double() / count)
    assert not torch.cat(others).any()
    assert result.gradient_norm == pytest.approx(float(result.gradient_S.norm()))


def test_logits_give_the_same_log_probabilities_at_temperature_one_only():
    spec = LossSpec(name="ppo")
    for seed in (0, 4):
        assert outcome(spec, seed, 1.0).loss == pytest.approx(outcome(spec, seed).loss, rel=1e-10)
        assert abs(outcome(spec, seed, 0.7).loss - outcome(spec, seed).loss) > 1e-3
    logits = adversarial_logits(torch.tensor([-0.5, -2.0]).double())
    assert logits.log_softmax(1)[:, 0].tolist() == pytest.approx([-0.5, -2.0])
    assert logits.exp().sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_distance_is_relative_and_sees_one_element():
    one = Outcome(2.0, torch.tensor([1.0, -1e-3, 0.0]).double())
    assert relative_distance(one, one) == (0.0, 0.0)
    assert relative_distance(one, Outcome(2.0 + 2e-6, one.gradient_S))[0] == pytest.approx(1e-6, rel=1e-3)
    moved = Outcome(2.0, torch.tensor([1.0, -1e-3 - 1e-6, 0.0]).double())
    assert relative_distance(one, moved)[1] == pytest.approx(1e-3, rel=1e-2)
    rounding = Outcome(2.0, torch.tensor([1.0, -1e-3, 1e-17]).double())
    assert relative_distance(one, rounding)[1] < 1e-10
    assert relative_distance(one, Outcome(float("nan"), one.gradient_S))[0] == 1.0
    nothing = Outcome(float("nan"), one.gradient_S)
    assert relative_distance(nothing, nothing) == (0.0, 0.0)
