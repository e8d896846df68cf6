"""Behaviour of the step beyond its numbers, which tests/parity compares with the oracle."""

import weakref

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.losses import Term
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.gradients import gradient_norms
from workbench.specs.run import RunSpec
from workbench.train import step as flow


def fixture(**settings):
    spec = RunSpec.model_validate({"model": {"source": "tiny-qwen3"}, "precision": "float64"} | settings)
    return spec, RolloutBatch.from_documents(nasty_documents(4)), load_policy("tiny-qwen3", precision="float64")


def test_a_step_without_trained_tokens_gives_zeros_and_not_nothing():
    spec, _, policy = fixture()
    untrained = RolloutBatch.from_documents([d | {"loss_mask": [0] * len(d["tokens"])} for d in nasty_documents(4)])
    rows, totals = flow.prepare_rows(untrained, spec, policy.mesh)
    result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
    assert float(result.loss["total"]) == 0.0
    assert totals.tokens == 0
    assert all(p.grad is not None and not p.grad.any() for p in policy.model.parameters())


def test_a_loss_written_on_the_spot_is_the_same_kind_of_object():
    spec, batch, policy = fixture()

    def reinforce(inputs):
        return {"policy": Term(-inputs.advantages_T * inputs.policy_logprobs_T)}

    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, reinforce, rows, totals, num_source=batch.num_tokens)
    kept = result.tokens["trained"]
    expected = -(batch.advantages_T[kept].double() * result.tokens["policy_logprobs"][kept]).sum() / kept.sum()
    assert float(result.loss["total"]) == pytest.approx(float(expected), rel=1e-12)


def test_metrics_see_the_old_policy_that_the_loss_sees():
    results = {}
    for old_policy in ("recorded", "current"):
        spec, batch, policy = fixture(loss={"old_policy": old_policy})
        rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
        result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, loss_spec=spec.loss)
        results[old_policy] = result.metrics["ratio/policy_old/max"]
    assert results["current"] == 1.0
    assert results["recorded"] > 1.1


def test_uncounted_outputs_of_the_policy_reach_no_gradient():
    spec = RunSpec(loss={"kl": {"coefficient": 0.1}})
    policy = load_policy("tiny-qwen3", temperature=0.001)  # log-probabilities of -1000s: exp overflows float32
    nothing = RolloutBatch.from_documents([d | {"loss_mask": [0] * len(d["tokens"])} for d in nasty_documents(4)])
    rows, totals = flow.prepare_rows(nothing, spec, policy.mesh)
    flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
    assert all(not p.grad.any() and torch.isfinite(p.grad).all() for p in policy.model.parameters())


def test_clipping_scales_every_gradient_by_the_whole_norm():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
    before = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    norm = flow.clip_gradients(policy, result.norms, float(before.norm()) / 4)
    after = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert norm == pytest.approx(float(before.norm()), rel=1e-12)
    torch.testing.assert_close(after, before / 4)
    assert flow.clip_gradients(policy, result.norms, None) == norm


@pytest.mark.parametrize(
    ("norm", "most", "expected"),
    [(10.0, 0.3, 0.03), (0.3, 0.3, 1.0), (0.1, 0.3, 1.0), (0.0, 0.3, 1.0), (10.0, None, 1.0)],
)
def test_the_clip_coefficient_is_the_factor_of_the_gradients(norm, most, expected):
    assert flow.clip_coefficient(norm, most) == pytest.approx(expected, rel=1e-15)


def test_clipping_never_scales_up():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
    before = [p.grad.clone() for p in policy.model.parameters()]
    norm = flow.clip_gradients(policy, result.norms, 1e6)
    assert norm < 1e6
    assert all(torch.equal(p.grad, b) for p, b in zip(policy.model.parameters(), before, strict=True))


def test_a_step_forgets_the_gradients_of_the_one_before():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    first, second = (
        flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, keep_gradients=True).gradients for _ in range(2)
    )
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=0, atol=1e-13)


class Marked(torch.autograd.Function):
    """Passes hidden states on, and keeps an object as long as the graph is kept."""

    @staticmethod
    def forward(ctx, hidden_TD, kept):
        ctx.kept = kept
        return hidden_TD.clone()

    @staticmethod
    def backward(ctx, gradient_TD):
        return gradient_TD, None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"entropy_coefficient": 0.1, "kl": {"coefficient": 0.1}}])
