"""Splits of a step that change no weight, and weights that are equal."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.reduction.weights import step_weights
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.packing import fill, pack
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec

settings.register_profile("bench", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("bench")

INVARIANT = ("token", "document", "document_sum", "constant", "prompt_group", "rollout", "group_length", "raw")


def spec_of(denominator, **more):
    constant = {"denominator_constant": 5.0} if denominator == "constant" else {}
    return LossSpec(denominator=denominator, **constant, **more)


@st.composite
def documents(draw, min_size=1):
    results = []
    for _ in range(draw(st.integers(min_size, 7))):
        length = draw(st.integers(1, 9))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
        results.append({"loss_mask": mask, "group_id": draw(st.integers(0, 3)), "rollout_id": draw(st.integers(0, 3))})
    return results


def as_batch(found):
    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": [1] * len(d["loss_mask"]),
                "loss_mask": d["loss_mask"],
                "advantages": 1.0,
                "old_logprobs": [-1.0] * len(d["loss_mask"]),
                "group_id": d["group_id"],
            }
            for d in found
        ]
    )
    ids = Extension(torch.tensor([d["rollout_id"] for d in found]), "document", "rollout index", "Whose sample.")
    return replace(batch, extensions={"rollout_ids": ids})


def by_source(packed, spec, tokens, which="loss_T", name="policy"):
    """The weight of each token of the source batch, wherever a cut of the step has put it."""
    rows = [shift_targets(row) for row in packed]
    weights, _ = step_weights(rows, spec)
    result = torch.zeros(tokens, dtype=torch.float64)
    for row, named in zip(rows, weights, strict=True):
        result[row.source_T[row.loss_mask_T]] = getattr(named[name], which)[row.loss_mask_T]
    return result


@given(documents(), st.sampled_from(INVARIANT), st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_neither_ranks_nor_micro_batches_nor_their_order_nor_padding_matter(found, denominator, rows, multiple, seed):
    batch, spec = as_batch(found), spec_of(denominator)
    whole = by_source([batch], spec, batch.num_tokens)
    cut = pack(batch, rows=rows, multiple_of=multiple)
    random.Random(seed).shuffle(cut)
    assert torch.equal(by_source(cut, spec, batch.num_tokens), whole)
    filled = fill(batch, tokens=16, ranks=rows, multiple_of=multiple)
    assert torch.equal(by_source(filled, spec, batch.num_tokens), whole)


@given(documents(), st.sampled_from(INVARIANT), documents())
def test_documents_in_which_nothing_counts_do_not_matter(found, denominator, masked):
    batch, spec = as_batch(found), spec_of(denominator)
    idle = [d | {"loss_mask": [0] * len(d["loss_mask"])} for d in masked]
    more = as_batch(found + idle)
    with_idle = by_source([more], spec, more.num_tokens)
    assert torch.equal(with_idle[: batch.num_tokens], by_source([batch], spec, batch.num_tokens))
    assert not with_idle[batch.num_tokens :].any()


def test_invariants_declared_broken_are_broken():
    results = [
        {"loss_mask": [0, 1, 1, 1], "group_id": 0, "rollout_id": 0},
        {"loss_mask": [0, 1], "group_id": 0, "rollout_id": 0},
    ]
    batch = as_batch(results)
    local = spec_of("local_token")
    assert {"micro_batch", "packing", "dp"} == set(local.breaks)
    assert not torch.equal(by_source(pack(batch, rows=2), local, 6), by_source([batch], local, 6))
    counting_all = spec_of("document_sum", compat={"documents_counted": "all"})
    more = as_batch([*results, results[1] | {"loss_mask": [0, 0]}])
    assert counting_all.breaks == ("masked_rows",)
    assert not torch.equal(by_source([more], counting_all, 8)[:6], by_source([batch], counting_all, 6))


@given(documents(), st.sampled_from(INVARIANT))
def test_no_weight_is_below_zero_or_stands_where_nothing_counts(found, denominator):
    batch = as_batch(found)
    weights = by_source([batch], spec_of(denominator), batch.num_tokens)
    assert torch.equal(weights > 0, batch.loss_mask_T)
    if denominator in ("token", "document", "prompt_group", "rollout") and batch.num_trained_tokens:
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12), "a mean of means is a mean"


@given(documents(), st.sampled_from(INVARIANT), st.sampled_from([1.0, 3.0]), st.booleans())
def test_the_gradient_weight_is_the_loss_weight_over_the_divisor(found, denominator, divisor, by_documents):
    batch = as_batch(found)
    spec = spec_of(denominator, compat={"gradient_divisor": divisor, "normalize_by_documents": by_documents})
    trained = sum(any(d["loss_mask"]) for d in found)
    loss, gradient = (by_source([batch], spec, batch.num_tokens, which) for which in ("loss_T", "gradient_T"))
    assert torch.equal(loss, by_source([batch], spec_of(denominator), batch.num_tokens))
    torch.testing.assert_close(gradient * divisor * (trained if by_documents else 1), loss, rtol=1e-14, atol=0)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_with_equal_lengths_token_document_and_prompt_mean_are_one(groups, answers, length):
    batch = as_batch(
        [
            {"loss_mask": [0] + [1] * length, "group_id": g, "rollout_id": g}
            for g in range(groups)
            for _ in range(answers)
        ]
    )
    token = by_source([batch], spec_of("token"), batch.num_tokens)
    for denominator in ("document", "prompt_group", "rollout"):
        other = by_source([batch], spec_of(denominator), batch.num_tokens)
        torch.testing.assert_close(other, token, rtol=1e-15, atol=0)


@given(documents(), st.floats(0.5, 50))
def test_a_constant_and_the_token_mean_differ_by_one_factor(found, constant):
    batch = as_batch(found)
    token = by_source([batch], spec_of("token"), batch.num_tokens)
    fixed = by_source([batch], LossSpec(denominator="constant", denominator_constant=constant), batch.num_tokens)
    trained = sum(any(d["loss_mask"]) for d in found)
    factor = batch.num_trained_tokens / (max(trained, 1) * constant)
    torch.testing.assert_close(fixed, factor * token, rtol=1e-14, atol=0)


@given(documents())
def test_length_times_the_document_mean_is_the_document_sum(found):
    """LUSPO under document means is GSPO under document sums."""
    batch = as_batch(found)
    lengths = shift_targets(batch).lengths_T.roll(1)  # of the token itself, not of the position before it
    mean, total = (by_source([batch], spec_of(name), batch.num_tokens) for name in ("document", "document_sum"))
    torch.testing.assert_close(lengths * mean, total, rtol=1e-15, atol=0)
