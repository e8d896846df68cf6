"""Attention over traded heads, gathered or in rings, against the oracle; key heads that are fewer than ranks."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers.attention_case import DOCUMENTS, ORDERS, SCALE, assert_right, by_ranks, plan, tensors
from tests.helpers.threads import axes, on_threads
from workbench.errors import ShardingError
from workbench.sharding.attention import gathered, ring, ulysses
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.mesh import Axis


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("cp", "heads", "window"),
    [(1, (4, 2), None), (2, (4, 2), 3), (4, (4, 2), None), (4, (4, 4), 1), (4, (4, 1), 7), (4, (8, 4), None)],
)
def test_output_and_gradients_are_the_oracles(order, cp, heads, window):
    assert_right(by_ranks(order, cp, "ulysses", heads, window=window), heads, window)


def test_heads_of_three_ranks():
    assert_right(by_ranks("striped", 3, "ulysses", (6, 3)), (6, 3))


@pytest.mark.parametrize(
    ("algorithm", "cp", "inner", "heads", "window"),
    [
        ("ulysses", 2, 2, (4, 4), 3),
        ("ulysses", 2, 2, (8, 4), None),
        ("ulysses", 4, 4, (8, 2), None),  # one key head a rank, after it was repeated: no parts
        ("hybrid", 4, 2, (8, 4), 7),
    ],
)
@pytest.mark.parametrize("order", ["document_zigzag", "striped"])
def test_heads_in_two_parts_are_the_oracles(algorithm, cp, inner, heads, window, order, monkeypatch):
    whole = by_ranks(order, cp, algorithm, heads, inner=inner, window=window)
    started, plain = [], ulysses.start_exchange
    monkeypatch.setattr(ulysses, "start_exchange", lambda *given, **how: started.append(1) or plain(*given, **how))
    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", 1)
    in_parts = by_ranks(order, cp, algorithm, heads, inner=inner, window=window)
    assert_right(in_parts, heads, window)
    assert all(torch.equal(one, other) for one, other in zip(whole, in_parts, strict=True))
    assert len(started) == (0 if heads == (8, 2) else 8 * cp)


def _one_layer(number, line, checkpointed, begin_backward):
    lay, leaves = plan("document_zigzag", 2), tensors(8, 4)
    shard = AttentionShard.make(lay, torch.tensor(DOCUMENTS), line[0], algorithm="ulysses", kernel="plain")
    *leaves, d_out = (x[None, :, lay.positions(number)].requires_grad_() for x in leaves)

    def attend(*heads):
        return ulysses.attend(*heads, shard, None, SCALE).tanh()  # which saves its output, as what follows in a layer

    out = checkpoint(attend, *leaves, use_reentrant=False) if checkpointed else attend(*leaves)
    begin_backward()
    return torch.autograd.grad(out, leaves, d_out)


def test_a_part_travels_while_another_is_computed(monkeypatch):
    """In backward too, in the order of autograd, and in one order on every rank."""
    events = defaultdict(list)

    def note(event):
        events[threading.get_ident()].append(event)

    def start(pieces_R, axis, caller, plain=ulysses.start_exchange):
        number = sum(event.startswith("start") for event in events[threading.get_ident()])
        note(f"start {number}")
        arrive = plain(pieces_R, axis, caller=caller)
        return lambda: note(f"wait {number}") or arrive()

    def watched(*given, plain=gathered.choose):
        kernel = plain(*given)
        return SimpleNamespace(
            forward=lambda *of: note("attend") or kernel.forward(*of),
            backward=lambda *of: note("attend") or kernel.backward(*of),
        )

    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", 1)
    monkeypatch.setattr(ulysses, "start_exchange", start)
    monkeypatch.setattr(gathered, "choose", watched)
    lines = axes(2, 2)
    on_threads(lambda number: _one_layer(number, lines[number], False, lambda: note("backward")), 2)
    for log in events.values():
        forward, backward = log[: log.index("backward")], log[log.index("backward") + 1 :]
        assert " ".join(forward) == (
            "start 0 start 1 wait 0 attend start 2 wait 1 attend start 3 wait 2 wait 3"
        )  # 0 and 1 of the parts' heads, 2 and 3 of their output
        assert " ".join(backward) == (
            "start 4 start 5 wait 4 attend start 6 wait 5 attend start 7 wait 6 wait 7"
        )  # of the second part's gradients first
    assert len(events) == 2


@pytest.mark.parametrize("limit", [1, 10**6])
def test_heads_stay_token_major_in_both_directions(limit, monkeypatch):
    """So a kernel that reads tokens first copies nothing, nor does a projection behind it."""
    seen = []

    def watched(*given, plain=gathered.choose):
        kernel = plain(*given)

        def backward(d_out, query, key, value, out, *more):
            seen.extend((d_out, out))
            grads = kernel.backward(d_out, query, key, value, out, *more)
            return tuple(grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads)  # as flash's

        def forward(*of):
            out, lse = kernel.forward(*of)
            return out.transpose(1, 2).contiguous().transpose(1, 2), lse

        return SimpleNamespace(forward=forward, backward=backward)

    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", limit)
    monkeypatch.setattr(gathered, "choose", watched)
    lines = axes(2, 2)

    def rank(number):
        lay, (*leaves, d_out) = plan("contiguous", 2), tensors(8, 4)
        shard = AttentionShard.make(lay, torch.tensor(DOCUMENTS), lines[number][0], algorithm="ulysses", kernel="plain")
        leaves = [x[None, :, lay.positions(number)].requires_grad_() for x in leaves]
        out = ulysses.attend(*leaves, shard, None, SCALE)
        return (out.detach(), *torch.autograd.grad(out, leaves, d_out[None, :, lay.positions(number)]))

    results = [one for of_rank in on_threads(rank, 2) for one in of_rank]
    assert len(seen) == (8 if limit == 1 else 4)
    assert len(results) == 8
    assert all(one.transpose(1, 2).is_contiguous() for one in (*seen, *results))


def test_parts_in_a_recomputed_layer(monkeypatch):
    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", 1)
    lines = axes(2, 2)
    kept, recomputed = (
        on_threads(lambda number, way=way: _one_layer(number, lines[number], way, lambda: None), 2)
        for way in (False, True)
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_placeholders_are_no_anomaly():
    """Torch's search for the first NaN in backward reads them too; without memory of their own they hold anything."""
    assert torch.utils.deterministic.fill_uninitialized_memory, "by default"
    lines, before = axes(2, 2), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which makes it NaN
    try:
        with torch.autograd.detect_anomaly():
            found = on_threads(lambda number: _one_layer(number, lines[number], False, lambda: None), 2)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(one.isfinite().all() for of_rank in found for one in of_rank)


