"""Combinations nobody wrote down: layouts x heads x denominators x micro-batches x temperature x batches, from a seed.

A few of them in every run; all of them in `make test-all`.
"""

import itertools
import random

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from tests.parity.cases import many_steps
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near, oracle

SHAPES = [(dp, cp, tp) for dp, cp, tp in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2)) if 1 < dp * cp * tp <= 4]
LAYOUTS = [{"dp": dp, "cp": cp, "tp": tp, "order": order} for dp, cp, tp in SHAPES
           for order in (("contiguous", "zigzag") if cp > 1 else ("contiguous",))]
ALL = [(layout, seed) for seed in range(4) for layout in LAYOUTS]
SAMPLE = random.Random(7).sample(ALL, 3)


def drawn(layout, seed):
    """Four cases for one set of processes: (settings, documents, how the oracle is asked)."""
    rng = random.Random(f"{layout} {seed}")
    cases = []
    for _ in range(4):
        ask = {"denominator": rng.choice(["token", "document"]), "tied": rng.random() < 0.5,
               "temperature": rng.choice([1.0, 0.7, 1.3])}
        documents = documents_near(rng.randrange(1000), tied=ask["tied"], temperature=ask["temperature"])
        given = settings(layout, denominator=ask["denominator"], tied=ask["tied"],
                         policy={"temperature": ask["temperature"]},
                         data={"micro_batches": rng.choice([1, 2, 3]),
                               "multiple_of": 2 * layout["cp"] * rng.choice([1, 3])})
        cases.append((given, documents, ask))
    return cases


def named(case):
    layout, seed = case
    return f"dp{layout['dp']}cp{layout['cp']}tp{layout['tp']}-{layout['order']}-{seed}"


def check(layout, seed, folder):
    cases = drawn(layout, seed)
    answers = run_ranks(many_steps, layout["dp"] * layout["cp"] * layout["tp"], folder,
                        [(given, documents) for given, documents, _ in cases])
    for number, (_, documents, ask) in enumerate(cases):
        expected_loss, expected, _ = oracle(documents, **ask)
        for rank, found in enumerate(answers):
            context = f"{layout}, {ask}, rank {rank}"
            assert abs(found[number]["loss"] - expected_loss) <= 1e-12 * max(1, abs(expected_loss)), context
            assert_float64_parity(found[number]["gradients"], expected, context=context)


@pytest.mark.parametrize("case", SAMPLE, ids=named)
def test_a_sample_of_all_combinations_meets_the_oracle(case, tmp_path):
    check(*case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case not in SAMPLE], ids=named)
def test_every_combination_meets_the_oracle(case, tmp_path):
    check(*case, tmp_path)
