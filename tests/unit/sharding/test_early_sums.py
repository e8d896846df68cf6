"""Sums that start in backward, over gloo, whose sums run asynchronously too: order, idle ranks, and refused misuse."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.sharding import early_sums, gradients
from workbench.sharding.early_sums import EarlySums
from workbench.sharding.mesh import Mesh, make_mesh
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard

SIZES = {"first": 3, "second": 4, "third": 2, "unused": 1, "head": 5}
BYTES = 7 * 4
"""Of a bucket: first and second share one, third and unused another, and the head has its own."""


def parameters():
    return {name: nn.Parameter(torch.full((size,), 2.0)) for name, size in SIZES.items()}


@contextlib.contextmanager
def starts():
    """Sizes of the sums that start, and whether that is inside a backward."""
    seen, plain = [], early_sums.start_all_sum_

    def noted(bucket, axis):
        seen.append((sum(map(torch.numel, bucket)), torch._C._current_graph_task_id() != -1))
        return plain(bucket, axis)

    early_sums.start_all_sum_ = noted
    try:
        yield seen
    finally:
        early_sums.start_all_sum_ = plain


def backward_of(named, used, factor):
    """Gradients are ``factor`` times (1 + the place in `SIZES`); backward reaches the last of ``used`` first."""
    total = torch.zeros(())
    for name in used:
        total = total + factor * (1 + list(SIZES).index(name)) * named[name].sum()
    return total


def two_ranks(mesh):
    axis, outcome = mesh["dp_cp"], {}
    for case, used in {
        "all": ("first", "second", "third", "head"),
        "head first and last": ("head", "first", "second", "third"),
        "idle": ("first", "second", "third") if axis.rank else ("first", "second", "third", "head"),
    }.items():
        named = parameters()
        early = EarlySums(list(named.values()), axis, torch.float64 if case == "all" else None, bucket_bytes=BYTES)
        with starts() as seen:
            for last in (False, True):
                with early.during(last=last):
                    backward_of(named, used, 10.0**axis.rank).backward()
            early.finish()
        outcome[case] = seen, {name: (one.grad.tolist(), str(one.grad.dtype)) for name, one in named.items()}
    return outcome


def all_of_two_ranks():
    mesh = make_mesh(dp=2)
    return two_ranks(mesh), chain_of_two_ranks(mesh), misuse_of_two_ranks(mesh)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return list(zip(*run_ranks(all_of_two_ranks, 2, tmp_path_factory.mktemp("early")), strict=True))


def test_sums_start_in_one_order_as_gradients_are_complete(ranks):
    first, second = ranks[0]
    whole = {name: ([22.0 * (1 + place)] * size, "torch.float32") for place, (name, size) in enumerate(SIZES.items())}
    whole["unused"] = ([0.0], "torch.float32")
    for rank in (first, second):
        # in float64 a bucket has half as many; an unused parameter keeps those behind it until backward ends
        assert [size for size, _ in rank["all"][0]] == [5, 3, 4, 3]
        assert [inside for _, inside in rank["all"][0]] == [True, False, False, False]
        assert [size for size, _ in rank["head first and last"][0]] == [5, 3, 7]
        assert rank["all"][1] == rank["head first and last"][1] == whole
    assert [size for size, _ in first["idle"][0]] == [size for size, _ in second["idle"][0]] == [5, 3, 7]
    assert first["idle"][1] == second["idle"][1] == whole | {"head": ([10.0] * 5, "torch.float32")}


def chain_of_two_ranks(mesh):
    """Layers whose gradients come one after another; the second rank has none of the head."""
    torch.manual_seed(mesh["dp"].rank)
    layers = nn.ModuleDict({f"layer{number}": nn.Linear(3, 3) for number in range(4)})
    early = EarlySums(list(layers.parameters()), mesh["dp_cp"], bucket_bytes=12 * 4)
    values = torch.randn(2, 3)
    for layer in list(layers.values())[: 3 if mesh["dp"].rank else 4]:
        values = torch.tanh(layer(values))
    with starts() as seen, early.during(last=True):
        values.sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in layers.named_parameters()}
    early.finish()
    return seen, before, {name: parameter.grad for name, parameter in layers.named_parameters()}


def test_a_rank_without_a_gradient_starts_the_same_sums_later(ranks):
    (first, own, summed), (second, others, again) = ranks[1]
    assert first == [(12, True)] * 4, "one sum for each layer, before its input's gradient"
    assert second == [(12, False)] * 4, "the head comes first, and has none"
    for name, total in summed.items():
        assert torch.equal(total, own[name] + others[name])
        assert torch.equal(total, again[name])


def misuse_of_two_ranks(mesh):
    axis, messages = mesh["dp_cp"], []
    # a gradient changed while it travels, or completed twice; a backward that failed
    named = parameters()
    early = EarlySums(list(named.values()), axis)
    with early.during(last=True):
        backward_of(named, SIZES, 1.0).backward()
    named["third"].grad.mul_(2)
    with pytest.raises(AssertionError) as caught:
        early.finish()
    messages.append(str(caught.value))
    named = parameters()
    early = EarlySums(list(named.values()), axis, bucket_bytes=4)
    first = named["first"] * 1
    first.register_hook(lambda gradient: 1 / 0)
    total = backward_of(named | {"first": first}, ("first", "head"), 1.0)
    with starts() as seen, pytest.raises(ZeroDivisionError), early.during(last=True):
        total.backward()
    messages.append(str(seen))
    backward_of(named, SIZES, 1.0).backward()  # its hooks are gone
    messages.append(str(len(early._arrivals)))
    with pytest.raises(AssertionError) as caught:
        early.finish()
    return [*messages, str(caught.value)]


def test_misuse_is_noticed(ranks):
    for changed, started, after, unfinished in ranks[2]:
        assert "nothing writes to gradients" in changed
        assert started == "[(5, True)]", "the sum of the head; none once the backward has failed"
        assert after == "1"
        assert "starts all sums" in unfinished


def chosen(mesh, *, with_group_of=""):
    if with_group_of:
        mesh = Mesh(mesh.axes | {"dp_cp": replace(mesh[with_group_of], name="dp_cp")}, mesh.device)
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("whole", "expert", "frozen")})
    model["frozen"].requires_grad_(False)
    shards = {"whole": ParameterShard(), "expert": ParameterShard(over_ep=mesh["ep"].size > 1)}
    early = gradients.early_sums(model, shards | {"frozen": ParameterShard()}, mesh)
    return None if early is None else {name for name, parameter in model.items() if parameter in early}


@pytest.mark.parametrize(
    ("layout", "with_group_of", "names"),
    [
        ({"dp": 2}, "", {"whole", "expert"}),
        ({"dp": 2, "tp": 2}, "", {"whole", "expert"}),
        ({"dp": 2, "cp": 2}, "", {"whole", "expert"}),
        ({"dp": 4, "ep": 2}, "", {"whole"}),  # experts are summed over edp, after backward
        ({"dp": 2, "ep": 2}, "ep", None),  # backward has collectives of the same group
        ({"cp": 2}, "", {"whole", "expert"}),
        ({"cp": 2}, "cp", None),
        ({"tp": 2}, "", None),
    ],
)
def test_sums_start_early_where_backward_has_no_other_collective_of_the_group(
    layout, with_group_of, names, monkeypatch
):
    choose = functools.partial(chosen, with_group_of=with_group_of)
    assert set(simulate(choose, **layout)) == {None}, "simulated ranks wait in a sum"
    monkeypatch.setattr(gradients, "overlaps", lambda group: True)
    assert all(answer == names for answer in simulate(choose, **layout))
