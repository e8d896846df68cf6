"""In float32 no layout is further from the float64 ground truth than one rank is, times a small stated factor.

Clip decisions are frozen from the float64 run (a decision that flips is an O(1) change of one token, and no measure
of rounding); flips are counted apart. Median of 5 seeds: whole gradient within 1.5 times the one-rank run's own
distance to the truth, every parameter within 2 times.

One run is one sample of rounding, and is judged by wider factors (`workbench.compare.align`), which follow from how far
right layouts were measured to spread.
"""

import json
import statistics

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.parity import rounding
from tests.parity.cases import many_steps, one_step
from tests.parity.test_layouts import LAYOUTS, settings
from tests.parity.test_oracle import documents_near
from workbench.compare.distances import PARAMETER_FACTOR, WHOLE_FACTOR

SEEDS = range(5)
RING = {"cp4_ring": {"cp": 4, "order": "document_zigzag", "attention": "ring"}}
HELD = {2: ["cp2_contiguous", "cp2_zigzag", "tp2"], 4: ["dp2_cp2", "cp2_tp2", "cp4_ring"]}
"""Layouts by their number of ranks; those of one number share processes."""


def distance(a, b):
    return float((a - b).norm())


def whole(gradients):
    return torch.cat([g.flatten() for g in gradients.values()])


@pytest.fixture(scope="module")
def truths():
    """Per seed: documents, the float64 step, and the one-rank float32 step on the same clip decisions."""
    results = []
    for seed in SEEDS:
        documents = documents_near(20 + seed)
        exact = one_step(settings({}), documents)
        plain = one_step(settings({}, precision="float32"), documents, exact["tokens"]["clipped"])
        free = one_step(settings({}, precision="float32"), documents)
        results.append((documents, exact, plain, free))
    return results


def test_clip_decisions_rarely_flip(truths):
    flips = sum(int((free["tokens"]["clipped"] != exact["tokens"]["clipped"]).sum()) for _, exact, _, free in truths)
    trained = sum(int(exact["tokens"]["trained"].sum()) for _, exact, _, _ in truths)
    assert flips <= 0.01 * trained, f"{flips} of {trained} decisions flipped between float32 and float64"


def test_frozen_decisions_are_obeyed(truths):
    documents, exact, _, _ = truths[0]
    opposite = ~exact["tokens"]["clipped"] & exact["tokens"]["trained"]
    turned = one_step(settings({}), documents, opposite)
    assert torch.equal(turned["tokens"]["clipped"], opposite)
    assert distance(whole(turned["gradients"]), whole(exact["gradients"])) > 0.1


@pytest.fixture(scope="module")
def answers(truths, tmp_path_factory):
    """By layout: its float32 step on every seed."""
    results = {}
    for world, names in HELD.items():
        cases = [
            (settings((LAYOUTS | RING)[name], precision="float32"), documents, exact["tokens"]["clipped"])
            for name in names
            for documents, exact, _, _ in truths
        ]
        steps = iter(run_ranks(many_steps, world, tmp_path_factory.mktemp("ranks"), cases)[0])
        results |= {name: [next(steps) for _ in truths] for name in names}
    return results


@pytest.mark.parametrize("name", [*HELD[2], *HELD[4]])
def test_layout_is_as_accurate_as_one_rank(name, truths, answers):
    ratios, per_parameter = [], {parameter: [] for parameter in truths[0][1]["gradients"]}
    for answer, (_, exact, plain, _) in zip(answers[name], truths, strict=True):
        truth = exact["gradients"]
        ratios.append(
            distance(whole(answer["gradients"]), whole(truth)) / distance(whole(plain["gradients"]), whole(truth))
        )
        for parameter, values in per_parameter.items():
            values.append(
                distance(answer["gradients"][parameter], truth[parameter])
                / distance(plain["gradients"][parameter], truth[parameter])
            )
    assert statistics.median(ratios) <= 1.5, f"{name}: {ratios}"
    over = {p: values for p, values in per_parameter.items() if statistics.median(values) > 2}
    assert not over, f"{name}: {over}"


@pytest.mark.parametrize(("kind", "factor"), [("whole_gradient", WHOLE_FACTOR), ("parameter", PARAMETER_FACTOR)])
def test_the_factors_of_one_run_follow_from_the_measured_spread(kind, factor):
    """The smallest multiple of a half that right layouts keep in all but 1 of 100 reports."""
    record = json.loads(rounding.RECORD.read_text())
    measured = record[kind]
    wanted = rounding.required(
        measured, rounding.COMPARISONS * measured["comparisons"] // record["whole_gradient"]["comparisons"]
    )
    assert factor - 0.5 < wanted <= factor
    assert all(median < 1.2 for median in measured["median_by_layout"].values()), "nothing less exact than one rank"
