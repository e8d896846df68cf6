"""Completions that were sampled on different ranks reach all of them unchanged."""

import torch

from workbench.policy.sampling import Completion
from workbench.sharding.simulated import simulate
from workbench.specs.online import OnlineSpec
from workbench.train.completions import gather_completions

COMPLETIONS = {
    0: (Completion([4, 0], [-1.5, -0.25], [[4, 7], [0]], [0.75, 0.5]), 1.0),
    1: (Completion([2], [-2.0], [[0, 1, 2]], [1.0]), -0.5),
    2: (Completion([5, 6, 7], [-0.5, -1.0, -3.0], [[5], [6, 0], [7]], [0.5, 0.25, 0.125]), 0.0),
}


def test_completions_of_all_ranks_are_on_each_in_order():
    """Id 0 is a token like any other; a rank without completions takes part."""
    online = OnlineSpec(task="arithmetic", prompts=1, answers=3, max_new_tokens=4, top_p=0.9)

    def rank(mesh):
        own = {n: COMPLETIONS[n] for n in COMPLETIONS if n % 2 == mesh["dp_cp"].rank}
        return gather_completions(own, online, None, mesh)

    for completions, rewards_N in simulate(rank, dp=3):
        assert rewards_N.tolist() == [1.0, -0.5, 0.0]
        for number, (expected, _) in COMPLETIONS.items():
            actual = completions[number]
            assert (actual.tokens, actual.logprobs, actual.masses) == (
                expected.tokens,
                expected.logprobs,
                expected.masses,
            )
            assert [sorted(ids) for ids in actual.supports] == [sorted(ids) for ids in expected.supports]


def test_routes_have_the_length_of_their_document():
    class Routers:
        names, chosen = ("one", "two"), 2

    routes = {n: torch.arange(4 * (n + 2)).view(n + 2, 2, 2) for n in range(2)}
    online = OnlineSpec(task="arithmetic", prompts=1, answers=2, max_new_tokens=2)

    def rank(mesh):
        n = mesh["dp_cp"].rank
        return gather_completions({n: (Completion([1], [0.0], routes_tLk=routes[n]), 0.0)}, online, Routers(), mesh)[0]

    for completions in simulate(rank, dp=2):
        assert all(torch.equal(completions[n].routes_tLk, routes[n]) for n in routes)
