import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.tensor_parallel import (
    ParameterShard,
    apply_tensor_parallel,
    check_heads,
    full_gradient,
    shard_range,
)

TWO = Axis("tp", 2, 0)


def small():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.embed = nn.Embedding(5, 4, padding_idx=1)
    model.up = nn.Linear(4, 6, bias=True)
    model.down = nn.Linear(6, 4, bias=True)
    model.double()
    return model


def flow(model, tokens):
    return model.down(torch.tanh(model.up(model.embed(tokens))))


PLAN = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise"}


def sharded_gradients():
    axis = make_mesh(tp=2)["tp"]
    model = small()
    shards = apply_tensor_parallel(model, PLAN, axis)
    out = flow(model, torch.tensor([0, 4, 2, 1]))
    out.square().sum().backward()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return out.detach(), {n: full_gradient(p.grad, shards[n], axis) for n, p in model.named_parameters()}, shapes


def test_column_row_and_embedding_equal_the_whole_model(tmp_path):
    model = small()
    expected = flow(model, torch.tensor([0, 4, 2, 1]))
    expected.square().sum().backward()
    for rank, (out, gradients, shapes) in enumerate(run_ranks(sharded_gradients, 2, tmp_path)):
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-13)
        assert shapes["embed.weight"] == ((3, 4), (2, 4))[rank]  # five rows over two ranks
        for name, parameter in model.named_parameters():
            # The whole model's padding row has no gradient, a slice has no padding row.
            rows = [0, 2, 3, 4] if name == "embed.weight" else slice(None)
            torch.testing.assert_close(gradients[name][rows], parameter.grad[rows], rtol=0, atol=1e-12)


def test_heads_that_tp_does_not_divide_are_refused_in_words():
    with pytest.raises(ShardingError) as caught:
        check_heads({"query": 4, "key/value": 2}, Axis("tp", 4, 0))
    assert str(caught.value) == (
        "tensor parallelism over tp=4\n"
        "  found: 2 key/value heads\n"
        "  rule: tp divides the query heads and the key/value heads\n"
        "  do: choose tp among the common divisors of [2, 4]")


def test_ranges_cover_an_uneven_vocabulary_once():
    ranges = [shard_range(19, Axis("tp", 4, rank), what="vocabulary") for rank in range(4)]
    assert ranges == [(0, 5), (5, 10), (10, 15), (15, 19)]


def test_a_rank_without_vocabulary_is_refused():
    with pytest.raises(ShardingError, match="leave a rank empty"):
        shard_range(9, Axis("tp", 4, 0), what="vocabulary")  # pieces of 3: the fourth rank gets nothing


@pytest.mark.parametrize(("plan", "message"), [
    ({"up": "moe_tp_experts"}, "'up' is 'moe_tp_experts'"), ({"gate": "colwise"}, "no module of that name")])
def test_a_plan_that_is_not_understood_is_refused_by_name(plan, message):
    with pytest.raises(ShardingError, match=message):
        apply_tensor_parallel(small(), plan, TWO)


def test_features_that_tp_does_not_divide_are_refused():
    with pytest.raises(ShardingError, match="6 features"):
        apply_tensor_parallel(small(), {"up": "colwise"}, Axis("tp", 4, 0))


def test_one_rank_changes_nothing():
    model = small()
    shards = apply_tensor_parallel(model, PLAN, Axis("tp"))
    assert set(shards.values()) == {ParameterShard()}
    assert model.up.weight.shape == (6, 4)
