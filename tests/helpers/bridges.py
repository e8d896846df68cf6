"""A pair of layouts on simulated or real ranks, and what each rank found there."""

from __future__ import annotations

import itertools
import math
import random

import torch

from tests.oracles import bridge as oracle
from workbench.sharding.bridge import Grid, GridGroups, Share, Side, connect
from workbench.sharding.simulated import simulate

WAYS = [("whole", None), ("whole", "zigzag"), ("sharded", "zigzag")]


def pairs(ranks):
    """Every pair of layouts of so many ranks."""
    return list(itertools.product(oracle.factors(ranks), repeat=2))


def grid(layout, offset=0):
    tp, cp, dp = layout
    return Grid.of(tp=tp, cp=cp, dp=dp, offset=offset)


def problem(source, destination, samples):
    """Global activation and gradient; as many tokens as both sides can cut."""
    tokens = 2 * math.lcm(source[1], destination[1]) * destination[0]
    generator = torch.Generator().manual_seed(hash((source, destination, samples)) % 2**31)
    return [torch.randn(samples, tokens, 2, generator=generator) for _ in range(2)]


def even_samples(source, destination):
    return math.lcm(source[2], destination[2])


def truth(source, destination, samples, delivery, *, layout="bsh", sequence_parallel=False):
    """For each rank: what it holds, what it should get, what it brings back, what its gradient should be."""
    values, gradients = problem(source, destination, samples)
    sharded = delivery == "sharded"
    columns = [
        oracle.source_parts(values, source),
        oracle.destination_parts(values, destination, sharded=sharded, over_tp=sequence_parallel),
        oracle.destination_parts(gradients, destination, sharded=True, over_tp=sequence_parallel)
        if sharded
        else oracle.cotangents(gradients, destination),
        oracle.source_parts(gradients, source),
    ]
    return [
        [part.transpose(0, 1).contiguous() if layout == "sbh" else part for part in row]
        for row in zip(*columns, strict=True)
    ]


def cross(
    groups,
    source,
    destination,
    samples,
    delivery,
    order,
    rows,
    *,
    layout="bsh",
    sequence_parallel=False,
    said=True,
    checked=False,
    offset=0,
):
    """On a rank: whether it got what it should, bit for bit, forward and backward, and the path."""
    bridge = connect(
        grid(source, offset),
        grid(destination, offset),
        groups,
        layout=layout,
        delivery=delivery,
        order=order,
        source_order="contiguous" if source[1] > 1 else None,
        sequence_parallel=sequence_parallel,
    )
    at, found = groups.rank - offset, None
    if 0 <= at < bridge.pair.source.size:
        held, wanted, brought, wanted_gradient = rows[at]
        counts = oracle.counts(samples, source[2])
        local = held.clone().requires_grad_()
        out = bridge.cross(local, counts if said else None, checked=checked)
        out.backward(brought)
        right = torch.equal(out, wanted) and torch.equal(local.grad, wanted_gradient)  # but for the sign of a zero
        found = right, bridge.route(counts).path
    return found


def crosses(source, destination, samples, delivery, order, *, ranks=None, offset=0, **more):
    """Whether all simulated ranks got what they should, and the path."""
    rows = truth(
        source,
        destination,
        samples,
        delivery,
        **{name: more[name] for name in more.keys() & {"layout", "sequence_parallel"}},
    )
    ranks = ranks or source[0] * source[1] * source[2]
    everyone = simulate(
        lambda mesh: cross(
            GridGroups(mesh["dp"]), source, destination, samples, delivery, order, rows, offset=offset, **more
        ),
        dp=ranks,
    )
    found = [one for one in everyone if one is not None]
    [path] = {path for _, path in found}
    return all(right for right, _ in found), path


def tokens(numbers):
    return torch.tensor(list(numbers), dtype=torch.int64)


def dealt_ranks(draw, ranks):
    """Ranks in shares of any sizes."""
    order = draw.sample(range(ranks), ranks)
    found = []
    while order:
        size = draw.randint(1, min(3, len(order)))
        found.append(tuple(sorted(order[:size])))
        order = order[size:]
    return found


def random_sides(seed, ranks=None):
    """Shares that nothing but the rules binds: padding, tokens wanted twice and by many, ranks with nothing."""
    draw = random.Random(seed)
    ranks, count = ranks or draw.randint(1, 7), draw.randint(0, 12)
    left = dealt_ranks(draw, ranks)
    owners = [draw.randrange(len(left)) for _ in range(count)]
    source = []
    for number, of_share in enumerate(left):
        mine = [token for token in range(count) if owners[token] == number] + [-1] * draw.randint(0, 2)
        source.append(Share(of_share, tokens(draw.sample(mine, len(mine)))))
    right = dealt_ranks(draw, ranks)
    wanted = [[draw.choice(range(-1, count)) for _ in range(draw.randint(0, 8))] for _ in right]
    seen = {token for mine in wanted for token in mine}
    wanted[0] += [token for token in range(count) if token not in seen]
    return Side(tuple(source)), Side(
        tuple(Share(of_share, tokens(mine)) for of_share, mine in zip(right, wanted, strict=True))
    )


def rows(side, generator):
    """A row of small whole numbers for each token that each rank holds; replicas hold the same."""
    drawn = [torch.randint(-9, 10, (len(share.tokens_t), 2), generator=generator).double() for share in side.shares]
    return [drawn[number] for number in side.number_of]


def listed(side):
    return [share.tokens_t.tolist() for share in side.share_of]
