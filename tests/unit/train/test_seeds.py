"""Seeds: distinct for distinct parts, and the same everywhere."""

from workbench.train.seeds import seed_of


def test_seeds_are_unlike_and_fit_a_generator():
    seeds = [seed_of(*parts) for parts in ((0,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (-1,), (10**12, 3))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, 1) == 46666290180431037, "the same in every process and version"
