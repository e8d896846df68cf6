import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError, SpecError
from workbench.faults import load_fault
from workbench.policy.model import load_policy
from workbench.sharding import data_parallel, flight, wire
from workbench.sharding.data_parallel import is_shard, reshard_parameters, shard_parameters
from workbench.sharding.gradients import full_gradients, full_weights, gradient_norms, sum_gradients
from workbench.sharding.mesh import AXES, Axis, Mesh, make_mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
RATE = 1e-4


class Net(nn.Module):
    """A unit, a head that is read and not called, and an unused layer; two ranks share no rows evenly."""

    def __init__(self):
        super().__init__()
        self.unit, self.head, self.unused = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 4)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).view_as(parameter) / 2**number)

    def forward(self, x):
        return self.unit(x)

    def loss(self, x):
        return (self(x) @ self.head.weight.T + self.head.bias).square().sum()


def whole_shards(net):
    return {name: ParameterShard() for name, _ in net.named_parameters()}


def sharded(mesh, dtype=torch.float64, **how):
    net = Net().to(dtype)
    return net, shard_parameters(net, [net.unit], whole_shards(net), mesh, **how)


def batch(rank, number, dtype=torch.float64):
    return torch.tensor([[1.0 + rank, 2.0 - number]], dtype=dtype)


def one_process(dtype, batches):
    """The gradients of both ranks' batches in one process."""
    net = Net().to(dtype)
    for rank in range(2):
        for number in range(batches):
            net.loss(batch(rank, number, dtype)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}


def gradients_of_ranks():
    """Two micro-batches in each precision, and the norms of the float64 ones."""
    mesh, result = make_mesh(dp=2), {}
    for dtype in DTYPES:
        net, shards = sharded(mesh, dtype)
        for number in range(2):
            net.loss(batch(mesh["dp"].rank, number, dtype)).backward()
        sum_gradients(net, shards, mesh)
        result[dtype] = full_gradients(net, shards, mesh)
        if dtype == torch.float64:
            norms = {name: float(norm) for name, norm in gradient_norms(net, shards, mesh).items()}
    return result, norms


def test_gradients_are_summed_over_ranks_and_micro_batches_in_every_precision(tmp_path):
    for result, norms in run_ranks(gradients_of_ranks, 2, tmp_path):
        for dtype in DTYPES:
            expected = one_process(dtype, 2)
            assert result[dtype].keys() == expected.keys()
            for name, gradient in expected.items():
                assert result[dtype][name].dtype == dtype
                torch.testing.assert_close(
                    result[dtype][name], gradient, rtol=0.02 if dtype == torch.bfloat16 else 1e-6, atol=0
                )
        for name, gradient in one_process(torch.float64, 2).items():
            assert norms[name] == pytest.approx(float(gradient.norm()), rel=1e-14), name
        assert norms["unused.weight"] == 0


