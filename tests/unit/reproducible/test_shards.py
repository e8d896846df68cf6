"""Sums over ranks of parameters as they lie: whole, cut over tp, or dealt in rows over dp x cp."""

import dataclasses

import pytest
import torch

from workbench.policy.model import load_policy
from workbench.reproducible import Resolution, install, parts
from workbench.reproducible.exact_sums import Accumulator, Leaves
from workbench.reproducible.kernels import plain
from workbench.reproducible.shards import LocalParameter, local_parameters, own_rows, sum_over_ranks
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard


def as_they_are(total, dtype):
    return total


def one_number(total):
    number, *others = total.unique().tolist()
    assert not others
    return number


@pytest.mark.parametrize("bucket", [2**23, 1, 3000])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gradients_are_finished_in_parts_and_whole_everywhere(ranks, bucket, monkeypatch):
    monkeypatch.setattr(parts, "BUCKET", bucket)
    given = {}

    def summed(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh)
        exact = install(policy, Resolution(4))
        for number, (name, accumulator) in enumerate(exact.accumulators.items()):
            drawn = torch.randint(-(2**40), 2**40, accumulator.shape, generator=torch.Generator().manual_seed(number))
            accumulator.total.copy_(drawn + mesh["dp"].rank)
            given[name] = ranks * drawn + ranks * (ranks - 1) // 2
        held = local_parameters(policy)
        return dict(sum_over_ranks(exact.accumulators, held, mesh, plain_half))

    for result in simulate(summed, dp=ranks):
        assert set(result) == set(given)
        for name, total in given.items():
            assert torch.equal(result[name], plain_half(total, torch.float32)), name


def held_of(sizes):
    """Whole parameters and accumulators full of their own numbers; sizes and dtypes from the last to the first."""
    held = {
        f"{number} of {size}": LocalParameter(torch.nn.Parameter(torch.zeros(size, dtype=dtype)), ParameterShard())
        for number, (size, dtype) in reversed(list(enumerate(sizes)))
    }
    accumulators = {name: Accumulator(one.parameter.shape, torch.device("cpu"), Leaves()) for name, one in held.items()}
    for number, accumulator in enumerate(reversed(accumulators.values())):
        accumulator.total.fill_(number + 1)
    return held, accumulators


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "together"),
    [([4, 6], [10]), ([4, 7], [4, 7]), ([2, 3, 5, 1], [10, 1]), ([11, 2, 12], [11, 2, 12]), ([6, 3, 3, 3], [9, 6])],
)
def test_neighbours_are_summed_together_until_a_bucket_is_full(sizes, together, first, monkeypatch):
    monkeypatch.setattr(parts, "BUCKET", 10)
    held, accumulators = held_of([(size, first) for size in sizes])
    finished = []

    def finish(total, dtype):
        finished.append((len(total), dtype))
        return total.to(dtype)

    results = dict(sum_over_ranks(accumulators, held, single_process_mesh(), finish))
    assert finished == [(size, first) for size in together]
    assert [one_number(values) for values in results.values()] == list(range(1, len(sizes) + 1))


def test_neighbours_of_two_dtypes_are_finished_in_their_own():
    held, accumulators = held_of([(2, torch.bfloat16), (3, torch.bfloat16), (4, torch.float32), (5, torch.bfloat16)])
    results = dict(sum_over_ranks(accumulators, held, single_process_mesh(), torch.Tensor.to))
    assert [values.dtype for values in results.values()] == [one.parameter.dtype for one in reversed(held.values())]
    assert [one_number(values) for values in results.values()] == [1, 2, 3, 4]


def test_a_bucket_of_one_is_not_copied_and_a_shared_one_frees_its_memory(monkeypatch):
    """The integers of an embedding are the largest of a step, and a small gradient that is kept keeps no bucket."""
    monkeypatch.setattr(parts, "BUCKET", 10)
    held, accumulators = held_of([(12, torch.float32), (3, torch.float32), (4, torch.float32)])
    where = [accumulator.total.data_ptr() for accumulator in reversed(accumulators.values())]
    results = [values for _, values in sum_over_ranks(accumulators, held, single_process_mesh(), as_they_are)]
    assert results[0].data_ptr() == where[0]
    assert [values.untyped_storage().nbytes() for values in results] == [12 * 8, 3 * 8, 4 * 8]


