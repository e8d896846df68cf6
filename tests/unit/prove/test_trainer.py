"""A trainer's loss on one rank against the same loss as a spec, what it is told, and what it may not return."""

import pytest

from tests.helpers import trainer_losses
from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.policy.model import load_policy
from workbench.prove.trainer import TrainerSubject, trainer_step
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train import step as flow


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
    found = trainer_step(policy, right.loss, rows, totals, engine=right.engine)
    assert float(found.loss["total"]) == pytest.approx(float(expected.loss["total"]), rel=1e-12)
    assert_float64_parity(found.gradients, expected.gradients, context=name)
    assert found.norms == pytest.approx(expected.norms, rel=1e-9)


def test_what_a_trainer_is_told(policy):
    told = []

    def look(batch, outputs, totals):
        told.append((batch, outputs, totals))
        return outputs.policy_logprobs_T.sum()

    _, rows, totals = prepared(policy, data={"micro_batches": 3, "multiple_of": 8})
    trainer_step(policy, look, rows, totals, engine="sum")
    assert [len(batch.tokens_T) % 8 for batch, _, _ in told] == [0, 0, 0]
    for batch, outputs, known in told:
        assert (known.tokens, known.documents, known.all_documents, known.micro_batches) == (61, 7, 9, 3)
        assert (known.dp, known.cp, known.tp) == (1, 1, 1)
        padding_T = batch.document_ids_T < 0
        assert outputs.policy_logprobs_T.requires_grad
        assert (outputs.entropy_T > 0).all(), "raw, on padding too"
        assert not (batch.loss_mask_T & padding_T).any()
    assert sum(int(batch.loss_mask_T.sum()) for batch, _, _ in told) == 61
    assert any((batch.document_ids_T < 0).any() for batch, _, _ in told)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda outputs: outputs.policy_logprobs_T[:3], r"a tensor of shape \[3\], on rank dp=0, cp=0, tp=0"),
        (lambda outputs: 3.0, r"found: 3\.0, on rank dp=0, cp=0, tp=0\n  rule: it returns one number"),
        (lambda outputs: outputs.policy_logprobs_T.sum().detach(), r"a constant, on rank .*\n.*goes backward"),
    ],
)
def test_what_is_no_number_with_a_gradient_is_refused(returned, found, policy):
    _, rows, totals = prepared(policy)
    with pytest.raises(SpecError, match=found):
        trainer_step(policy, lambda batch, outputs, totals: returned(outputs), rows, totals, engine="sum")


def test_an_engine_that_is_neither_is_refused():
    with pytest.raises(SpecError, match="sum or mean"):
        TrainerSubject(trainer_losses.token_mean, "average")


def test_a_subject_says_its_function_and_its_engine(policy):
    subject = TrainerSubject(trainer_losses.token_mean, "mean")
    assert subject.title == "token_mean (engine mean)"
    assert subject.declared == ()
    _, rows, totals = prepared(policy)
    direct = trainer_step(policy, trainer_losses.token_mean, rows, totals, engine="mean")
    assert float(subject.step(policy, rows, totals).loss["total"]) == float(direct.loss["total"])