def test_the_oracle_detects_unsummed_gradients_of_repeated_key_heads(monkeypatch):
    class FirstCopyOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, heads, copies):
            ctx.copies = copies
            return heads.repeat_interleave(copies, dim=1)

        @staticmethod
        def backward(ctx, d_heads):
            return d_heads[:, :: ctx.copies], None

    monkeypatch.setattr(ulysses, "repeat_heads", FirstCopyOnly.apply)
    with pytest.raises(AssertionError, match="key: "):
        assert_right(by_ranks("zigzag", 4, "ulysses", (4, 2)), (4, 2))


def test_the_oracle_sees_tokens_that_are_not_put_back(monkeypatch):
    def backwards(rows_s, shard, back, plain=ulysses._reordered):
        return plain(rows_s.flip(0) if back else rows_s, shard, back)

    monkeypatch.setattr(ulysses, "_reordered", backwards)
    with pytest.raises(AssertionError, match="output: "):
        assert_right(by_ranks("contiguous", 2, "ulysses", (4, 2)), (4, 2))


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "copies"), [(8, 4, 2, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8)]
)
def test_key_heads_are_repeated_until_every_rank_has_one(queries, keys, ranks, copies):
    assert ulysses.check_heads(queries, keys, Axis("cp", ranks)) == copies


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(4, 2, 8), (6, 3, 4), (12, 3, 2), (12, 6, 4), (12, 3, 4)])
def test_indivisible_heads_are_refused(queries, keys, ranks):
    with pytest.raises(ShardingError, match=f"{queries} query heads and {keys} key/value heads"):
        ulysses.check_heads(queries, keys, Axis("cp", ranks))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("inner", "heads", "window"),
    [(2, (4, 2), None), (2, (4, 1), 3), (2, (4, 4), 12), (4, (4, 2), None), (1, (4, 2), 7)],
)
def test_hybrid_output_and_gradients_are_the_oracles(order, inner, heads, window):
    assert_right(by_ranks(order, 4, "hybrid", heads, inner=inner, window=window), heads, window)


def test_a_ring_spans_the_outer_ranks_only(monkeypatch):
    seen = set()

    def watched(value, axis, plain=ring.start_rotation, **how):
        seen.add((axis.name, axis.size, tuple(axis.ranks)))
        return plain(value, axis, **how)

    monkeypatch.setattr(ring, "start_rotation", watched)
    assert_right(by_ranks("zigzag", 4, "hybrid", (4, 2), inner=2), (4, 2))
    assert seen == {("cp_outer", 2, (0, 2)), ("cp_outer", 2, (1, 3))}