def test_integers_of_an_embedding_exist_when_those_of_the_head_are_gone(monkeypatch):
    """Until then rows of its gradient wait: the two are the largest integers of a step."""
    monkeypatch.setattr(parts, "BUCKET", 10)
    held, accumulators = held_of([(12, torch.float32)])
    embedding = Accumulator(torch.Size([30, 2]), torch.device("cpu"), Leaves(tokens=1))
    embedding.start(0)
    embedding.add_at(plain, torch.full((3, 2), 5.0), torch.tensor([1, 29, 1]))
    held = {"embedding": LocalParameter(torch.nn.Parameter(torch.zeros(30, 2)), ParameterShard()), **held}
    accumulators = {"embedding": embedding, **accumulators}
    live = []

    def finish(total, dtype):
        live.append([name for name, one in accumulators.items() if one._total is not None])
        return total.to(dtype)

    results = dict(sum_over_ranks(accumulators, held, single_process_mesh(), finish))
    assert list(results) == ["0 of 12", "embedding"]
    assert live == [[], []]  # as each is converted, its integers belong to no accumulator any more
    assert results["embedding"][[1, 29], 0].tolist() == [10.0, 5.0]


def plain_half(total, dtype):
    return plain.to_gradient(total, 0.5, dtype)


@pytest.mark.parametrize("rows", [8, 7, 5, 3])
def test_each_rank_gets_its_rows_of_the_sum(rows):
    total = torch.arange(rows * 2).view(rows, 2)

    def own(mesh):
        return own_rows(mesh)(total * 10 ** mesh["dp_cp"].rank)

    by_rank = simulate(own, dp=2, cp=2)
    assert torch.equal(torch.cat(by_rank), total * 1111)
    assert [len(part) for part in by_rank] == [len(part) for part in [*total.chunk(4), *[[]] * 4][:4]]


def test_full_parameters_are_summed_over_ranks_with_other_tokens_or_heads():
    def summed(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh)
        exact = install(policy, Resolution(4, 2))
        for accumulator in exact.accumulators.values():
            accumulator.total.fill_(10 ** (mesh["dp"].rank + 2 * mesh["tp"].rank))
        totals = sum_over_ranks(exact.accumulators, local_parameters(policy), mesh, as_they_are)
        return {name.removeprefix("model.layers.0."): one_number(total) for name, total in totals}

    first, second = simulate(summed, dp=2, tp=2)[::3]
    assert first["self_attn.q_norm.weight"] == second["self_attn.q_norm.weight"] == 1111
    assert (first["input_layernorm.weight"], second["input_layernorm.weight"]) == (11, 1100)
    assert (first["self_attn.q_proj.weight"], second["self_attn.q_proj.weight"]) == (11, 1100)


def test_a_layer_keeps_no_whole_integers_after_its_backward():
    from tests.unit.reproducible.test_install import logprobs

    policy = load_policy("tiny-qwen3", mesh=single_process_mesh())
    policy.shards = {name: dataclasses.replace(shard, over_dp_cp=True) for name, shard in policy.shards.items()}
    exact = install(policy, Resolution(4))
    logprobs(policy).sum().backward()
    held = {name: accumulator._total is not None for name, accumulator in exact.accumulators.items()}
    assert {name for name, is_held in held.items() if is_held} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert all(accumulator.rows is not None for name, accumulator in exact.accumulators.items() if not held[name])
    flushed = {
        name: total.clone()
        for name, total in sum_over_ranks(exact.accumulators, local_parameters(policy), policy.mesh, as_they_are)
    }
    exact.remove()
    other = load_policy("tiny-qwen3")
    whole = install(other, Resolution(4))
    logprobs(other).sum().backward()
    assert all(torch.equal(flushed[name], accumulator.total) for name, accumulator in whole.accumulators.items())
    whole.remove()
    assert not any(layer._forward_pre_hooks for layer in other.model.model.layers)


def test_a_gradient_lies_where_the_optimizer_looks():
    parameter = torch.nn.Parameter(torch.zeros(2))
    one = LocalParameter(parameter, ParameterShard(0))
    one.leave(torch.ones(2))
    assert torch.equal(parameter.grad, torch.ones(2))
    assert one.gradient is parameter.grad
    assert one.sharded_over == ("tp",)
    assert LocalParameter(parameter, ParameterShard(None, over_dp_cp=True)).sharded_over == ("dp_cp",)
