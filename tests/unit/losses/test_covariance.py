"""Selections by covariance: against the oracle, which tokens, and that nothing is left to chance."""

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.losses import LossInputs
from workbench.losses.covariance import clip_cov, kl_cov

EVERY = {"clip_low": 0.2, "clip_high": 0.28, "cov_fraction": 1.0, "cov_low": 0.3, "cov_high": 5.0}
CASES = [
    ("clip_cov", EVERY),
    ("kl_cov", {"cov_fraction": 0.2, "cov_coefficient": 0.7}),
    ("kl_cov", {"cov_fraction": 1e-9, "cov_coefficient": 1.0}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(kind, parameters, seed):
    term, inputs = assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed)
    selected_T = term.extras["selected"]
    assert selected_T.any()
    assert not selected_T[~inputs.loss_mask_T].any()


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=6)


def test_the_share_of_candidates_is_a_count_of_trained_tokens_and_at_least_one():
    _, inputs = packed(nasty_documents(0))
    candidates = int(clip_cov(inputs, **EVERY).extras["selected"].sum())
    trained = int(inputs.loss_mask_T.sum())
    for fraction in (0.0, 2 / trained + 1e-9, 1.0):
        selected_T = clip_cov(inputs, **{**EVERY, "cov_fraction": fraction}).extras["selected"]
        assert int(selected_T.sum()) == min(candidates, max(1, int(fraction * trained)))


def test_which_candidates_depends_on_the_name_of_a_token_and_not_on_its_place():
    documents = nasty_documents(0)
    size = sum(len(document["mask"]) for document in documents) + 3
    names_T = torch.arange(100, 100 + size)
    _, inputs = packed(documents, source_T=names_T)
    few = {**EVERY, "cov_fraction": 0.1}
    selected_T = clip_cov(inputs, **few).extras["selected"]
    order_T = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    moved = LossInputs(
        **{
            name: value[order_T]
            for name, value in inputs.__dict__.items()
            if isinstance(value, torch.Tensor) and name in LossInputs.__dataclass_fields__
        }
    )
    again_T = clip_cov(moved, **few).extras["selected"]
    assert 1 < int(selected_T.sum()) < int(clip_cov(inputs, **EVERY).extras["selected"].sum())
    assert sorted(names_T[selected_T].tolist()) == sorted(moved.source_T[again_T].tolist())
    others = [clip_cov(packed(documents, source_T=names_T + shift)[1], **few).extras["selected"] for shift in (7, 19)]
    assert any(not torch.equal(selected_T, other_T) for other_T in others)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    clip_cov(packed(nasty_documents(0))[1], **EVERY)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("surrogate", [clip_cov, kl_cov])
def test_a_rank_without_trained_tokens(surrogate):
    documents = [document for document in nasty_documents(0) if not sum(document["mask"])]
    policy_T, inputs = packed(documents)
    term = surrogate(inputs)
    weighted_total(term, inputs, random_weights(documents, 0)).backward()
    assert not term.extras["selected"].any()
    assert torch.equal(policy_T.grad, torch.zeros_like(policy_T))


def test_frozen_decisions_of_clip_cov_keep_value_and_gradient():
    documents = nasty_documents(1)
    policy_T, inputs = packed(documents)
    own = clip_cov(inputs, **EVERY)
    frozen_policy_T, given = packed(documents, frozen_clip_T=own.clipped_T)
    # With other candidates the selection of its own would be another one; the frozen one stands.
    frozen = clip_cov(given, **{**EVERY, "cov_low": 0.5})
    counts_T = inputs.loss_mask_T
    assert torch.equal(own.values_T[counts_T], frozen.values_T[counts_T])
    assert torch.equal(own.extras["selected"], frozen.extras["selected"])
    for term, row, leaf in ((own, inputs, policy_T), (frozen, given, frozen_policy_T)):
        weighted_total(term, row, random_weights(documents, 1)).backward()
        assert leaf.grad.isfinite().all()
    assert torch.equal(policy_T.grad, frozen_policy_T.grad)
