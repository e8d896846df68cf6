"""The fast path against the general one, for any gradient, and the effect of each of its steps."""

import pytest
import torch

from tests.helpers.bridges import even_samples, grid, pairs
from workbench.sharding.bridge.connect import connect
from workbench.sharding.bridge.direct import Direct, cross_directly
from workbench.sharding.bridge.grid import GridPair
from workbench.sharding.bridge.groups import GridGroups
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

FAST = [pair for ranks in (1, 2, 4, 6, 8) for pair in pairs(ranks) if GridPair(*map(grid, pair)).path != "general"]


def both_ways(mesh, source, destination, layout):
    """On a rank: values and gradients of whole sequences by the fast path and by the general one; small whole numbers,
    of which every cp rank brings some for every token."""
    groups = GridGroups(mesh["dp"])
    fast = connect(grid(source), grid(destination), groups, layout=layout)
    samples = [2 * even_samples(source, destination) // source[2]] * source[2]
    place = grid(source).place(groups.rank)[0]
    shape = (samples[0], 4, 3) if layout == "bsh" else (4, samples[0], 3)
    results = []
    for cross in (fast.cross, lambda values, held: fast._cross_generally(values, fast.route(held), 4, checked=True)):
        values = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(place)).float().requires_grad_()
        out = cross(values, samples)
        dp, cp, _ = grid(destination).place(groups.rank)
        generator = torch.Generator().manual_seed(100 * dp + cp)
        out.backward(torch.randint(-9, 9, out.shape, generator=generator).float())
        results += [out.detach(), values.grad]
    return results


@pytest.mark.parametrize("layout", ["bsh", "sbh"])
def test_matches_the_general_path_if_every_cp_rank_uses_every_token(layout):
    assert len(FAST) == 97
    for source, destination in FAST[::2]:
        ranks = source[0] * source[1] * source[2]
        for out, gradient, same_out, same_gradient in simulate(
            lambda mesh, s=source, d=destination: both_ways(mesh, s, d, layout), dp=ranks
        ):
            assert torch.equal(out, same_out), (source, destination)
            assert torch.equal(gradient, same_gradient), (source, destination)


def test_one_rank_passes_its_tensor_through():
    values = torch.randn(2, 3, 1, requires_grad=True)
    out = cross_directly(values, Direct("equal", 0, 1, 0, 1, Axis("gather"), Axis("cp")))
    out.backward(2 * values.detach())
    assert torch.equal(out, values)
    assert torch.equal(values.grad, 2 * values.detach())
