"""Rows by token number, both ways, against a loop over single rows; and errors for tokens that would be lost."""

import pytest
import torch

from tests.helpers.bridges import listed, random_sides, rows, tokens
from tests.oracles import bridge as oracle
from workbench.errors import ShapeError, ShardingError
from workbench.sharding.bridge.crossing import Crossing, check_replicas
from workbench.sharding.bridge.sides import Share, Side
from workbench.sharding.simulated import simulate


def crossed(crossing, values, gradients, **more):
    """The output of each simulated rank, and its gradient."""

    def of_rank(mesh):
        own = values[mesh["dp"].rank].clone().requires_grad_()
        out = crossing.cross(own, mesh["dp"], **more)
        out.backward(gradients[mesh["dp"].rank])
        return out.detach(), own.grad

    return zip(*simulate(of_rank, dp=len(values)), strict=True)


@pytest.mark.parametrize("seed", range(24))
def test_any_sides_match_single_rows(seed):
    source, destination = random_sides(seed)
    generator = torch.Generator().manual_seed(seed)
    values, gradients = rows(source, generator), rows(destination, generator)
    got, back = crossed(Crossing.make(source, destination), values, gradients, checked=True)
    wanted, wanted_back = oracle.crossed(listed(source), listed(destination), values, gradients, destination.number_of)
    assert all(map(torch.equal, got, wanted))
    assert all(map(torch.equal, back, wanted_back))


def test_backward_is_the_adjoint_of_forward():
    """<cross(x), g> = <x, back(g)> where each share is counted once on either side."""
    source, destination = random_sides(3)
    generator = torch.Generator().manual_seed(0)
    values, gradients = rows(source, generator), rows(destination, generator)
    got, back = crossed(Crossing.make(source, destination), values, gradients)

    def product(side, left, right):
        return sum(float((left[share.ranks[0]] * right[share.ranks[0]]).sum()) for share in side.shares)

    assert product(destination, got, gradients) == product(source, values, back) != 0


def test_each_distinct_token_is_sent_once_and_none_to_its_own_rank():
    """Rank 0 has both tokens; rank 1 reads one of them three times, rank 2 both, rank 0 one."""
    crossing = Crossing.make(
        Side((Share((0,), tokens([0, 1])), Share((1, 2), tokens([])))),
        Side((Share((0,), tokens([1])), Share((1,), tokens([0, 0, 0])), Share((2,), tokens([0, 1])))),
    )
    assert crossing.forward_RR.tolist() == [[1, 1, 2], [0, 0, 0], [0, 0, 0]]
    assert crossing.backward_RR.tolist() == crossing.forward_RR.T.tolist()
    assert repr(crossing) == "Crossing(3 ranks, 2 tokens; between ranks 3 rows forward, 3 backward)"


def test_replicas_share_the_work():
    """Four ranks read from two replicas: two each."""
    crossing = Crossing.make(
        Side((Share((0, 1), tokens([0])), Share((2, 3, 4, 5), tokens([])))),
        Side((Share((0, 1), tokens([])), Share((2, 3, 4, 5), tokens([0])))),
    )
    assert crossing.forward_RR[:2].sum(1).tolist() == [2, 2]
    assert crossing.backward_RR[2:].sum(1).tolist() == [1, 1, 0, 0]


def test_gradients_of_several_consumers_are_summed_in_float32():
    """1 + 8 * 2^-9 in bfloat16 one after another stays 1; summed first and rounded once it is 1 + 2^-6."""
    size = 9
    crossing = Crossing.make(
        Side((Share((0,), tokens([0])), Share(tuple(range(1, size)), tokens([])))),
        Side(tuple(Share((rank,), tokens([0])) for rank in range(size))),
    )
    values = [torch.ones(1 if rank == 0 else 0, 1, dtype=torch.bfloat16) for rank in range(size)]
    gradients = [torch.full((1, 1), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16) for rank in range(size)]
    _, back = crossed(crossing, values, gradients)
    assert float(back[0]) == 1 + 2.0**-6
    assert back[0].dtype == torch.bfloat16


