"""What the flow does beside its numbers, which tests/parity holds to the oracle."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.errors import SpecError
from workbench.losses import Term
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh
from workbench.specs.run import RunSpec, parse_spec
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
    found = {}
    for old_policy in ("recorded", "current"):
        spec, batch, policy = fixture(loss={"old_policy": old_policy})
        rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
        result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, loss_spec=spec.loss)
        found[old_policy] = result.metrics["ratio/policy_old/max"]
    assert found["current"] == 1.0
    assert found["recorded"] > 1.1


def test_attention_is_fetched_and_computed_as_the_layout_says():
    """All ways give the same numbers: that the one which was asked for ran, only this sees."""
    lines = {
        "dp": Axis("dp"),
        "tp": Axis("tp"),
        "cp": Axis("cp", 4, 3),
        "dp_cp": Axis("dp_cp", 4, 3),
        "cp_inner": Axis("cp_inner", 2, 1),
        "cp_outer": Axis("cp_outer", 2, 1),
    }
    mesh, found = Mesh(lines, torch.device("cpu")), []
    for attention, more in (("gathered", {}), ("ring", {}), ("ulysses", {}), ("hybrid", {"ulysses": 2})):
        layout = {"cp": 4, "order": "zigzag", "attention": attention, "kernel": "plain"} | more
        spec = RunSpec.model_validate({"layout": layout})
        (row,), _ = flow.prepare_rows(RolloutBatch.from_documents(nasty_documents(4)), spec, mesh)
        shard, eighth = row.attention, len(row.row.tokens_T) // 2
        found.append((shard.algorithm, shard.kernel, shard.inner.size, shard.outer.size))
        held = shard.positions_GUt.view(4, -1)[3]
        assert held.tolist() == list(range(3 * eighth, 5 * eighth))  # the last rank has the two chunks in the middle
    assert found == [
        ("gathered", "plain", 1, 4),
        ("ring", "plain", 1, 4),
        ("ulysses", "plain", 4, 1),
        ("hybrid", "plain", 2, 2),
    ]


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


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        ({"cp": 2, "order": "zigzag"}, 4),
        ({"dp": 2, "tp": 4, "sequence_parallel": True}, 4),
        ({"cp": 2, "tp": 4, "sequence_parallel": True}, 8),
    ],
)
def test_rows_that_a_layout_can_only_split_by_luck_are_refused(layout, needed):
    """On every rank, and in the first step: not on one of them, in the first step with a row of another length."""
    batch = RolloutBatch.from_documents(nasty_documents(4))
    lucky = batch.select([0, 7])
    assert lucky.num_tokens % needed == 0, "this batch must divide"
    spec = RunSpec(layout=layout, data={"multiple_of": 2})
    with pytest.raises(SpecError, match=f"rows of this layout are multiples of {needed} tokens"):
        flow.pack_step(lucky, spec)


@pytest.mark.parametrize(
    ("layout", "data", "words"),
    [
        (
            {"cp": 2, "order": "balanced"},
            {"multiple_of": 4},
            "multiples of 256 tokens(.|\n)*smaller layout.block_tokens",
        ),
        ({"cp": 4, "order": "document_zigzag"}, {"multiple_of": 51}, "multiples of 8 tokens"),
        (
            {"cp": 4, "order": "document_zigzag"},
            {"micro_batch_tokens": 40},
            r"of 48 tokens with their padding to multiples of 8(.|\n)*allow at least 48 tokens",
        ),
        ({"cp": 2, "order": "balanced"}, {"micro_batch_tokens": 200}, "allow at least 256 tokens"),
    ],
)
def test_rows_that_an_order_cannot_deal_are_refused(layout, data, words):
    batch = RolloutBatch.from_documents(nasty_documents(4))
    axes = {name: Axis(name) for name in ("dp", "tp", "dp_cp")} | {"cp": Axis("cp", layout["cp"])}
    with pytest.raises(ValueError, match=words):
        flow.prepare_rows(batch, RunSpec(layout=layout, data=data), Mesh(axes, torch.device("cpu")))


def test_what_the_policy_says_where_nothing_counts_reaches_no_gradient():
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
def test_the_clip_coefficient_is_what_gradients_are_multiplied_with(norm, most, expected):
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


def test_what_a_run_would_decide_is_recorded_beside_the_decision_that_acted():
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


def test_groups_stay_in_one_row_where_that_is_asked_for():
    kept = flow.pack_step(grouped(), RunSpec(data={"micro_batches": 3, "keep_groups": True}))
    assert sorted(row.group_ids_N.unique().tolist() for row in kept) == [[0], [1], [2]]
    loose = flow.pack_step(grouped(), RunSpec(data={"micro_batches": 3}))
    assert max(row.group_ids_N.unique().numel() for row in loose) > 1


def test_groups_of_a_batch_without_groups_cannot_be_kept():
    batch = RolloutBatch.from_documents(nasty_documents(4))
    with pytest.raises(SpecError, match=r"data.keep_groups\n  found: a batch without group_ids"):
        flow.pack_step(batch, RunSpec(data={"keep_groups": True}))


def test_rows_may_be_dealt_by_hand_and_are_padded_as_the_layout_needs():
    batch, told = grouped(), [[5, 0, 1, 8], [2, 3, 4, 7, 6]]
    starts = (batch.positions_T == 0).nonzero().squeeze(1)
    rows = flow.pack_step(batch, RunSpec(layout={"cp": 2, "order": "zigzag"}), told)
    for row, documents in zip(rows, told, strict=True):
        firsts = row.source_T[(row.positions_T == 0) & (row.source_T >= 0)]
        assert torch.equal(firsts, starts[documents])
        assert row.num_tokens % 4 == 0
    mine, _ = flow.prepare_rows(batch, RunSpec(), single_process_mesh(), told)
    assert [int(local.row.document_ids_T.max()) + 1 for local in mine] == [4, 5]


@pytest.mark.parametrize("tokens", [48, 72, 96])
def test_as_many_micro_batches_are_taken_as_the_documents_need(tokens):
    batch = RolloutBatch.from_documents(nasty_documents(4))
    one_row, whole = flow.prepare_rows(batch, RunSpec(), single_process_mesh())
    rows, totals = flow.prepare_rows(batch, RunSpec(data={"micro_batch_tokens": tokens}), single_process_mesh())
    assert len(rows) == {48: 3, 72: 2, 96: 1}[tokens]
    assert totals == whole
    weights = {float(w) for local in (*rows, *one_row) for w in local.weights["policy"].loss_T[local.row.loss_mask_T]}
    assert weights == {float(torch.tensor(1 / totals.tokens))}, "every micro-batch is divided by the whole step"


def test_rows_are_cut_in_one_way():
    with pytest.raises(ValueError, match="give one of them"):
        RunSpec(data={"micro_batches": 2, "micro_batch_tokens": 8})


def test_the_gradient_may_be_divided_by_the_documents_once_more():
    spec, batch, policy = fixture(loss={"denominator": "document_sum"})
    twice, _, _ = fixture(loss={"denominator": "document_sum", "normalize_by_documents": True})
    results = []
    for chosen in (spec, twice):
        rows, totals = flow.prepare_rows(batch, chosen, policy.mesh)
        results.append(flow.run_step(policy, flow.build_loss(chosen.loss), rows, totals, keep_gradients=True))
    plain, divided = results
    assert float(divided.loss["total"]) == float(plain.loss["total"])
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(divided.gradients[name] * totals.documents, gradient, rtol=1e-12, atol=1e-15)


def test_a_penalty_in_the_reward_is_not_dropped_without_a_word():
    settings = {"loss": {"kl": {"coefficient": 0.1, "placement": "reward"}}}
    with pytest.raises(SpecError, match=r"loss.kl.placement 'reward' with recorded advantages"):
        parse_spec(RunSpec, settings, where="settings")
    parse_spec(RunSpec, settings | {"data": {"advantages": {"name": "rloo"}}}, where="settings")
    parse_spec(RunSpec, {"loss": {"kl": {"coefficient": 0.0, "placement": "reward"}}}, where="settings")


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


def test_a_penalty_in_the_reward_moves_advantages_where_an_estimator_makes_them():
    batch = grouped()
    batch = replace(batch, ref_logprobs_T=batch.old_logprobs_T - 0.5)
    made = {}
    for coefficient in (0.0, 0.1):
        spec, _, _ = fixture(
            data={"advantages": {"name": "reinforce_plus_plus"}},
            loss={"kl": {"coefficient": coefficient, "placement": "reward", "estimator": "k1"}},
        )
        made[coefficient] = flow.compute_advantages(batch, spec).advantages_T
    assert not torch.equal(made[0.0], made[0.1])
    spec, _, _ = fixture(
        data={"advantages": {"name": "grpo"}}, loss={"kl": {"coefficient": 0.1, "placement": "reward"}}
    )
    with pytest.raises(SpecError, match="no ref_logprobs"):
        flow.compute_advantages(replace(grouped(), ref_logprobs_T=None), spec)


def test_settings_of_the_estimator_are_handed_on_and_strange_ones_are_refused():
    batch = grouped()
    one, other = (
        flow.compute_advantages(batch, fixture(data={"advantages": {"name": "grpo", "settings": settings}})[0])
        for settings in ({"ddof": 1.0}, {"scale": "none"})
    )
    assert not torch.equal(one.advantages_T, other.advantages_T)
    with pytest.raises(SpecError, match="slope"):
        flow.compute_advantages(batch, fixture(data={"advantages": {"name": "rloo", "settings": {"slope": 1}}})[0])


def test_a_term_with_weights_of_its_own_is_summed_with_them():
    spec, _, policy = fixture(loss={"positive_nll_coefficient": 0.5})
    batch = grouped()
    rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
    result = flow.run_step(policy, flow.build_loss(spec.loss), rows, totals, num_source=batch.num_tokens)
    good = batch.loss_mask_T & (batch.rewards_N[batch.document_ids_T] > 0)
    assert 0 < good.sum() < batch.num_trained_tokens
    expected = -0.5 * result.tokens["policy_logprobs"][good].mean()
    assert float(result.loss["positive_nll"]) == pytest.approx(float(expected), rel=1e-12)
