"""Subjects of a proof: the workbench's own step, a trainer's loss against the same loss as a spec, and float64."""

import pytest
import torch

from tests.helpers import trainer_losses
from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.terms import Term
from workbench.policy.model import load_policy
from workbench.prove import prove
from workbench.prove.arrangement import one_rank_policy, one_row, perform
from workbench.prove.documents import draw_documents
from workbench.prove.subject import InFloat64, TrainerSubject, WorkbenchSubject
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train import step as flow


def plain(inputs):
    return {"policy": Term(-(inputs.log_ratio().exp() * inputs.counted_advantages_T))}


def test_a_step_measures_every_metric_that_its_spec_allows():
    documents = draw_documents("2", one_rank_policy())
    bounded = RunSpec(loss={"name": "ppo"})
    whole = perform(WorkbenchSubject("ppo", bounded, build_loss(bounded.loss)), one_row(documents))
    own = perform(WorkbenchSubject("plain", RunSpec(), plain, from_spec=False), one_row(documents))
    assert len(whole.metrics) > len(own.metrics) > 40
    assert "clip/policy/fraction" in whole.metrics.keys() - own.metrics.keys(), "no clip, and no metric of one"
    same = RunSpec(loss={"name": "importance_sampling"})
    named = perform(WorkbenchSubject("same", same, build_loss(same.loss)), one_row(documents))
    assert named.loss == pytest.approx(own.loss, rel=1e-13)
    for name, gradient in own.gradients.items():
        torch.testing.assert_close(named.gradients[name], gradient, rtol=0, atol=1e-13)


def test_declares_what_its_spec_declares():
    spec = RunSpec(loss={"name": "bnpo"})
    assert WorkbenchSubject("bnpo", spec, build_loss(spec.loss)).declared == ("micro_batch", "packing", "dp")


THIRD = torch.tensor([1 / 3], dtype=torch.float64)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.sum(dtype=torch.float32)[None],
        lambda x: x.type(torch.float32),
        lambda x: torch.tensor([1 / 3]),
        lambda x: torch.full((1,), 1 / 3),
        lambda x: torch.zeros(1) + x,
    ],
)
def test_a_cast_keeps_every_digit(cast):
    with InFloat64():
        result = cast(THIRD)
    assert result.dtype is torch.float64
    assert torch.equal(result, THIRD)


def test_non_float_tensors_are_unchanged():
    with InFloat64():
        assert torch.zeros(2, dtype=torch.int64).dtype is torch.int64
        assert torch.arange(3).dtype is torch.int64
        assert (THIRD > 0).long().dtype is torch.int64
    assert THIRD.float().dtype is torch.float32, "outside of it nothing changes"


def casting(batch, outputs, totals):
    """Right, in float32."""
    mask_T = batch.loss_mask_T.float()
    log_ratio_T = (outputs.policy_logprobs_T.float() - batch.old_logprobs_T.float()) * mask_T
    values_T = -log_ratio_T.exp() * batch.advantages_T.float()
    sums_N = torch.zeros(totals.all_documents + 1).index_add(0, batch.document_ids_T + 1, values_T * mask_T)
    return sums_N.sum() / totals.tokens


def casting_tokens(inputs):
    return {"policy": Term(-inputs.log_ratio().float().exp() * inputs.counted_advantages_T.float())}


@pytest.mark.parametrize(("loss", "engine"), [(casting, "sum"), (casting_tokens, None)])
def test_a_loss_that_casts_is_not_refuted(loss, engine):
    proof = prove(loss, engine=engine, invariants=["dp_split", "cp_degree", "padding"], rounds=1, budget_s=60)
    assert proof.ok, proof


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny-qwen3", precision="float64")


def prepared(policy, **settings):
    spec = RunSpec.model_validate({"precision": "float64"} | settings)
    rows, totals = flow.prepare_rows(RolloutBatch.from_documents(nasty_documents(4)), spec, policy.mesh)
    return spec, rows, totals


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SPECS = {
    "token mean, sum": {"surrogate": CLIP},
    "document mean": {"surrogate": CLIP, "denominator": "document"},
    "constant length": {"surrogate": CLIP, "denominator": "constant", "denominator_constant": 16},
    "kl and entropy": {"surrogate": CLIP, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01},
    "gspo": {"name": "gspo", "surrogate": {"clip_low": 0.1, "clip_high": 0.1}},
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_a_right_loss_is_that_of_a_spec(name, micro_batches, policy):
    spec, rows, totals = prepared(policy, loss=SPECS[name], data={"micro_batches": micro_batches})
    expected = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, keep_gradients=True)
    right = trainer_losses.RIGHT[name]
    result = TrainerSubject(right.loss, right.engine).step(policy, rows, totals)
    assert float(result.loss["total"]) == pytest.approx(float(expected.loss["total"]), rel=1e-12)
    assert_float64_parity(result.gradients, expected.gradients, context=name)
    assert result.norms == pytest.approx(expected.norms, rel=1e-9)


def test_inputs_of_a_trainers_function(policy):
    reports = []

    def look(batch, outputs, totals):
        reports.append((batch, outputs, totals))
        return outputs.policy_logprobs_T.sum()

    _, rows, totals = prepared(policy, data={"micro_batches": 3, "multiple_of": 8})
    TrainerSubject(look, "sum").step(policy, rows, totals)
    assert [len(batch.tokens_T) % 8 for batch, _, _ in reports] == [0, 0, 0]
    for batch, outputs, known in reports:
        assert (known.tokens, known.documents, known.all_documents, known.micro_batches) == (61, 7, 9, 3)
        assert (known.dp, known.cp, known.tp) == (1, 1, 1)
        padding_T = batch.document_ids_T < 0
        assert outputs.policy_logprobs_T.requires_grad
        assert (outputs.entropy_T > 0).all(), "raw, on padding too"
        assert not (batch.loss_mask_T & padding_T).any()
    assert sum(int(batch.loss_mask_T.sum()) for batch, _, _ in reports) == 61
    assert any((batch.document_ids_T < 0).any() for batch, _, _ in reports)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda outputs: outputs.policy_logprobs_T[:3], r"a tensor of shape \[3\], on rank dp=0, cp=0, tp=0"),
        (lambda outputs: 3.0, r"found: 3\.0, on rank dp=0, cp=0, tp=0\n  rule: it returns one number"),
        (lambda outputs: outputs.policy_logprobs_T.sum().detach(), r"a constant, on rank .*\n.*runs backward"),
    ],
)
def test_a_nan_with_a_gradient_is_refused(returned, found, policy):
    _, rows, totals = prepared(policy)
    with pytest.raises(SpecError, match=found):
        TrainerSubject(lambda batch, outputs, totals: returned(outputs), "sum").step(policy, rows, totals)


def test_an_engine_that_is_neither_is_refused():
    with pytest.raises(SpecError, match="sum or mean"):
        TrainerSubject(trainer_losses.token_mean, "average")


def test_a_subject_names_its_function_and_engine():
    subject = TrainerSubject(trainer_losses.token_mean, "mean")
    assert subject.title == "token_mean (engine mean)"
    assert subject.declared == ()