def test_the_graph_is_freed_before_the_host_waits_for_the_norms(monkeypatch, fused, settings):
    spec, batch, _ = fixture(loss=settings, data={"micro_batches": 2})
    policy = load_policy("tiny-qwen3", precision="float64", fused_loss=fused)
    forward, graphs, alive = policy.hidden_states, [], []

    def hidden_states(*inputs, **options):
        kept = type("Kept", (), {})()
        graphs.append(weakref.ref(kept))
        return Marked.apply(forward(*inputs, **options), kept)

    def norms(*inputs):
        alive.extend(graph() is not None for graph in graphs)
        return gradient_norms(*inputs)

    monkeypatch.setattr(policy, "hidden_states", hidden_states)
    monkeypatch.setattr(flow, "gradient_norms", norms)
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, level="full", loss_spec=spec.loss, fused=fused)
    assert alive == [False, False]


def test_a_runs_own_clip_decision_is_recorded_next_to_the_applied_one():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    loss = flow.build_loss(spec.loss)
    free = flow.run_step(policy, loss, rows, totals, num_source=batch.num_tokens).tokens
    opposite = ~free["clipped"] & free["trained"]
    frozen = flow.run_step(policy, loss, rows, totals, num_source=batch.num_tokens, frozen_clip_S=opposite).tokens
    assert free["clipped"].any()
    assert torch.equal(free["would_clip"], free["clipped"])
    assert torch.equal(frozen["clipped"], opposite)
    assert torch.equal(frozen["would_clip"], free["clipped"])


def grouped():
    """The nasty documents in groups of three, with rewards."""
    return RolloutBatch.from_documents(
        [d | {"group_id": number // 3, "reward": float(number)} for number, d in enumerate(nasty_documents(4))]
    )


def test_a_loss_sees_the_whole_document_that_a_token_belongs_to():
    spec, _, policy = fixture()
    batch, seen = grouped(), []

    def look(inputs):
        seen.append(inputs)
        return {"policy": Term(inputs.policy_logprobs_T)}

    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    flow.run_step(policy, look, rows, totals)
    (inputs,) = seen
    trained = inputs.loss_mask_T
    document = batch.document_ids_T[inputs.source_T[trained]]
    assert int(trained.sum()) == batch.num_trained_tokens
    counts = torch.bincount(batch.document_ids_T[batch.loss_mask_T], minlength=batch.num_documents)
    assert inputs.lengths_T[trained].tolist() == counts[document].tolist()
    assert inputs.rewards_T[trained].tolist() == batch.rewards_N[document].tolist()
    assert inputs.group_ids_T[trained].tolist() == batch.group_ids_N[document].tolist()
    means = inputs.document_mean(inputs.advantages_T)[trained]
    expected = [
        float(batch.advantages_T[(batch.document_ids_T == d) & batch.loss_mask_T].double().mean()) for d in document
    ]
    assert means.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_may_be_divided_by_the_documents_again():
    spec, batch, policy = fixture(loss={"denominator": "document_sum"})
    twice, _, _ = fixture(loss={"denominator": "document_sum", "compat": {"normalize_by_documents": True}})
    results = []
    for chosen in (spec, twice):
        rows, totals = flow.prepare_rows(batch, chosen, policy.mesh)
        results.append(flow.run_step(policy, flow.build_loss(chosen.loss), rows, totals, keep_gradients=True))
    plain, divided = results
    assert float(divided.loss["total"]) == float(plain.loss["total"])
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(divided.gradients[name] * totals.documents, gradient, rtol=1e-12, atol=1e-15)


def test_advantages_are_made_by_the_estimator_that_the_spec_names():
    batch = grouped()
    spec, _, policy = fixture(data={"advantages": {"name": "rloo"}})
    rows, _ = flow.prepare_rows(batch, spec, policy.mesh)
    rewards_N, groups_N = batch.rewards_N.tolist(), batch.group_ids_N.tolist()
    trained = {int(d) for d in batch.document_ids_T[batch.loss_mask_T]}
    for at in torch.nonzero(rows[0].row.loss_mask_T).squeeze(1).tolist():
        document = int(batch.document_ids_T[rows[0].row.source_T[at]])
        others = [rewards_N[d] for d in trained if groups_N[d] == groups_N[document] and d != document]
        expected = rewards_N[document] - sum(others) / len(others) if others else 0.0
        assert float(rows[0].row.advantages_T[at]) == pytest.approx(expected)


def test_a_term_with_weights_of_its_own_is_summed_with_them():
    spec, _, policy = fixture(loss={"positive_nll_coefficient": 0.5})
    batch = grouped()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, num_source=batch.num_tokens)
    good = batch.loss_mask_T & (batch.rewards_N[batch.document_ids_T] > 0)
    assert 0 < good.sum() < batch.num_trained_tokens
    expected = -0.5 * result.tokens["policy_logprobs"][good].mean()
    assert float(result.loss["positive_nll"]) == pytest.approx(float(expected), rel=1e-12)
