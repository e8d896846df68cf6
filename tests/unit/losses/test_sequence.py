"""One ratio a document: against the oracle, with documents that are empty, of one token, or in several turns."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.losses import DocumentSums, LossInputs
from workbench.losses.build import SURROGATES
from workbench.losses.sequence import gmpo

TIGHT = {"clip_low": 0.1, "clip_high": 0.15}
SHAPE = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
CASES = [
    ("gspo", TIGHT),
    ("gspo", {**TIGHT, "dual_clip": 1.5}),
    ("gspo", {**TIGHT, "level": "segment"}),
    ("gspo", {**TIGHT, "advantage_level": "document"}),
    ("gspo", {**TIGHT, "anchor": "sampler"}),
    ("gspo", {**TIGHT, "delta": 1.4}),
    ("gspo", {**TIGHT, "delta": 1.05}),
    ("luspo", {**TIGHT, "delta": 1.4}),
    ("gspo_token", TIGHT),
    ("gspo_token", {**TIGHT, "level": "segment", "dual_clip": 1.5}),
    ("gspo_token", {**TIGHT, "clip_high": 4.0, "log_cap": 0.1}),
    ("luspo", TIGHT),
    ("luspo", {**TIGHT, "advantage_level": "document"}),
    ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.3, "anchor": "sampler"}),
    ("vespo", SHAPE),
    ("vespo", {**SHAPE, "anchor": "sampler"}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("advantages", ["tokens", "documents"])
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(kind, parameters, advantages, seed):
    assert_is_the_oracle(kind, parameters, nasty_documents(seed, advantages=advantages), seed=seed)


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=4)


@pytest.mark.parametrize(
    ("kind", "parameters", "asked"),
    [
        ("gspo", {}, ["document"]),
        ("gspo_token", {}, ["document"]),
        ("luspo", {}, ["document"]),
        ("gmpo", {}, ["document"]),
        ("vespo", {}, ["document"]),
        ("gspo", {"level": "segment"}, ["segment"] * 2),
    ],
)
def test_sums_across_ranks_use_the_given_function(kind, parameters, asked):
    documents = nasty_documents(0)
    _, plain = packed(documents)
    local, requested = DocumentSums(plain.document_ids_T, plain.loss_mask_T), []

    def record(kind, values_T):
        requested.append(kind)
        return getattr(local, kind)(values_T)

    sums = replace(local, instead=record)
    lengths_T = plain.document_lengths_T
    _, inputs = packed(documents, sums=sums, lengths_T=lengths_T)
    values_T = SURROGATES[kind](inputs, **parameters).values_T
    assert requested == asked  # every rank must make the same calls, so their number is part of the contract
    torch.testing.assert_close(values_T, SURROGATES[kind](plain, **parameters).values_T, equal_nan=True)


def gradient(kind, documents, weights, **parameters):
    policy_T, inputs = packed(documents)
    term = SURROGATES[kind](inputs, **parameters)
    total = weighted_total(term, inputs, weights)
    total.backward()
    return total.item(), policy_T.grad


def constant_in_documents(documents, values):
    return [[value] * len(document["mask"]) for document, value in zip(documents, values, strict=True)]


@pytest.mark.parametrize("level", ["document", "segment"])
def test_gspo_token_is_gspo_where_weights_and_advantages_are_constant_in_a_document(level):
    documents = nasty_documents(7, low=0.5, high=2.0, advantages="documents")
    weights = constant_in_documents(documents, [0.3 + 0.1 * d for d in range(len(documents))])
    (_, theirs_T), (_, mine_T) = (
        gradient(kind, documents, weights, level=level, **TIGHT) for kind in ("gspo", "gspo_token")
    )
    assert mine_T.abs().max() > 0.1
    torch.testing.assert_close(mine_T, theirs_T, rtol=1e-12, atol=1e-14)


def test_gspo_token_is_not_gspo_where_advantages_vary():
    documents = nasty_documents(7, low=0.5, high=2.0, advantages="tokens")
    weights = constant_in_documents(documents, [1.0] * len(documents))
    (_, theirs_T), (_, mine_T) = (gradient(kind, documents, weights, **TIGHT) for kind in ("gspo", "gspo_token"))
    assert (mine_T - theirs_T).abs().max() > 0.1


def test_a_document_without_trained_tokens_and_padding_change_nothing():
    documents = nasty_documents(3)
    weights = random_weights(documents, 3)
    kept = [d for d, document in enumerate(documents) if sum(document["mask"])]
    for kind, parameters in CASES:
        with_T = gradient(kind, documents, weights, **parameters)
        without_T = gradient(kind, [documents[d] for d in kept], [weights[d] for d in kept], **parameters)
        assert with_T[0] == pytest.approx(without_T[0], rel=1e-14)


def test_one_document_that_overflows_does_not_touch_another():
    documents = nasty_documents(0, low=0.9, high=1.1, advantages="documents", rubbish=False)
    documents[0]["old"] = [-900.0] * len(documents[0]["old"])  # its ratio overflows, and it is clipped
    documents[0]["advantages"] = [1.0] * len(documents[0]["old"])
    for kind in ("gspo", "luspo", "gmpo", "gspo_token"):
        _, grad_T = gradient(kind, documents, random_weights(documents, 0))
        assert grad_T.isfinite().all(), kind
        assert (grad_T[:7] == 0).all(), kind
        assert grad_T.abs().max() > 0, kind


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [
        (0.4 - 1e-12, 1.0, False),
        (0.4 + 1e-12, 1.0, True),
        (0.4 + 1e-12, -1.0, False),
        (-0.3 + 1e-12, -1.0, False),
        (-0.3 - 1e-12, -1.0, True),
        (-0.3 - 1e-12, 1.0, False),
    ],
)
def test_gmpo_cuts_at_a_length_of_the_log_ratio(log_ratio, advantage, clipped):
    policy_T = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    zero_T = torch.zeros(1, dtype=torch.float64)
    term = gmpo(LossInputs(policy_T, zero_T, torch.full_like(zero_T, advantage)), clip_low=0.3, clip_high=0.4)
    term.values_T.sum().backward()
    assert bool(term.clipped_T) == clipped
    assert (policy_T.grad.item() == 0.0) == clipped


def test_frozen_decisions_of_gmpo_replace_its_own():
    documents = nasty_documents(2, low=0.3, high=3.0)
    own = SURROGATES["gmpo"](packed(documents)[1])
    assert own.clipped_T.any()
    for frozen_T in (own.clipped_T, torch.zeros_like(own.clipped_T)):
        term = SURROGATES["gmpo"](packed(documents, frozen_clip_T=frozen_T)[1])
        counts_T = packed(documents)[1].loss_mask_T
        same = torch.equal(term.values_T[counts_T], own.values_T[counts_T])
        assert same == bool(frozen_T.any())


def test_a_correction_is_a_factor_of_vespos_whole_weight():
    documents = nasty_documents(3, low=0.8, high=1.25, rubbish=False)
    _, inputs = packed(documents)
    moved = [{**d, "old": [old - 0.3 / max(1, sum(d["mask"])) for old in d["old"]]} for d in documents]
    _, shifted = packed(moved)
    expected = SURROGATES["vespo"](shifted, **SHAPE).extras["sequence_weight"]
    result = SURROGATES["vespo"](inputs, **SHAPE, log_correction_T=torch.full_like(inputs.advantages_T, 0.3))
    counts_T = inputs.loss_mask_T
    torch.testing.assert_close(result.extras["sequence_weight"][counts_T], expected[counts_T], rtol=1e-12, atol=0)
    assert not torch.equal(result.values_T[counts_T], SURROGATES["vespo"](inputs, **SHAPE).values_T[counts_T])


def test_a_gamma_weight_that_overflows_is_none():
    far_T = torch.full((1,), 10.0, dtype=torch.float64)
    term = SURROGATES["vespo"](LossInputs(far_T - 20, far_T - 30, far_T), k_positive=90.0, lambda_positive=1e-4)
    assert term.values_T.tolist() == [0.0]
