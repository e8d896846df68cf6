"""What must hold for every row, layout and batch; hypothesis looks for the one that breaks it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ORDERS, ShardPlan

settings.register_profile("bench", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("bench")


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    documents = []
    for length in lengths:
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
        documents.append({
            "tokens": draw(st.lists(st.integers(0, 18), min_size=length, max_size=length)), "loss_mask": mask,
            "advantages": draw(st.floats(-2, 2, width=32)), "old_logprobs": [-1.0 - t / 64 for t in range(length)]})
    return RolloutBatch.from_documents(documents)


plans = st.builds(
    lambda order, cp, chunk: ShardPlan.make(order, num_tokens=2 * cp * chunk, cp=cp),
    st.sampled_from(ORDERS), st.integers(1, 6), st.integers(1, 5))


@given(plans)
def test_a_plan_is_a_permutation_with_its_inverse(plan):
    everyone = torch.arange(plan.num_tokens)
    assert torch.equal(plan.permutation_T.sort().values, everyone)
    shards = [plan.split(everyone, rank) for rank in range(plan.cp)]
    assert {len(shard) for shard in shards} == {plan.num_tokens // plan.cp}
    assert torch.equal(plan.merge(torch.cat(shards)), everyone)


@given(plans, st.data())
def test_attention_masks_of_all_ranks_are_the_mask_of_the_row(plan, data):
    length = plan.num_tokens
    ids = torch.tensor(sorted(data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))))
    whole = AttentionShard.make(ShardPlan.make("contiguous", num_tokens=length, cp=1), ids, Axis("cp")).allowed_tT
    for rank in range(plan.cp):
        mine = AttentionShard.make(plan, ids, Axis("cp", plan.cp, rank)).allowed_tT
        assert torch.equal(plan.merge(mine.T).T, whole[plan.positions(rank)])
        assert mine.any(1).all(), "no query may be without a key"


@given(batches(), st.integers(1, 4), st.integers(1, 8))
def test_packing_loses_and_invents_nothing(batch, rows, multiple):
    packed = pack(batch, rows=rows, multiple_of=multiple)
    assert len(packed) == rows
    assert all(row.num_tokens % multiple == 0 and row.num_tokens > 0 for row in packed)
    source = torch.cat([row.source_T[row.source_T != PADDING] for row in packed])
    assert torch.equal(source.sort().values, torch.arange(batch.num_tokens))
    for row in packed:
        real = row.source_T != PADDING
        for name, value in row.token_fields().items():
            if name not in ("document_ids_T", "source_T"):
                assert torch.equal(value[real], batch.token_fields()[name][row.source_T[real]]), name
        assert not row.loss_mask_T[~real].any()
        assert torch.isfinite(row.old_logprobs_T).all()


@given(batches(), st.integers(1, 3))
def test_every_trained_token_is_predicted_once_from_the_token_before_it(batch, rows):
    predicted = []
    for row in pack(batch, rows=rows, multiple_of=4):
        shifted = shift_targets(row)
        at = torch.nonzero(shifted.loss_mask_T).squeeze(1)
        source = shifted.source_T[at]
        predicted += source.tolist()
        assert torch.equal(shifted.targets_T[at], batch.tokens_T[source])
        assert torch.equal(shifted.tokens_T[at], batch.tokens_T[source - 1])
        assert torch.equal(shifted.old_logprobs_T[at], batch.old_logprobs_T[source])
        assert not shifted.advantages_T[~shifted.loss_mask_T].any()
    assert sorted(predicted) == torch.nonzero(batch.loss_mask_T).squeeze(1).tolist()


@given(batches(), st.randoms(use_true_random=False))
def test_select_takes_documents_whole(batch, random):
    chosen = list(range(batch.num_documents))
    random.shuffle(chosen)
    picked = batch.select(chosen)
    starts = (batch.lengths_N.cumsum(0) - batch.lengths_N).tolist()
    expected = [starts[d] + t for d in chosen for t in range(int(batch.lengths_N[d]))]
    assert picked.source_T.tolist() == expected
    assert torch.equal(picked.tokens_T, batch.tokens_T[expected])