def what_a_rank_holds(folder, reshard_after_forward):
    mesh = make_mesh(cp=2)
    rank = mesh["cp"].rank
    net, shards = sharded(mesh, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    flight.start(folder / f"rank{rank}.flight", rank)
    loss = net.loss(batch(rank, 0))
    between = is_shard(net.unit.weight)
    loss.backward()
    unit_is_shard = between, is_shard(net.unit.weight)
    entries = flight.read(folder / f"rank{rank}.flight").entries
    flight.stop()
    sum_gradients(net, shards, mesh)
    optimizer.step()
    held = {
        name: (tuple(p.to_local().shape), tuple(optimizer.state[p]["exp_avg"].to_local().shape))
        for name, p in net.named_parameters()
    }
    with torch.no_grad():
        losses = [float(net.loss(batch(0, 0)))]  # nothing goes backward, so parameters outside of units stay gathered
        for shard in optimizer.param_groups[0]["params"]:
            shard.mul_(2)
        losses.append(float(net.loss(batch(0, 0))))
    reshard_parameters(net)
    weights = full_weights(net, shards, mesh)
    collectives = [(e.name, e.axis, e.shape, e.dtype, e.caller.split(":")[0]) for e in entries]
    return held, collectives, losses, weights, unit_is_shard


@pytest.fixture(scope="module", params=[True, False], ids=["gathered_twice", "gathered_once"])
def reshard_after_forward(request):
    return request.param


@pytest.fixture(scope="module")
def held(reshard_after_forward, tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    return run_ranks(what_a_rank_holds, 2, folder, folder, reshard_after_forward)


def test_a_rank_has_its_rows_and_their_optimizer_state(held):
    (first, *_), (second, *_) = held
    assert first["unit.weight"] == ((2, 2), (2, 2))
    assert second["unit.weight"] == ((1, 2), (1, 2))
    assert first["head.weight"] == ((1, 3), (1, 3))
    assert second["head.weight"] == ((0, 3), (0, 3)), "the last piece may be empty"


def test_a_forward_without_a_backward_leaves_nothing_stale(held):
    for _, _, (before, after), weights, _ in held:
        net = Net().double()
        net.load_state_dict(weights)
        assert after == pytest.approx(net.loss(batch(0, 0)).item(), rel=1e-14)
        assert after != pytest.approx(before, rel=1e-3)


def trained_with_looks(reshard_after_forward):
    """Two SGD steps of two micro-batches, with forward passes that no backward follows at every point between them."""
    mesh = make_mesh(dp=2)
    net, shards = sharded(mesh, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def look():
        with torch.no_grad():
            net.loss(batch(0, 0))

    for _ in range(2):
        optimizer.zero_grad()
        for number in range(2):
            look()
            loss = net.loss(batch(mesh["dp"].rank, number))
            look()
            loss.backward()
        sum_gradients(net, shards, mesh)
        look()
        optimizer.step()
    reshard_parameters(net)
    return full_weights(net, shards, mesh)


def test_looks_between_micro_batches_and_steps_change_no_weight(reshard_after_forward, tmp_path):
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            for number in range(2):
                net.loss(batch(rank, number)).backward()
        optimizer.step()
    for weights in run_ranks(trained_with_looks, 2, tmp_path, reshard_after_forward):
        for name, weight in net.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-12, atol=0, msg=name)


def trained_after_an_error(reshard_after_forward):
    """A step that ends in the forward of its second micro-batch, and is begun again."""
    mesh = make_mesh(dp=2)
    net, shards = sharded(mesh, reshard_after_forward=reshard_after_forward)
    rank = mesh["dp"].rank
    net.loss(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net.loss(torch.ones(1, 5, dtype=torch.float64))
    reshard_parameters(net)
    are_shards = all(map(is_shard, net.parameters()))
    net.zero_grad()
    between = []
    for number in range(2):
        loss = net.loss(batch(rank, number))
        between.append((is_shard(net.head.weight), is_shard(net.unit.weight)))
        loss.backward()
    sum_gradients(net, shards, mesh)
    return are_shards, between, full_gradients(net, shards, mesh)


def test_a_step_after_one_that_an_error_ended_has_its_own_gradients_only(reshard_after_forward, tmp_path):
    for are_shards, between, gradients in run_ranks(trained_after_an_error, 2, tmp_path, reshard_after_forward):
        assert are_shards
        assert between == [(False, reshard_after_forward)] * 2, "units are kept as before"
        for name, gradient in one_process(torch.float64, 2).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-14, atol=0, msg=name)


class Row(nn.Module):
    """Three units, one after another, that note when they compute."""

    def __init__(self, noted):
        super().__init__()
        self.units, self.noted = nn.ModuleList(nn.Linear(2, 2).double() for _ in range(3)), noted
        for number, unit in enumerate(self.units):
            unit.forward = functools.partial(self.unit_forward, number, unit.forward)

    def unit_forward(self, number, forward, x):
        self.noted.append(number)
        return forward(x)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


def gathered_ahead(reshard_after_forward, unit_layers):
    """Three layers: what is gathered and computed in order; and the output after a forward that ended in the first."""
    mesh, noted = make_mesh(dp=2), []
    plain, net = Row([]), Row(noted)
    net.load_state_dict(plain.state_dict())
    gather = wire.all_gather_into

    def noting(output, *others):
        noted.append("gather")
        gather(output, *others)

    wire.all_gather_into = noting
    how = {"reshard_after_forward": reshard_after_forward, "unit_layers": unit_layers}
    shards = shard_parameters(net, list(net.units), whole_shards(net), mesh, **how)
    net(torch.ones(1, 2).double()).sum().backward()
    held, order = list(net.parameters()), list(noted)  # held as by an optimizer
    with torch.no_grad():
        for parameter in held:
            parameter.mul_(2.0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(1, 5).double())
    with torch.no_grad():
        for parameter in held:
            parameter.div_(2.0)  # what was gathered for the forward that failed is old
    net.zero_grad()
    noted.clear()
    x, outputs = torch.full((1, 2), 3.0).double(), []
    for one in (net, plain):
        outputs.append(one(x))
        outputs[-1].square().sum().backward()
    after_error = list(noted)
    sum_gradients(net, shards, mesh)
    gradients = full_gradients(net, shards, mesh)
    of_both = [(outputs[0].detach(), outputs[1].detach())]
    of_both += [(gradients[name], 2 * one.grad) for name, one in plain.named_parameters()]  # two ranks, the same tokens
    return order, after_error, of_both


@pytest.mark.parametrize("unit_layers", [1, 2])
def test_a_unit_is_gathered_while_the_one_before_it_computes(reshard_after_forward, unit_layers, tmp_path):
    """And no weight that was gathered ahead of an error, before the optimizer's next step, is used after it."""
    again = ["gather"] * (3 // unit_layers + unit_layers // 2) if reshard_after_forward else []
    expected = {1: ["gather", "gather", 0, "gather", 1, 2], 2: ["gather", "gather", 0, 1, 2]}[unit_layers]
    for order, after_error, of_both in run_ranks(gathered_ahead, 2, tmp_path, reshard_after_forward, unit_layers):
        assert order == [*expected, *again]
        assert after_error == order
        for sharded_value, plain in of_both:
            torch.testing.assert_close(sharded_value, plain, rtol=1e-14, atol=0)


class Failing(torch.autograd.Function):
    """Passes values on, and fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def passed_after_an_error_in_backward(reshard_after_forward):
    """The error of a forward after a backward that ended in the second unit."""
    mesh, net = make_mesh(dp=2), Row([])
    shard_parameters(net, list(net.units), whole_shards(net), mesh, reshard_after_forward=reshard_after_forward)
    forward = net.units[1].forward
    net.units[1].forward = lambda x: Failing.apply(forward(x))
    with pytest.raises(ZeroDivisionError):
        net(torch.ones(1, 2).double()).sum().backward()
    with torch.no_grad(), pytest.raises(ShardingError) as caught:
        net(torch.ones(1, 2).double())
    return str(caught.value)


def test_no_forward_follows_a_backward_that_ended_with_an_error(reshard_after_forward, tmp_path):
    """Its weights would be old after the optimizer's next step."""
    for message in run_ranks(passed_after_an_error_in_backward, 2, tmp_path, reshard_after_forward):
        assert "a backward before it that ended with an error" in message
        assert "load the policy again" in message


def test_a_unit_is_whole_between_forward_and_backward_only_without_resharding(reshard_after_forward, held):
    for *_, unit_is_shard in held:
        assert unit_is_shard == (reshard_after_forward, True)


def test_its_collectives_are_in_the_flight_record(reshard_after_forward, held):
    """Forward the root (4 and 8 weights, padded to 8 a rank) and the unit (9, padded to 6), backward the unit again.

    Of the root, torch 2.11 scatters the gradient of the head alone, and none of the unused layer.
    """
    root = "16" if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else "8"
    for _, entries, *_ in held:
        assert [entry[:4] for entry in entries] == [
            ("gather_parameters", "dp_cp", "8", "float64"),
            *[("gather_parameters", "dp_cp", "6", "float64")] * (1 + reshard_after_forward),
            ("scatter_gradients", "dp_cp", root, "float64"),
            ("scatter_gradients", "dp_cp", "12", "float64"),
        ]
        assert {entry[4] for entry in entries} == {"sharding/test_data_parallel.py"}


def refusals():
    mesh = make_mesh(dp=2)
    policy = load_policy("tiny-qwen3", mesh=mesh, shard_parameters=True)
    texts = []
    try:
        policy.head_arguments()
    except ShardingError as error:
        texts.append(str(error))
    try:
        load_fault("skipped_collective").broken(sum_gradients)(policy.model, policy.shards, mesh)
    except SpecError as error:
        texts.append(str(error))
    data_parallel.NEEDED = (*data_parallel.NEEDED, "set_no_such_thing")
    try:
        sharded(mesh)
    except ShardingError as error:
        texts.append(str(error))
    return texts, is_shard(policy.model.lm_head.weight)


def test_invalid_settings_are_refused(tmp_path):
    for (head, fault, torch_of_old), is_a_part in run_ranks(refusals, 2, tmp_path):
        assert "this rank's shard of its weight" in head
        assert "call hidden_states before" in head
        assert "gradients that backward has summed over dp x cp" in fault
        assert "without set_no_such_thing" in torch_of_old
        assert is_a_part


def test_simulated_ranks_are_refused():
    class Pretended:
        rank = 0

        def exchange(self, tensor):
            return [tensor, tensor]

    axes = {name: Axis(name) for name in AXES} | {"dp_cp": Axis("dp_cp", 2, 0, Pretended(), range(2))}
    with pytest.raises(ShardingError, match="simulated ranks"):
        sharded(Mesh(axes, torch.device("cpu")))


def test_on_one_rank_there_is_nothing_to_shard():
    net, shards = sharded(single_process_mesh())
    assert shards == whole_shards(net)
    assert not any(is_shard(parameter) for parameter in net.parameters())