def test_a_rank_without_an_encoder_takes_part_in_backward():
    crossing = Crossing.make(
        Side((Share((0,), tokens([0])), Share((1,), tokens([])))),
        Side((Share((0,), tokens([])), Share((1,), tokens([0])))),
    )

    def of_rank(mesh):
        rank = mesh["dp"].rank
        own = torch.ones(1, 2, requires_grad=True) if rank == 0 else torch.zeros(0, 2)
        (3 * crossing.cross(own, mesh["dp"])).sum().backward()
        return own.grad

    first, second = simulate(of_rank, dp=2)
    assert torch.equal(first, torch.full((1, 2), 3.0))
    assert second is None


def test_without_gradients_nothing_is_saved():
    source, destination = random_sides(3)
    crossing, values = Crossing.make(source, destination), rows(source, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not any(
            simulate(lambda mesh: crossing.cross(values[mesh["dp"].rank], mesh["dp"]).requires_grad, dp=len(values))
        )


ONE = Side((Share((0,), tokens([0, 1])),))


@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        (ONE, Side((Share((0, 1), tokens([0, 1])),)), "1 and 2 ranks"),
        (ONE, Side((Share((0,), tokens([0, 1, 2])),)), r"token 2 on ranks \(0,\)\n  found: no source rank holds it"),
        (ONE, Side((Share((0,), tokens([0])),)), "source of a bridge: token 1\n  found: no destination rank returns"),
        (ONE, Side((Share((0,), tokens([0, 1]), torch.tensor([True, False])),)), "source of a bridge: token 1"),
        (
            Side((Share((0,), tokens([0])), Share((1,), tokens([0])))),
            Side((Share((0, 1), tokens([0])),)),
            "token 0\n  found: two rows with this token",
        ),
        (Side((Share((0,), tokens([0, 0])),)), ONE, "token 0\n  found: two rows with this token"),
        (Side((Share((0,), tokens([0, 2])),)), Side((Share((0,), tokens([0, 1, 2])),)), "token 1 on ranks"),
    ],
)
def test_lost_and_doubled_tokens_are_refused(source, destination, words):
    with pytest.raises(ShardingError, match=words):
        Crossing.make(source, destination)


@pytest.mark.parametrize("values", [torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(1.0)])
def test_rows_that_are_not_those_of_the_share_are_refused(values):
    with pytest.raises(ShapeError, match=r"\[2, ...\] of floating point"):
        simulate(lambda mesh: Crossing.make(ONE, ONE).cross(values, mesh["dp"]))


def test_an_axis_of_other_ranks_is_refused():
    with pytest.raises(ShardingError, match="bridge between 1 ranks\n  found: an axis of 2"):
        simulate(lambda mesh: Crossing.make(ONE, ONE).cross(torch.zeros(2, 2), mesh["dp"]), dp=2)


SIDE = Side((Share((0, 2), torch.tensor([0, 1])), Share((1,), torch.tensor([0, -1]), torch.tensor([True, False]))))
HELD = [
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    torch.tensor([[1.0, 0.0], [5.0, 5.0]]),
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
]


def held(changed=None, to=None):
    def of_rank(mesh):
        rank = mesh["dp"].rank
        check_replicas(to if rank == changed else HELD[rank], SIDE, mesh["dp"], what="values")
        return True

    return simulate(of_rank, dp=3)


def test_replicas_may_differ_by_rounding_and_padding_may_be_anything():
    assert held() == [True] * 3
    assert held(2, HELD[2] * (1 + 1e-6)) == [True] * 3


@pytest.mark.parametrize(
    ("changed", "to", "words"),
    [
        (2, HELD[2] / 2, r"rank\(s\) \[2\] differ from rank 0"),
        (2, HELD[2].flip(0), r"rank\(s\) \[2\] differ from rank 0"),
        (2, HELD[2] * float("nan"), r"rank\(s\) \[2\] differ from rank 0"),
        (1, torch.zeros(2, 3), "rows of 2 and 3 numbers"),
        (1, torch.zeros(2, 2, dtype=torch.bfloat16), r"in 2 precision\(s\)"),
    ],
)
def test_differences_are_named(changed, to, words):
    with pytest.raises(ShardingError, match=words):
        held(changed, to)


def test_a_gradient_where_none_should_be_is_named():
    side = Side((Share((0,), torch.tensor([0, 1]), torch.tensor([True, False])),))
    with pytest.raises(ShardingError, match=r"something other than zero on rank\(s\) \[0\]"):
        simulate(lambda mesh: check_replicas(HELD[0], side, mesh["dp"], what="gradients"))
