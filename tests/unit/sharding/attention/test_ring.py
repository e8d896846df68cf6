"""Ring attention over threads against the oracle, in every order; and the mistakes that rings are known for."""

import threading

import pytest
import torch

from tests.helpers.attention_case import DOCUMENTS, ORDERS, STRETCHES, D, T, assert_right, by_ranks, expected, plan
from tests.helpers.threads import axes, on_threads
from tests.oracles.attention import normaliser
from workbench.sharding.attention import gathered, kernels, ring
from workbench.sharding.attention.kernels.plain import PlainKernel
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.plan import ShardPlan


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("cp", "heads", "window"), [(1, (4, 2), None), (2, (4, 2), 3), (4, (4, 2), None), (4, (4, 4), 1), (4, (4, 1), 7)]
)
def test_output_and_gradients_are_the_oracles(order, cp, heads, window):
    assert_right(by_ranks(order, cp, "ring", heads, window=window), heads, window)


def test_ranks_that_are_no_power_of_two():
    assert_right(by_ranks("striped", 3, "ring", (4, 2)), (4, 2))


def test_merging_equals_attention_over_both_key_sets_also_if_empty():
    nothing = -torch.inf
    lse = torch.tensor([0.5, nothing, 2.0, nothing], dtype=torch.float64)
    other_lse = torch.tensor([-1.0, 0.25, nothing, nothing], dtype=torch.float64)
    out, other = torch.randn(2, 4, 3, dtype=torch.float64)
    out[[1, 3]], other[[2, 3]] = 0, 0
    merged, both = ring.merge(out, lse, other, other_lse)
    share = 1 / (1 + torch.exp(torch.tensor(-1.5, dtype=torch.float64)))
    right = torch.stack([share * out[0] + (1 - share) * other[0], other[1], out[2], torch.zeros(3).double()])
    torch.testing.assert_close(merged, right, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        both, torch.stack([0.5 - share.log(), *torch.tensor([0.25, 2.0, nothing])]).double(), rtol=0, atol=1e-15
    )


def rms(errors):
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("order", ["striped", "document_zigzag"])
def test_a_normaliser_is_rounded_once_for_any_number_of_blocks(order, monkeypatch):
    """A normaliser of 8 to 16 is rounded by up to 5e-7, and every probability of the row with it."""
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randint(-4, 5, (heads, T, D), generator=generator).float() for heads in (4, 2))
    query[..., 0], key[..., 0] = 8, 8  # scores are large, and exact in float32: nothing else is rounded
    lay, lines, kept = plan(order, 4), axes(4), {}

    class Watched(PlainKernel):
        def backward(self, d_out, query, key, value, out, lse, block, *more):
            if lse.shape[-1] == T // 4:
                kept[lay.owners_T[block.query_positions_q[0]].item()] = lse[0]
            return super().backward(d_out, query, key, value, out, lse, block, *more)

    def rank(number):
        shard = AttentionShard.make(lay, torch.tensor(DOCUMENTS), lines[number][0], algorithm="ring")
        local = [x[None, :, lay.positions(number)].requires_grad_() for x in (query, key)]
        ring.attend(*local, local[1], shard, None, 0.125).sum().backward()

    monkeypatch.setattr(kernels, "KERNELS", (Watched(),))
    on_threads(rank, 4)
    result = lay.merge(torch.cat([kept[number] for number in range(4)], dim=1).movedim(1, 0)).movedim(0, 1)
    right = normaliser(query.double(), key.double(), STRETCHES, scale=0.125)
    assert result.dtype == torch.float32
    assert rms(result - right) < 1.05 * rms(right.float() - right)


def test_what_sinks_leave_of_queries_without_another_block_is_rounded_once_too(monkeypatch):
    class NarrowNormaliser(PlainKernel):
        def forward(self, *given):
            out, lse = super().forward(*given)
            return out, lse.float()  # as kernels of a GPU

    monkeypatch.setattr(kernels, "KERNELS", (NarrowNormaliser(),))
    generator = torch.Generator().manual_seed(7)
    query, sinks = torch.randn(1, 4, T, D, generator=generator), torch.randn(4, generator=generator)
    shard = AttentionShard.make(plan("contiguous", 1), torch.tensor(DOCUMENTS), axes(1)[0][0], algorithm="ring")
    whole, lse = NarrowNormaliser().forward(query, query, query, shard.block(0), 0.4)
    kept = torch.sigmoid(lse.double() - sinks[:, None].double())[..., None]
    assert torch.equal(ring.attend(query, query, query, shard, None, 0.4, sinks), (whole.double() * kept).float())


def test_the_oracle_sees_backward_with_the_keys_of_the_first_step(monkeypatch):
    """huggingface/diffusers#14265: output right, gradients of query, key and value wrong."""
    first = threading.local()  # a rank is a thread, and backward runs in it

    class Stale(PlainKernel):
        def backward(self, d_out, query, key, value, *more):
            first.held = getattr(first, "held", (key, value))
            return super().backward(d_out, query, *(held[:, :, : key.shape[2]] for held in first.held), *more)

    monkeypatch.setattr(kernels, "KERNELS", (Stale(),))
    assert_only_output_is_right(by_ranks("zigzag", 2, "ring", (4, 2)))


