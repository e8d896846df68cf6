"""Properties of every row, layout and batch; hypothesis searches for a counterexample."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.orders import ORDERS, document_lengths, padding_rule
from workbench.sharding.plan import ShardPlan

settings.register_profile("bench", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("bench")


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    documents = []
    for length in lengths:
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
        documents.append(
            {
                "tokens": draw(st.lists(st.integers(0, 18), min_size=length, max_size=length)),
                "loss_mask": mask,
                "advantages": draw(st.floats(-2, 2, width=32)),
                "old_logprobs": [-1.0 - t / 64 for t in range(length)],
            }
        )
    return RolloutBatch.from_documents(documents)


@st.composite
def plans(draw):
    order, cp, block = draw(st.sampled_from(sorted(ORDERS))), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rule = padding_rule(order, cp, block_tokens=block)
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    lengths = [length * rule.document for length in lengths]
    if rest := -sum(lengths) % rule.row:
        lengths.append(rest)
    return ShardPlan.make(order, num_tokens=sum(lengths), cp=cp, document_lengths=lengths, block_tokens=block)


@given(plans())
def test_a_plan_is_a_permutation_with_its_inverse(plan):
    everyone = torch.arange(plan.num_tokens)
    assert torch.equal(plan.permutation_T.sort().values, everyone)
    shards = [plan.split(everyone, rank) for rank in range(plan.cp)]
    assert {len(shard) for shard in shards} == {plan.num_tokens // plan.cp}
    assert torch.equal(plan.merge(torch.cat(shards)), everyone)


@given(plans())
def test_every_pair_of_a_row_is_counted_exactly_once(plan):
    work = sum(length * (length + 1) // 2 for length in plan.document_lengths)
    balance = plan.balance()
    assert int(balance.pairs_RR.sum()) == work
    assert 1 <= balance.max_over_mean <= balance.in_lock_step <= plan.cp
    if plan.order == "document_zigzag":
        assert balance.max_over_mean == balance.in_lock_step == 1


@given(plans(), st.data())
def test_attention_masks_of_all_ranks_are_the_mask_of_the_row(plan, data):
    length = plan.num_tokens
    ids = torch.tensor(sorted(data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))))
    one = ShardPlan.make("contiguous", num_tokens=length, cp=1)
    whole = AttentionShard.make(one, ids, Axis("cp")).block().allowed_qk
    for rank in range(plan.cp):
        local = AttentionShard.make(plan, ids, Axis("cp", plan.cp, rank)).block().allowed_qk
        assert torch.equal(plan.merge(local.T).T, whole[plan.positions(rank)])
        assert local.any(1).all(), "no query may be without a key"


@given(batches(), st.integers(1, 4), st.integers(1, 8), st.integers(1, 5), st.sampled_from(["tokens", "work"]))
def test_packing_loses_and_invents_nothing(batch, rows, multiple, document_multiple, balance):
    packed = pack(batch, rows=rows, multiple_of=multiple, document_multiple_of=document_multiple, balance=balance)
    assert len(packed) == rows
    assert all(row.num_tokens % multiple == 0 and row.num_tokens > 0 for row in packed)
    source = torch.cat([row.source_T[row.source_T != PADDING] for row in packed])
    assert torch.equal(source.sort().values, torch.arange(batch.num_tokens))
    for row in packed:
        real = row.source_T != PADDING
        for name, value in row.token_fields().items():
            if name not in ("document_ids_T", "source_T"):
                assert torch.equal(value[real], batch.token_fields()[name][row.source_T[real]]), name
            elif name == "document_ids_T":
                assert value[~real].tolist() == [PADDING] * int((~real).sum())
        assert not row.loss_mask_T[~real].any()
        lengths = document_lengths(row.document_ids_T, document_multiple)
        assert sum(lengths) == row.num_tokens
        assert all(length % document_multiple == 0 for length in lengths[: row.num_documents])
        assert torch.isfinite(row.old_logprobs_T).all()


@given(batches(), st.integers(1, 4), st.integers(1, 4))
def test_padding_of_documents_changes_nothing_that_is_trained(batch, multiple, document_multiple):
    (plain,), (padded,) = pack(batch), pack(batch, multiple_of=multiple, document_multiple_of=document_multiple)
    plain, padded = shift_targets(plain), shift_targets(padded)
    kept = padded.document_ids_T != PADDING
    for name, value in vars(plain).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(padded, name)[kept], value), name


@given(batches(), st.integers(1, 3), st.integers(1, 3))
def test_every_trained_token_is_predicted_exactly_once_from_the_previous_token(batch, rows, document_multiple):
    predicted = []
    for row in pack(batch, rows=rows, multiple_of=4, document_multiple_of=document_multiple):
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
