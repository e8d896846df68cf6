"""An encoder and a policy in two layouts of one set of ranks give every parameter the gradient of one process.

On simulated ranks each way across and each kind of case; on real ones those of `REAL`, 1 and 4 micro-batches, 2 steps.
"""

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.image_steps import Case, problem, simulated, steps_of, truth
from tests.helpers.ranks import run_ranks
from workbench.sharding.mesh import world_axis

FAN_IN, FAN_OUT, EQUAL = ((2, 1, 4), (2, 2, 2)), ((4, 1, 2), (1, 2, 4)), ((2, 1, 4), (1, 2, 4))
SIMULATED = {
    "fan-in": (Case(*FAN_IN, delivery="whole", steps=2), "fan-in"),
    "fan-out": (Case(*FAN_OUT, delivery="whole", micro_batches=2), "fan-out"),
    "equal": (Case(*EQUAL, delivery="whole"), "equal"),
    "source cp": (Case((1, 2, 2), (2, 1, 2), source_order="zigzag"), "general"),
    "dp 3 and 2": (Case((2, 1, 3), (1, 3, 2)), "general"),
    "uneven samples": (Case((1, 1, 4), (1, 2, 2), images=7, delivery="whole"), "general"),
    "micro-batches whose images are fewer than ranks": (Case((1, 1, 4), (1, 2, 2), micro_batches=4), "general"),
    "images read by several documents": (Case((1, 1, 2), (1, 2, 1), shared=True), "general"),
    "sequence parallelism into shards": (Case((2, 1, 1), (2, 1, 1), layout=(("sequence_parallel", True),)), "general"),
    "sequence parallelism, whole": (
        Case((2, 1, 1), (2, 1, 1), delivery="whole", steps=2, layout=(("sequence_parallel", True),)),
        "equal",
    ),
    "a class token, and no plan": (Case((2, 1, 1), (1, 2, 1), vision="tiny-clip"), "general"),
}
REAL = {
    f"{name}, {count} micro-batches": Case(*layouts, images=16, delivery="whole", micro_batches=count, steps=2)
    for name, layouts in (("fan-in", FAN_IN), ("fan-out", FAN_OUT), ("equal", EQUAL))
    for count in (1, 4)
}
REAL |= {
    f"{name}, {count} micro-batches": Case(*layouts, images=7, micro_batches=count, steps=2, **more)
    for name, layouts, more in (
        ("uneven, into shards", FAN_IN, {}),
        ("source cp", ((2, 2, 2), (1, 2, 4)), {"source_order": "zigzag"}),
        ("source cp, whole", ((2, 2, 2), (1, 2, 4)), {"delivery": "whole"}),
        ("uneven, whole", FAN_IN, {"delivery": "whole"}),
        ("images read twice", FAN_OUT, {"shared": True}),
    )
    for count in (1, 4)
}
SIX = {
    f"dp 3 and 2, {count} micro-batches": Case((2, 1, 3), (1, 3, 2), images=7, micro_batches=count, steps=2)
    for count in (1, 4)
}


def hold(case, results, name):
    """Each step's loss and every gradient against one process."""
    expected = truth(case)
    assert len(results) == len(expected) == case.steps
    for number, ((loss, gradients), result) in enumerate(zip(expected, results, strict=True)):
        assert abs(float(result.loss["total"]) - loss) <= 1e-12, f"{name}, step {number}"
        floored = assert_float64_parity(dict(result.gradients), gradients, context=f"{name}, step {number}")
        of_encoder = [one for one in gradients if one.startswith("encoder.") and "post_layernorm" not in one]
        assert not set(of_encoder) & {one for one in floored if "k_proj.bias" not in one}
        for key, gradient in gradients.items():
            assert abs(result.norms[key] - float(gradient.norm())) <= 1e-12 * max(1.0, float(gradient.norm())), key


@pytest.mark.parametrize("name", SIMULATED)
def test_every_gradient_is_that_of_one_process(name):
    case, path = SIMULATED[name]
    results, bridge = simulated(case)
    assert f": {path}" in bridge or path == "general"
    hold(case, results, name)


def some_steps(cases, problems):
    """On a real rank: its result in each case."""
    return {name: steps_of(case, world_axis(), problems[name])[0] for name, case in cases.items()}


def on_gloo(cases, tmp_path, *, timeout_s=120.0):
    [ranks] = {case.ranks for case in cases.values()}
    problems = {name: problem(case) for name, case in cases.items()}
    everyone = run_ranks(some_steps, ranks, tmp_path, cases, problems, timeout_s=timeout_s)
    for name, case in cases.items():
        hold(case, everyone[0][name], name)
        losses = {float(step.loss["total"]) for rank in everyone for step in rank[name][:1]}
        assert len(losses) == 1, name


def test_real_ranks_find_it_too(tmp_path):
    on_gloo({"fan-in": SIMULATED["fan-in"][0]}, tmp_path)


@pytest.mark.slow
def test_every_layout_on_real_ranks(tmp_path):
    on_gloo(REAL, tmp_path, timeout_s=540.0)


@pytest.mark.slow
def test_layouts_of_six_real_ranks(tmp_path):
    on_gloo(SIX, tmp_path, timeout_s=240.0)