def assert_only_output_is_right(found):
    torch.testing.assert_close(found[0], expected((4, 2))[0], rtol=0, atol=1e-13)
    with pytest.raises(AssertionError, match="query: "):
        assert_right(found, (4, 2))


def test_the_oracle_sees_the_normaliser_of_a_block_in_place_of_the_rows(monkeypatch):
    class OwnNormaliser(PlainKernel):
        def backward(self, d_out, query, key, value, out, lse, block, scale):
            _, own = self.forward(query, key, value, block, scale)
            return super().backward(d_out, query, key, value, out, own, block, scale)

    monkeypatch.setattr(kernels, "KERNELS", (OwnNormaliser(),))
    assert_only_output_is_right(by_ranks("zigzag", 2, "ring", (4, 2)))


def test_the_oracle_sees_gradients_of_keys_that_stop_one_hop_short(monkeypatch):
    sent = threading.local()

    def short(value, axis, plain=ring.start_rotation, **how):
        sent.count = getattr(sent, "count", 0) + 1
        arrive = plain(value, axis, **how)
        return (lambda: (arrive(), value)[1]) if sent.count == 3 else arrive  # keys, keys again, gradients

    monkeypatch.setattr(ring, "start_rotation", short)
    by_rank = by_ranks("zigzag", 2, "ring", (4, 2))
    with pytest.raises(AssertionError, match="key: "):
        assert_right(by_rank, (4, 2))


def test_blocks_in_which_nothing_is_seen_are_not_computed_and_keys_travel_as_far_as_they_are_seen(monkeypatch):
    computed, travelled = [], []

    class Watched(PlainKernel):
        def forward(self, query, key, value, block, scale):
            computed.append(bool(block.allowed_qk.any()))
            return super().forward(query, key, value, block, scale)

    def watched(value, axis, plain=ring.start_rotation, **how):
        travelled.append((axis.rank, value.shape))
        return plain(value, axis, **how)

    monkeypatch.setattr(kernels, "KERNELS", (Watched(),))
    monkeypatch.setattr(ring, "start_rotation", watched)
    assert_right(by_ranks("contiguous", 4, "ring", (4, 2), window=3), (4, 2), 3)
    assert all(computed)
    assert 4 <= len(computed) < 10  # of 16; contiguous and a window: a rank sees itself and perhaps its neighbour
    # Keys go one hop forward and one backward, gradients back; two keys of a rank are in the next one's window.
    assert [sum(rank == r for rank, _ in travelled) for r in range(4)] == [1 + 1 + 1] * 4
    assert {shape[0] for _, shape in travelled} == {2}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("cp", "inner"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_a_ring_ends_at_the_farthest_rank_that_sees_a_key(order, cp, inner):
    algorithm, lines = "hybrid" if inner > 1 else "ring", axes(cp, inner)
    shards = [
        AttentionShard.make(
            plan(order, cp), torch.tensor(DOCUMENTS), axis, algorithm=algorithm, inner=cp_inner, outer=cp_outer
        )
        for axis, cp_inner, cp_outer in lines
    ]
    outer = cp // inner
    seen = {
        (shard.outer.rank - source) % outer
        for shard in shards
        for source in range(outer)
        if shard.block(source).allowed_qk.any()
    }
    assert {shard.shared().hops for shard in shards} == {max(seen)}


@pytest.mark.parametrize(
    ("module", "names"), [(ring, ["start_rotation"]), (gathered, ["start_gather", "start_scatter_sum"])]
)
def test_documents_that_are_whole_travel_nowhere(module, names, monkeypatch):
    travelled = []
    for name in names:
        monkeypatch.setattr(module, name, lambda value, *more, **how: travelled.append(value))
    lay = ShardPlan.make("whole_documents", num_tokens=32, cp=2, document_lengths=(8, 4, 8, 8, 4))
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(lay.document_lengths))

    def rank(number):
        shard = AttentionShard.make(lay, documents, axes(2)[number][0])
        leaves = [torch.randn(1, 2, 16, 4).double().requires_grad_() for _ in range(3)]
        module.attend(*leaves, shard, None, 0.5).sum().backward()

    on_threads(rank, 2)
    assert travelled == []


def test_half_precision_gradients_of_keys_travel_in_float32(monkeypatch):
    travelled = []

    def watched(value, axis, plain=ring.start_rotation, **how):
        travelled.append(value.dtype)
        return plain(value, axis, **how)

    monkeypatch.setattr(ring, "start_rotation", watched)
    by_rank = by_ranks("zigzag", 2, "ring", (4, 2), dtype=torch.bfloat16)
    assert (travelled.count(torch.bfloat16), travelled.count(torch.float32)) == (2 * (1 + 1), 2 * 1)
    assert {x.dtype for x in by_rank} == {torch.bfloat16}
    assert_right(by_rank, (4, 2), atol=0.15)
