"""Every pair of layouts against global tensors, both ways, bit for bit; on simulated ranks, and on real ones."""

import random

import pytest
import torch

from tests.helpers.bridges import WAYS, cross, crosses, even_samples, grid, listed, pairs, random_sides, rows, truth
from tests.helpers.ranks import run_ranks
from tests.oracles import bridge as oracle
from workbench.sharding.bridge import Crossing, GridGroups, connect, declare
from workbench.sharding.mesh import world_axis

EVERY = [(source, destination) for ranks in range(1, 17) for source, destination in pairs(ranks)]
SOME = random.Random(11).sample(EVERY, 60)
NAMED = {  # (tp, cp, dp) to (tp, cp, dp); samples; delivery and order; the path
    "fan-in": ((2, 1, 4), (2, 2, 2), 8, "whole", "zigzag", "fan-in"),
    "fan-in, all-reduce": ((2, 1, 4), (2, 2, 2), 8, "whole", None, "fan-in"),
    "fan-out": ((4, 1, 2), (1, 2, 4), 8, "whole", "zigzag", "fan-out"),
    "fan-out, all-reduce": ((4, 1, 2), (1, 2, 4), 8, "whole", None, "fan-out"),
    "equal": ((2, 1, 4), (1, 2, 4), 4, "whole", "zigzag", "equal"),
    "source cp": ((2, 2, 2), (1, 2, 4), 4, "whole", "zigzag", "general"),
    "dp 3 and 2": ((2, 1, 3), (1, 3, 2), 6, "whole", None, "general"),
    "uneven samples": ((2, 1, 4), (2, 2, 2), 7, "whole", "zigzag", "general"),
    "3 samples in 2 slots": ((4, 1, 2), (2, 1, 4), 6, "whole", None, "general"),
    "straight into shards": ((2, 1, 4), (2, 2, 2), 5, "sharded", "zigzag", "general"),
}


def all_ways(source, destination):
    """Each way of delivery, with samples that both deal evenly and with others; one setting each of the rest."""
    draw = random.Random(f"{source} {destination}")
    for delivery, order in WAYS:
        samples = draw.choice(
            [even_samples(source, destination), 2 * even_samples(source, destination), draw.randint(1, 7)]
        )
        yield (
            samples,
            delivery,
            order,
            {
                "layout": draw.choice(["bsh", "sbh"]),
                "said": draw.random() < 0.5,
                "sequence_parallel": delivery == "sharded" and draw.random() < 0.5,
            },
        )


@pytest.mark.parametrize(("source", "destination"), SOME, ids=str)
def test_a_pair_matches_global_tensors(source, destination):
    ways = list(all_ways(source, destination))
    samples, delivery, order, more = random.Random(f"which of {source} {destination}").choice(ways)
    right, _ = crosses(source, destination, samples, delivery, order, **more)
    assert right, (samples, delivery, order, more)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_pair_matches_global_tensors(ranks):
    wrong = [
        (source, destination, *way)
        for source, destination in pairs(ranks)
        for way in all_ways(source, destination)
        if not crosses(source, destination, *way[:3], **way[3])[0]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", NAMED)
def test_each_pair_takes_its_declared_path(name):
    *problem, path = NAMED[name]
    assert crosses(*problem) == (True, path)


def test_grids_may_begin_at_any_rank():
    source, destination, samples, delivery, order, path = NAMED["dp 3 and 2"]
    assert crosses(source, destination, samples, delivery, order, ranks=9, offset=2) == (True, path)


def named_on_gloo():
    """On a real rank: every named pair, in both layouts of the tensor, with and without `checked`."""
    groups = GridGroups(world_axis())
    return {
        name: [
            cross(groups, *problem, truth(*problem[:4], layout=layout), layout=layout, said=text, checked=text)
            for layout, text in (("bsh", True), ("sbh", False))
        ]
        for name, (*problem, _) in NAMED.items()
    }


def test_real_ranks_match_global_tensors(tmp_path):
    for rank, result in enumerate(run_ranks(named_on_gloo, 8, tmp_path)):
        for name, (source, *_, path) in NAMED.items():
            outside = rank >= source[0] * source[1] * source[2]
            assert result[name] == [None if outside else (True, path)] * 2, (rank, name)


def declared_on_gloo(seed):
    """On a real rank: rows that each declares for itself, uneven, padded, read by many; against single rows."""
    world = world_axis()
    sides = random_sides(seed, world.size)
    generator = torch.Generator().manual_seed(seed)
    values, gradients = (rows(side, generator) for side in sides)
    source, destination = (
        declare(side.share_of[world.rank].tokens_t, world, replica_id=side.number_of[world.rank]) for side in sides
    )
    own = values[world.rank].clone().requires_grad_()
    out = Crossing.make(source, destination).cross(own, world, checked=True)
    out.backward(gradients[world.rank])
    wanted, wanted_back = oracle.crossed(*map(listed, sides), values, gradients, sides[1].number_of)
    return torch.equal(out, wanted[world.rank]), torch.equal(own.grad, wanted_back[world.rank])


def all_declared_on_gloo():
    return [declared_on_gloo(seed) for seed in range(6)]


def test_real_ranks_declare_their_tokens(tmp_path):
    assert run_ranks(all_declared_on_gloo, 4, tmp_path) == [[(True, True)] * 6] * 4


def groups_on_gloo():
    """On a real rank: how many groups there are before, in between and afterwards."""
    import torch.distributed as dist

    def count():
        return len(dist.distributed_c10d._world.pg_names)

    counts = [count()]
    groups = GridGroups(world_axis())
    source, destination = grid((2, 1, 2)), grid((1, 2, 2))
    mesh = groups.mesh(destination)
    counts.append(count())
    bridge = connect(source, destination, groups, order="zigzag")
    counts.append(count())
    shared = bridge.cp.group is mesh["cp"].group is connect(source, destination, groups, cp=mesh["cp"].group).cp.group
    groups.destroy()
    groups.destroy()
    return [*counts, count()], shared, mesh["dp_cp"].ranks, mesh["cp"].ranks


def test_groups_are_shared_and_given_up(tmp_path):
    for rank, (counts, shared, dp_cp, cp) in enumerate(run_ranks(groups_on_gloo, 4, tmp_path)):
        before, with_mesh, with_bridge, after = counts
        assert with_mesh == before + 2, "cp and dp; tp is one rank, and dp x cp is the world"
        assert (with_bridge, after) == (with_mesh, before), "equal needs no more than cp, which is there"
        assert shared
        assert (tuple(dp_cp), tuple(cp)) == ((0, 1, 2, 3), ((0, 1), (2, 3))[rank // 2])


def groups_of_a_slow_rank_on_gloo():
    """On a real rank: the time when the slow one had its group, and when this one continued with its own."""
    import time

    import torch.distributed as dist

    from workbench.sharding import wire

    made, at = wire.subgroup, []

    def subgroup(*asked):
        group = made(*asked)
        if dist.get_rank() == 1:
            time.sleep(0.4)
        at.append(time.monotonic())
        return group

    wire.subgroup = subgroup
    groups = GridGroups(world_axis())
    groups.mesh(grid((1, 2, 2)))
    went_on = time.monotonic()
    groups.destroy()
    return at[-1], went_on


def test_no_rank_continues_before_all_have_their_groups(tmp_path):
    by_rank = run_ranks(groups_of_a_slow_rank_on_gloo, 4, tmp_path)
    assert min(went_on for _, went_on in by_rank) >= by_rank[1][0]
