"""What the flow does beside its numbers, which tests/parity holds to the oracle."""

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.losses import Term
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.runs import step as flow
from workbench.runs.spec import RunSpec
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh


def fixture(**settings):
    spec = RunSpec.model_validate({"model": {"source": "tiny-qwen3"}, "precision": "float64"} | settings)
    return spec, RolloutBatch.from_documents(nasty_documents(4)), load_policy("tiny-qwen3", precision="float64")


def test_a_step_without_trained_tokens_gives_zeros_and_not_nothing():
    spec, _, policy = fixture()
    untrained = RolloutBatch.from_documents([d | {"loss_mask": [0] * len(d["tokens"])} for d in nasty_documents(4)])
    rows, totals = flow.prepare_rows(untrained, spec, policy.mesh)
    result = flow.run_step(policy, flow.make_loss(spec.loss), rows, totals)
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


def test_every_rank_of_a_mesh_takes_its_own_rows():
    batch = RolloutBatch.from_documents(nasty_documents(4))
    seen = []
    for dp in range(2):
        for cp in range(2):
            axes = {"dp": Axis("dp", 2, dp), "cp": Axis("cp", 2, cp), "tp": Axis("tp"), "dp_cp": Axis("dp_cp", 4)}
            spec = RunSpec(layout={"dp": 2, "cp": 2, "order": "zigzag"}, data={"micro_batches": 2})
            rows, totals = flow.prepare_rows(batch, spec, Mesh(axes, torch.device("cpu")))
            assert len(rows) == 2
            seen += [int(s) for local in rows for s in local.row.source_T[local.row.loss_mask_T]]
    assert sorted(seen) == torch.nonzero(batch.loss_mask_T).squeeze(1).tolist()
    assert totals.tokens == batch.num_trained_tokens


def test_rows_that_a_layout_cannot_split_are_refused():
    batch = RolloutBatch.from_documents(nasty_documents(4)[:-1])
    spec = RunSpec(layout={"cp": 2, "order": "zigzag"}, data={"multiple_of": 1})
    assert batch.num_tokens % 4, "this batch must not divide"
    with pytest.raises(ValueError, match=r"a positive multiple of 2 \* cp = 4"):
        flow.prepare_rows(batch, spec, single_process_mesh())


def test_what_the_policy_says_where_nothing_counts_reaches_no_gradient():
    spec = RunSpec(loss={"kl_coefficient": 0.1})
    policy = load_policy("tiny-qwen3", temperature=0.001)  # log-probabilities of -1000s: exp overflows float32
    nothing = RolloutBatch.from_documents([d | {"loss_mask": [0] * len(d["tokens"])} for d in nasty_documents(4)])
    rows, totals = flow.prepare_rows(nothing, spec, policy.mesh)
    flow.run_step(policy, flow.make_loss(spec.loss), rows, totals)
    assert all(not p.grad.any() and torch.isfinite(p.grad).all() for p in policy.model.parameters())


def test_clipping_scales_every_gradient_by_the_whole_norm():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.make_loss(spec.loss), rows, totals)
    before = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    norm = flow.clip_gradients(policy, result.norms, float(before.norm()) / 4)
    after = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert norm == pytest.approx(float(before.norm()), rel=1e-12)
    torch.testing.assert_close(after, before / 4)
    assert flow.clip_gradients(policy, result.norms, None) == norm


def test_clipping_never_scales_up():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.make_loss(spec.loss), rows, totals)
    before = [p.grad.clone() for p in policy.model.parameters()]
    norm = flow.clip_gradients(policy, result.norms, 1e6)
    assert norm < 1e6
    assert all(torch.equal(p.grad, b) for p, b in zip(policy.model.parameters(), before, strict=True))


def test_a_step_forgets_the_gradients_of_the_one_before():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    first, second = (flow.run_step(policy, flow.make_loss(spec.loss), rows, totals, keep_gradients=True).gradients
                     for _ in range(2))
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=0, atol=1e-13)


def test_what_a_run_would_decide_is_recorded_beside_the_decision_that_acted():
    spec, batch, policy = fixture()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    loss = flow.make_loss(spec.loss)
    free = flow.run_step(policy, loss, rows, totals, num_source=batch.num_tokens).tokens
    opposite = ~free["clipped"] & free["trained"]
    frozen = flow.run_step(policy, loss, rows, totals, num_source=batch.num_tokens, frozen_clip_S=opposite).tokens
    assert free["clipped"].any()
    assert torch.equal(free["would_clip"], free["clipped"])
    assert torch.equal(frozen["clipped"], opposite)
    assert torch.equal(frozen["would_clip"], free["clipped"])
