"""A pair of layouts on simulated or real ranks, and the result of each rank."""

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
    """Return for each rank its tokens, its expected output, its incoming gradient and its expected gradient."""
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
    """Return whether a rank's forward and backward are bitwise correct, and the path."""
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
    at, result = groups.rank - offset, None
    if 0 <= at < bridge.pair.source.size:
        held, wanted, brought, wanted_gradient = rows[at]
        counts = oracle.counts(samples, source[2])
        local = held.clone().requires_grad_()
        out = bridge.cross(local, counts if said else None, checked=checked)
        out.backward(brought)
        right = torch.equal(out, wanted) and torch.equal(local.grad, wanted_gradient)  # but for the sign of a zero
        result = right, bridge.route(counts).path
    return result


def crosses(source, destination, samples, delivery, order, *, ranks=None, offset=0, **more):
    """Return whether all simulated ranks are correct, and the path."""
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
    results = [one for one in everyone if one is not None]
    [path] = {path for _, path in results}
    return all(right for right, _ in results), path


def tokens(numbers):
    return torch.tensor(list(numbers), dtype=torch.int64)


def dealt_ranks(draw, ranks):
    """Ranks in shares of any sizes."""
    order = draw.sample(range(ranks), ranks)
    results = []
    while order:
        size = draw.randint(1, min(3, len(order)))
        results.append(tuple(sorted(order[:size])))
        order = order[size:]
    return results


def random_sides(seed, ranks=None):
    """Build shares bound by the rules alone: padding, tokens read twice and by many, ranks without tokens."""
    draw = random.Random(seed)
    ranks, count = ranks or draw.randint(1, 7), draw.randint(0, 12)
    left = dealt_ranks(draw, ranks)
    owners = [draw.randrange(len(left)) for _ in range(count)]
    source = []
    for number, of_share in enumerate(left):
        local = [token for token in range(count) if owners[token] == number] + [-1] * draw.randint(0, 2)
        source.append(Share(of_share, tokens(draw.sample(local, len(local)))))
    right = dealt_ranks(draw, ranks)
    wanted = [[draw.choice(range(-1, count)) for _ in range(draw.randint(0, 8))] for _ in right]
    seen = {token for local in wanted for token in local}
    wanted[0] += [token for token in range(count) if token not in seen]
    return Side(tuple(source)), Side(
        tuple(Share(of_share, tokens(local)) for of_share, local in zip(right, wanted, strict=True))
    )


def rows(side, generator):
    """Return a row of small integers for each token of each rank; replicas have the same."""
    drawn = [torch.randint(-9, 10, (len(share.tokens_t), 2), generator=generator).double() for share in side.shares]
    return [drawn[number] for number in side.number_of]


def listed(side):
    return [share.tokens_t.tolist() for share in side.share_of]
