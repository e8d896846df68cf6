import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.orders import ORDERS
from workbench.sharding.plan import Balance, ShardPlan


def test_zigzag_pairs_first_and_last_chunks():
    plan = ShardPlan.make("zigzag", num_tokens=12, cp=3)
    assert [plan.positions(r).tolist() for r in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_contiguous_cuts_in_order():
    plan = ShardPlan.make("contiguous", num_tokens=6, cp=3)
    assert [plan.positions(r).tolist() for r in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_causal_work_of_zigzag_is_equal_to_the_element():
    plan = ShardPlan.make("zigzag", num_tokens=64, cp=4)
    work = [int((plan.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
    contiguous = ShardPlan.make("contiguous", num_tokens=64, cp=4)
    assert len({int((contiguous.positions(rank) + 1).sum()) for rank in range(4)}) == 4


def test_merge_undoes_split_for_matrices():
    plan = ShardPlan.make("zigzag", num_tokens=8, cp=2)
    whole = torch.randn(8, 3)
    assert torch.equal(plan.merge(torch.cat([plan.split(whole, r) for r in range(2)])), whole)


def test_every_position_has_its_owner():
    for order in ORDERS:
        plan = ShardPlan.make(order, num_tokens=24, cp=3, document_lengths=(6, 18), block_tokens=2)
        for rank in range(3):
            assert (plan.owners_T == rank).nonzero().squeeze(1).tolist() == sorted(plan.positions(rank).tolist())


def pairs_by_hand(plan, ids):
    return [
        [
            sum(int(ids[q] == ids[k] and q >= k) for q in plan.positions(r) for k in plan.positions(s))
            for s in range(plan.cp)
        ]
        for r in range(plan.cp)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_balance_counts_the_keys_of_each_query(order):
    lengths = (12, 6, 24, 6)
    plan = ShardPlan.make(order, num_tokens=48, cp=3, document_lengths=lengths, block_tokens=4)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    assert plan.balance().pairs_RR.tolist() == pairs_by_hand(plan, ids)
    padded, apart = ids.clone(), ids.clone()
    padded[[9, 10, 11, 46, 47]] = -1
    apart[[9, 10, 11, 46, 47]] = torch.tensor([7, 7, 7, 8, 8])
    expected = pairs_by_hand(plan, apart)
    assert plan.balance(padded).pairs_RR.tolist() == expected != plan.balance().pairs_RR.tolist()


def test_the_figures_of_a_balance():
    level, skewed = Balance(torch.tensor([[6, 4], [4, 6]])), Balance(torch.tensor([[10, 0], [16, 10]]))
    assert (level.max_over_mean, level.in_lock_step) == (1, 1)
    assert (skewed.pairs_by_rank, skewed.max_over_mean, skewed.in_lock_step) == ((10, 26), 26 / 18, 26 / 18)
    waits = Balance(torch.tensor([[0, 8], [2, 6]]))  # equal sums; step 0 waits for rank 1, step 1 for rank 0
    assert (waits.max_over_mean, waits.in_lock_step) == (1, 14 / 8)
    assert repr(waits) == "Balance(max/mean 1.000, 1.750 in a ring; pairs of ranks 8, 8)"


def test_a_packed_row_is_balanced_in_document_orders():
    lengths = (4096, 64, 64, 64, 1536, 256, 2048, 64)

    def slowest(order):
        return ShardPlan.make(order, num_tokens=8192, cp=4, document_lengths=lengths).balance().max_over_mean

    assert slowest("document_zigzag") == 1
    assert slowest("balanced") < 1.1 < slowest("zigzag") < slowest("contiguous")
    assert slowest("striped") < 1.01


def test_zigzag_of_one_document_never_waits_in_a_ring():
    balance = ShardPlan.make("zigzag", num_tokens=64, cp=4).balance()
    assert balance.max_over_mean == 1
    assert balance.in_lock_step == 1
    assert ShardPlan.make("contiguous", num_tokens=64, cp=4).balance().in_lock_step > 1.5


def test_indivisible_tokens_are_refused():
    with pytest.raises(ShardingError) as caught:
        ShardPlan.make("zigzag", num_tokens=1004, cp=4)
    assert str(caught.value) == (
        "shard plan: zigzag order of 1004 tokens over cp=4\n"
        "  found: 1004 tokens\n"
        "  rule: a positive multiple of 2 * cp = 8\n"
        "  do: pad the row to 1008 tokens (pack(..., multiple_of=...); data.multiple_of unset does it)"
    )


def test_unknown_order_is_refused_by_name():
    with pytest.raises(ShardingError, match="order 'zagzig'"):
        ShardPlan.make("zagzig", num_tokens=8, cp=2)


@pytest.mark.parametrize(
    ("order", "more", "words"),
    [
        ("striped", {"num_tokens": 9}, "a positive multiple of cp = 2"),
        (
            "balanced",
            {"num_tokens": 8, "document_lengths": (8,)},
            r"a positive multiple of block_tokens \* cp = 128 \* 2 = 256\n.*pad the row to 256 tokens"
            r".*smaller layout.block_",
        ),
        ("balanced", {"num_tokens": 256}, "the balanced order depends on the documents"),
        ("document_zigzag", {"num_tokens": 8}, "no document_lengths"),
        (
            "document_zigzag",
            {"num_tokens": 16, "document_lengths": (4, 3, 8, 1)},
            r"document 1 of 3, 3 of 1 tokens\n.*2 \* cp = 4 tokens.*\n.*document_multiple_of=4",
        ),
        ("zigzag", {"num_tokens": 8, "document_lengths": (4, 5)}, "2 documents of 9 tokens in all"),
        ("zigzag", {"num_tokens": 8, "document_lengths": (8, 0)}, "0 in the shortest"),
        ("contiguous", {"num_tokens": 0}, "a positive multiple of cp = 2"),
        ("contiguous", {"num_tokens": 8, "cp": 0}, "over cp=0"),
    ],
)
def test_invalid_plans_are_refused(order, more, words):
    with pytest.raises(ShardingError, match=words):
        ShardPlan.make(order, **{"cp": 2} | more)


@pytest.mark.parametrize(
    ("tokens", "held"),
    [(8, "rank 0: 0-0, 2-2, 4-4, 6-6;"), (10, "rank 0: 0-0, 2-2, 4-4, 6-6, and 1 more;"), (12, "6-6, and 2 more;")],
)
def test_a_plan_names_four_spans_of_a_rank_and_counts_the_others(tokens, held):
    assert held in repr(ShardPlan.make("striped", num_tokens=tokens, cp=2))


def test_a_plan_is_drawn_as_text():
    plan = ShardPlan.make("document_zigzag", num_tokens=12, cp=2, document_lengths=(8, 4))
    assert plan.drawing() == ("tokens     0         11\ndocuments  aaaaaaaabbbb\nranks      001111000110")


def test_a_long_row_is_drawn_by_stretches():
    assert ShardPlan.make("zigzag", num_tokens=64, cp=2).drawing(8).splitlines()[-1] == "ranks      00111100"
    assert ShardPlan.make("striped", num_tokens=64, cp=2).drawing(8).splitlines()[-1] == "ranks      ********"
