import pytest
import torch
from torch import nn

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding.gradients import full_gradients, sum_gradients
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.sequence_parallel import Stream
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import (
    ParameterShard,
    apply_tensor_parallel,
    check_heads,
    defer_input_sums,
    full_gradient,
    local_part,
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


def test_heads_indivisible_by_tp_are_refused():
    with pytest.raises(ShardingError) as caught:
        check_heads({"query": 4, "key/value": 2}, Axis("tp", 4, 0))
    assert str(caught.value) == (
        "tensor parallelism over tp=4\n"
        "  found: 2 key/value heads\n"
        "  rule: tp divides the query heads and the key/value heads\n"
        "  do: choose tp among the common divisors of [2, 4]"
    )


def test_ranges_cover_an_uneven_vocabulary_exactly_once():
    ranges = [shard_range(19, Axis("tp", 4, rank), what="vocabulary") for rank in range(4)]
    assert ranges == [(0, 5), (5, 10), (10, 15), (15, 19)]


def test_a_rank_without_vocabulary_is_refused():
    with pytest.raises(ShardingError, match="leave a rank empty"):
        shard_range(9, Axis("tp", 4, 0), what="vocabulary")  # pieces of 3: the fourth rank gets nothing


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"up": "mla_kv_a_proj"}, "'up' is 'mla_kv_a_proj'"),
        ({"gate": "colwise"}, "no module of that name"),
        ({"gate": "packed_colwise"}, "no parameter of that name"),
        ({"up": "moe_tp_experts"}, "up.weight, up.bias left whole"),
    ],
)
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


@pytest.mark.parametrize("bias", [False, True])
def test_an_output_head_has_whole_rows_of_its_slice_of_the_vocabulary(bias):
    def sliced(mesh):
        torch.manual_seed(0)
        model = nn.ModuleDict({"head": nn.Linear(3, 5, bias=bias)})
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
        shards = apply_tensor_parallel(model, {"head": "vocabulary_head"}, mesh["tp"])
        start, stop = ((0, 3), (3, 5))[mesh["tp"].rank]
        for name, value in model.named_parameters():
            assert torch.equal(value, whole[name][start:stop]), name
            assert torch.equal(local_part(whole[name], shards[name], mesh["tp"]), value), name
        return len(whole)

    assert simulate(sliced, tp=2) == [1 + bias] * 2


class Transposed(nn.Module):
    """A linear layer that stores its weight as [inputs, outputs]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.nf, self.weight = outputs, nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return (x.reshape(-1, x.shape[-1]) @ self.weight + self.bias).view(*x.shape[:-1], self.nf)


class Mixer(nn.Module):
    """Three sections of one layer, a whole norm between cut layers, and a bias after the sum."""

    def __init__(self, kind):
        super().__init__()
        self.into, self.out, self.norm = kind(4, 12), kind(4, 4), nn.Parameter(torch.randn(1))

    def forward(self, hidden_states):
        a, b, c = self.into(hidden_states).chunk(3, dim=-1)
        return self.out((torch.tanh(a) * b + c) * self.norm)


class Gathered(nn.Module):
    """A norm over all features between the cut layers: they are gathered for it, and split again."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, hidden_states):
        return self.out(self.norm(self.into(hidden_states)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, hidden, chosen, weights):
        gate, up = torch.einsum("td,tfd->tf", hidden, self.up[chosen[:, 0]]).chunk(2, dim=-1)
        return torch.einsum("tf,tdf->td", torch.tanh(gate) * up, self.down[chosen[:, 0]]) * weights


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), Experts()

    def forward(self, hidden):
        flat = hidden.view(-1, 4)
        weights, chosen = torch.softmax(self.router(flat), -1).topk(1)
        return self.experts(flat, chosen, weights).view(hidden.shape)


class Layer(nn.Module):
    """Every kind of block, and a feed-forward whose layers are children of the layer itself."""

    def __init__(self):
        super().__init__()
        self.mixer, self.turned = Mixer(nn.Linear), Mixer(Transposed)
        self.gathered, self.mixture, self.norm = Gathered(), Mixture(), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = x + self.mixer(hidden_states=self.norm(x))
        x = x + self.turned(x)
        x = x + self.gathered(self.norm(x))
        x = x + self.mixture(x)
        return x + self.down(torch.tanh(self.up(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places, self.layers = nn.Embedding(5, 4), nn.Embedding(8, 4), nn.ModuleList([Layer(), Layer()])

    def forward(self, tokens):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1])[None])
        for layer in self.layers:
            x = layer(x)
        return x


EVERYTHING = {
    "embed": "embedding_rowwise",
    "places": "positions",
    "layers.*.mixer.into": "colwise_of_three",
    "layers.*.mixer.out": "rowwise",
    "layers.*.turned.into": "colwise_of_three",
    "layers.*.turned.out": "rowwise",
    "layers.*.gathered.into": "colwise_gather_output",
    "layers.*.gathered.out": "rowwise_split_input",
    "layers.*.mixture.experts": "moe_tp_experts",
    "layers.*.mixture.experts.up": "packed_colwise",
    "layers.*.mixture.experts.down": "rowwise",
    "layers.?.up": "colwise",
    "layers.?.down": "rowwise",
}
STEP = [torch.tensor([[0, 4, 2, 1]]), torch.tensor([[3, 3, 0, 4]])]


def decoder():
    torch.manual_seed(0)
    model = Decoder().double()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)  # hidden states of a size at which a sine is sensitive
    return model


