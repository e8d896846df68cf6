import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.sequence_parallel import Stream


def data():
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 6, 4), (4, 8), (8, 4), (6, 4)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


def network(x, up, down, scale, stream, places):
    """x * scale, a block of two layers around a residual sum, something of each place, and a loss on all tokens."""
    x = x * scale
    x = x + stream.out_of(torch.tanh(stream.into(x) @ up) @ down) + stream.local_tokens(places[None])
    return stream.all_tokens(x)


def one_rank():
    x, up, down, places = (tensor.requires_grad_() for tensor in data())
    scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
    out = network(x, up, down, scale, Stream(Axis("tp")), places)
    out.sin().sum().backward()
    return out.detach(), [tensor.grad for tensor in (x, up, down, scale, places)]


def a_rank(sharded):
    axis = make_mesh(tp=2)["tp"]
    x, up, down, places = data()
    local = x.chunk(2, dim=1)[axis.rank] if sharded else x
    leaves = [
        tensor.clone().requires_grad_()
        for tensor in (
            local,
            up.chunk(2, dim=1)[axis.rank],
            down.chunk(2, dim=0)[axis.rank],
            torch.ones(4).double(),
            places,
        )
    ]
    local, up, down, scale, places = leaves
    out = network(local, up, down, scale, Stream(axis, sharded), places)
    out.sin().sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_block_on_two_ranks_is_the_block_on_one(sharded, tmp_path):
    out, (of_x, of_up, of_down, of_scale, of_places) = one_rank()
    ranks = run_ranks(a_rank, 2, tmp_path, sharded)
    close = {"rtol": 0, "atol": 1e-13}
    for result, _ in ranks:
        torch.testing.assert_close(result, out, **close)
    (x0, up0, down0, scale0, places0), (x1, up1, down1, scale1, places1) = (gradients for _, gradients in ranks)
    if sharded:  # a part each, which one sum completes
        torch.testing.assert_close(torch.cat([x0, x1], dim=1), of_x, **close)
        torch.testing.assert_close(scale0 + scale1, of_scale, **close)
        torch.testing.assert_close(places0 + places1, of_places, **close)
    else:  # whole on every rank
        for whole, both in ((of_x, (x0, x1)), (of_scale, (scale0, scale1)), (of_places, (places0, places1))):
            torch.testing.assert_close(torch.stack(both), torch.stack([whole, whole]), **close)
    torch.testing.assert_close(torch.cat([up0, up1], dim=1), of_up, **close)
    torch.testing.assert_close(torch.cat([down0, down1], dim=0), of_down, **close)


def test_tokens_indivisible_by_tp_are_refused():
    for way in ("out_of", "local_tokens"):
        with pytest.raises(ShardingError) as caught:
            getattr(Stream(Axis("tp", 2), sharded=True), way)(torch.zeros(1, 7, 4))
        assert str(caught.value) == (
            "sequence parallelism of 7 tokens over tp=2\n"
            "  rule: tp divides the tokens of a cp rank\n"
            "  do: pad rows to a multiple of cp * tp tokens (data.multiple_of unset does it)"
        )


def test_tokens_that_are_not_sharded_need_divide_by_nothing():
    hidden = torch.zeros(1, 7, 4)
    stream = Stream(Axis("tp", 2))
    assert (
        stream.out_of(hidden).shape
        == stream.local_tokens(hidden).shape
        == stream.all_tokens(hidden).shape
        == hidden.shape
    )
