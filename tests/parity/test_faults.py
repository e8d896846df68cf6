"""Faults in real processes turn parity with the oracle red, with the factor that their description states.

All of them, on simulated ranks: `tests/faults/test_zoo.py`. What a fault needs to be seen (two micro-batches, a loss on
whole documents) is its case; without it the fault is silent, which is a test too.
"""

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity import sequence_cases
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import documents_near, oracle

NEEDS = {"micro_batch_denominator": {"data": {"micro_batches": 2}}}
"""Settings without which a fault cannot be seen."""
TOKEN_LEVEL = ["local_denominator", "micro_batch_denominator", "missing_cp_factor", "shift_after_shard"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The oracle's gradients, and those of each fault at cp=2, both orders."""
    documents = documents_near(11)
    cases = {
        (fault, order): (settings(LAYOUTS[f"cp2_{order}"], faults=[fault], **NEEDS.get(fault, {})), documents)
        for fault in TOKEN_LEVEL
        for order in ("contiguous", "zigzag")
    }
    result = run_ranks(many_steps, 2, tmp_path_factory.mktemp("faults"), list(cases.values()))[0]
    return documents, oracle(documents), dict(zip(cases, result, strict=True))


@pytest.mark.parametrize("fault", TOKEN_LEVEL)
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_fault_breaks_parity(fault, order, answers):
    _, (_, expected, _), result = answers
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(result[fault, order]["gradients"], expected, context=fault)


def test_a_missing_adjoint_of_a_document_sum_affects_only_document_losses(tmp_path):
    truth = sequence_cases.Oracle(11)
    layout, fault = LAYOUTS["cp2_contiguous"], ["document_sum_without_adjoint"]
    chosen = [sequence_cases.LOSSES["gspo"], sequence_cases.DENOMINATORS["token"]]
    cases = [(sequence_cases.settings(layout, case, faults=fault), truth.documents) for case in chosen]
    sequence, token = run_ranks(many_steps, 2, tmp_path, cases)[0]
    (loss, expected), (_, unharmed) = (truth(case) for case in chosen)
    assert sequence["loss"] == pytest.approx(loss, rel=1e-12)
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(sequence["gradients"], expected, context="gspo")
    assert_float64_parity(token["gradients"], unharmed, context="a token-level loss")


def test_token_counts_of_micro_batches_make_a_mean_of_means(answers):
    """Micro-batches of at most 48 tokens until the step has its documents; tokens counted in each, documents in all."""
    documents, _, _ = answers
    size = {"data": {"micro_batch_tokens": 48}}
    by_tokens, by_documents = ({"denominator": name} | size for name in ("token", "document"))
    right = one_step(settings({}, **by_tokens), documents)
    broken = one_step(settings({}, **by_tokens, faults=["micro_batch_denominator"]), documents)
    _, expected, _ = oracle(documents)
    assert_float64_parity(right["gradients"], expected, context="counts of the whole step")
    with pytest.raises(AssertionError, match="parameters differ"):
        assert_float64_parity(broken["gradients"], expected, context="tokens of each micro-batch")
    ratio = (
        sum(g.square().sum() for g in broken["gradients"].values())
        / sum(g.square().sum() for g in right["gradients"].values())
    ) ** 0.5
    assert 1.5 < float(ratio) < 4, "three micro-batches"
    silent = one_step(settings({}, **by_documents, faults=["micro_batch_denominator"]), documents)
    unharmed = one_step(settings({}, **by_documents), documents)
    assert_float64_parity(silent["gradients"], unharmed["gradients"], context="documents were counted over the step")


def test_missing_cp_factor_halves_every_gradient_and_not_the_loss(answers):
    _, (loss, expected, _), result = answers
    broken = result["missing_cp_factor", "zigzag"]
    assert broken["loss"] == pytest.approx(loss, rel=1e-12)
    doubled = {name: 2 * g for name, g in broken["gradients"].items()}
    assert_float64_parity(doubled, expected, context="twice the faulty gradient")


def test_local_denominator_is_too_big_and_tilted(answers):
    _, (_, expected, _), result = answers
    broken = torch.cat([g.flatten() for g in result["local_denominator", "contiguous"]["gradients"].values()])
    right = torch.cat([g.flatten() for g in expected.values()])
    ratio = float(broken.norm() / right.norm())
    cosine = float(torch.nn.functional.cosine_similarity(broken, right, dim=0))
    assert 1.5 < ratio < 3.5
    assert cosine < 0.9999


@pytest.mark.parametrize(("order", "edges"), [("contiguous", 1), ("zigzag", 2)])
def test_shift_after_shard_loses_or_changes_the_targets_at_shard_edges_only(order, edges, answers):
    documents, _, result = answers
    tokens = torch.tensor([t for d in documents for t in d["tokens"]])
    trained = torch.tensor([m for d in documents for m in d["loss_mask"]]).bool()
    kept = result["shift_after_shard", order]["tokens"]
    wrong = (trained & ~kept["trained"]) | (kept["trained"] & (kept["targets"] != tokens))
    assert 1 <= int(wrong.sum()) <= edges