def drive(model, gather=lambda hidden: hidden):
    """Hidden states of two micro-batches, and their gradients added up."""
    results = []
    for tokens in STEP:
        hidden = gather(model(tokens))
        (hidden * torch.linspace(-1, 2, hidden.numel(), dtype=torch.float64).view_as(hidden)).sin().sum().backward()
        results.append(hidden.detach())
    return results


def cut_decoder(sharded):
    mesh = make_mesh(tp=2)
    model = decoder()
    shards = apply_tensor_parallel(model, EVERYTHING, mesh["tp"], sequence_parallel=sharded)
    result = drive(model, Stream(mesh["tp"], sharded).all_tokens)
    sum_gradients(model, shards, mesh)
    return result, full_gradients(model, shards, mesh), shards


@pytest.mark.parametrize("sharded", [False, True])
def test_every_style_equals_the_whole_model_with_tokens_whole_or_sharded(sharded, tmp_path):
    model = decoder()
    expected = drive(model)
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    for result, gradients, shards in run_ranks(cut_decoder, 2, tmp_path, sharded):
        for hidden, other in zip(result, expected, strict=True):
            torch.testing.assert_close(hidden, other, rtol=0, atol=1e-12)
        assert_float64_parity(gradients, whole, context="two ranks")
        partial = {name for name, shard in shards.items() if shard.gradient_is_partial}
        always = {
            f"layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("mixer.norm", "turned.norm", "gathered.norm.weight", "gathered.norm.bias")
        }
        between = {
            f"layers.{layer}.{name}"
            for layer in (0, 1)
            for name in (
                "norm.weight",
                "norm.bias",
                "mixer.out.bias",
                "turned.out.bias",
                "gathered.out.bias",
                "mixture.router.weight",
                "mixture.router.bias",
                "down.bias",
            )
        } | {"places.weight"}
        assert partial == always | (between if sharded else set())


def test_hidden_states_enter_a_block_once(monkeypatch):
    entered = []
    monkeypatch.setattr(Stream, "into", lambda self, hidden: entered.append(hidden.shape) or hidden)
    model = nn.Module()
    model.block = nn.Module()
    model.block.gate, model.block.up, model.block.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
    model.block.forward = lambda x: model.block.down(model.block.gate(x) * model.block.up(x))
    apply_tensor_parallel(model, {"block.gate": "colwise", "block.up": "colwise", "block.down": "rowwise"}, TWO)
    model.block(torch.zeros(1, 2, 4))
    assert entered == [(1, 2, 4)]


def test_a_block_that_is_called_in_another_way_is_refused():
    model = nn.ModuleDict({"block": Mixer(nn.Linear)})
    apply_tensor_parallel(model, {"block.into": "colwise", "block.out": "rowwise"}, TWO)
    with pytest.raises(ShardingError, match="found: a call with states"):
        model["block"](states=torch.zeros(1, 2, 4))


def test_sections_of_a_packed_parameter_come_back_in_order():
    shard = ParameterShard(0, parts=(4, 4))
    assert torch.equal(full_gradient(torch.arange(8), shard, Axis("tp")), torch.arange(8))


@pytest.mark.parametrize(
    ("shard", "shape", "tp"),
    [
        (ParameterShard(), (5, 3), 2),
        (ParameterShard(0), (19, 3), 2),
        (ParameterShard(0), (19,), 4),
        (ParameterShard(1), (3, 8), 2),
        (ParameterShard(0, parts=(6, 6)), (12, 2), 2),
        (ParameterShard(1, parts=(4, 4, 4)), (2, 12), 4),
    ],
)
def test_a_part_is_the_way_back_from_the_whole(shard, shape, tp):
    whole = torch.randn(shape)

    def there_and_back(mesh):
        part = local_part(whole, shard, mesh["tp"])
        return part, full_gradient(part, shard, mesh["tp"])

    for part, again in simulate(there_and_back, tp=tp):
        assert torch.equal(again, whole)
        assert (part.numel() < whole.numel()) == (shard.dim is not None)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_local_part_matches_a_sharded_model(sharded):
    """Packed sections and experts too."""
    whole = dict(decoder().named_parameters())

    def check(mesh):
        model = decoder()
        shards = apply_tensor_parallel(model, EVERYTHING, mesh["tp"], sequence_parallel=sharded)
        assert {shard.dim for shard in shards.values()} == {None, 0, 1, 2}
        return [
            name
            for name, held in model.named_parameters()
            if not torch.equal(local_part(whole[name], shards[name], mesh["tp"]), held)
        ]

    assert simulate(check, tp=2) == [[], []]


def test_sums_at_the_input_of_a_block_can_be_left_to_others():
    def gradient_at_input(mesh):
        torch.manual_seed(0)
        model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})}).double()
        model["mlp"].forward = lambda hidden: model["mlp"]["down"](model["mlp"]["up"](hidden))
        apply_tensor_parallel(model, {"mlp.up": "colwise", "mlp.down": "rowwise"}, mesh["tp"])
        results = []
        for to_others in (False, True, False):
            defer_input_sums(model, deferred=to_others)
            hidden = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
            model["mlp"](hidden).sum().backward()
            results.append(hidden.grad)
        return results

    (first, second) = simulate(gradient_at_input, tp=2)
    (whole, part, again) = first
    torch.testing.assert_close(part + second[1], whole)
    assert not torch.allclose(part, whole)
    assert torch.equal(again, whole)


def test_sums_of_sequence_parallelism_cannot_be_left_to_others():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})})
    apply_tensor_parallel(model, {"mlp.up": "colwise", "mlp.down": "rowwise"}, TWO, sequence_parallel=True)
    with pytest.raises(ShardingError, match="sequence parallelism"):
        defer_input_sums(model, deferred=True)
    defer_input_sums(model, deferred=False)
