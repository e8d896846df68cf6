"""A whole sequence cut over given groups, and the gradient that comes back to each rank."""

import pytest
import torch

from tests.oracles import bridge as oracle
from workbench.errors import ShardingError
from workbench.sharding.bridge.partition import SequencePartition, owned_positions
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

WHOLE = torch.arange(2 * 24.0).view(2, 24, 1)


def split(mesh, *, sequence_parallel, dim=1):
    """On a rank: its tokens, and the gradient of the whole if it brings 1 + its rank for each of its tokens."""
    whole = WHOLE.movedim(1, dim).clone().requires_grad_()
    partition = SequencePartition(mesh["cp"], "zigzag", *([mesh["tp"]] if sequence_parallel else []))
    mine = partition.split(whole, dim=dim)
    mine.backward(torch.full_like(mine, 1.0 + mesh["tp"].rank if sequence_parallel else 1.0))
    return mine.detach().movedim(dim, 1), whole.grad.movedim(dim, 1)


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_cp_ranks_get_their_zigzag_and_bring_zero_elsewhere(cp, dim):
    found = simulate(lambda mesh: split(mesh, sequence_parallel=False, dim=dim), cp=cp, tp=2)
    for rank, (mine, gradient) in enumerate(found):
        places = oracle.zigzag(24, cp, rank // 2)
        assert torch.equal(mine, WHOLE[:, places])
        assert gradient[0, :, 0].nonzero().squeeze(1).tolist() == places
    assert torch.equal(sum(gradient for _, gradient in found[::2]), torch.ones_like(WHOLE))


def test_tp_ranks_get_stretches_and_the_gradient_of_all_of_them():
    """2 cp x 3 tp: a stretch of 4 tokens; what comes back is 1, 2, 3 at the stretches of tp 0, 1, 2 on each of them."""
    for rank, (mine, gradient) in enumerate(simulate(lambda mesh: split(mesh, sequence_parallel=True), cp=2, tp=3)):
        places = oracle.zigzag(24, 2, rank // 3)
        assert torch.equal(mine, WHOLE[:, oracle.stretch(places, 3, rank % 3)])
        wanted = torch.zeros(24)
        for tp in range(3):
            wanted[oracle.stretch(places, 3, tp)] = 1.0 + tp
        assert torch.equal(gradient[0, :, 0], wanted)


@pytest.mark.parametrize(
    ("tokens", "sizes", "words"),
    [
        (6, {"cp": 2}, "6 tokens over cp=2"),
        (12, {"cp": 2, "tp": 4}, r"12 tokens over cp=2 and tp=4 \(I13\)\n  found: 6 tokens on a cp rank"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(tokens, sizes, words):
    with pytest.raises(ShardingError, match=words):
        simulate(
            lambda mesh: SequencePartition(mesh["cp"], "zigzag", mesh["tp"]).split(torch.zeros(1, tokens), dim=1),
            **sizes,
        )


def test_a_sequence_of_one_rank_is_as_it_was():
    assert torch.equal(SequencePartition(Axis("cp")).split(WHOLE, dim=1), WHOLE)
    assert owned_positions("zigzag", 3, 1).tolist() == [[0, 1, 2]], "any length, where nothing is cut"
    assert owned_positions("document_zigzag", 8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
