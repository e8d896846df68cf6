"""The reproducible mode is as near to the float64 ground truth as the ordinary one: the whole gradient, times 1.1.

Clip decisions are frozen from the float64 run, and flips counted apart. One run is one sample of rounding, whose
distance to the truth scatters by a third from model to model in either mode; the bar applies to the root of
the mean square over five models with documents of their own.
"""

import math

import pytest
import torch

from tests.parity.cases import as_batch
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near
from workbench.policy.model import load_policy
from workbench.reproducible.kernels import plain
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.exact import reproducible_mode

BAR = 1.1
SEEDS = range(5)
EXACT = {"reproducible": {"block_tokens": 8, "weight_chunks": 2}}


def step(documents, seed, frozen=None, **more):
    """The whole gradient as one vector, and which tokens this run alone would clip."""
    given = settings({}) | more
    spec = RunSpec.model_validate(given | {"model": given["model"] | {"seed": seed}})
    policy = load_policy(
        spec.model.source, mesh=single_process_mesh(), precision=spec.precision, tied=spec.model.tied, seed=seed
    )
    batch = as_batch(documents)
    with reproducible_mode(policy, spec):
        rows, totals = flow.prepare_rows(batch, spec, policy.mesh)
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            num_source=batch.num_tokens,
            frozen_clip_S=frozen,
            keep_gradients=True,
            loss_spec=spec.loss,
        )
    gradient = torch.cat([value.double().flatten() for value in result.gradients.values()])
    return gradient, result.tokens["would_clip"]


@pytest.fixture(scope="module")
def truths():
    """For each seed: documents, the float64 gradient, and its clip decisions."""
    return [(documents_near(30 + seed), *step(documents_near(30 + seed), seed, precision="float64")) for seed in SEEDS]


def error(truths, **more):
    """Root mean square over the seeds of the distance to the ground truth; and the number of flipped decisions."""
    squares, flips = 0.0, 0
    for seed, (documents, true, clipped) in zip(SEEDS, truths, strict=True):
        gradient, own = step(documents, seed, clipped, **more)
        squares += float((gradient - true).square().sum() / true.square().sum())
        flips += int((own != clipped).sum())
    return math.sqrt(squares / len(SEEDS)), flips


@pytest.mark.parametrize(("precision", "least"), [("float32", 1e-8), ("bfloat16", 1e-4)])
def test_it_is_no_further_from_the_truth(precision, least, truths):
    ordinary, flipped = error(truths, precision=precision)
    exact, also_flipped = error(truths, precision=precision, **EXACT)
    assert ordinary > least, "there is rounding to speak of"
    assert exact <= BAR * ordinary, f"{exact:.3g} against {ordinary:.3g}"
    trained = sum(len(clipped) for _, _, clipped in truths)
    assert also_flipped <= flipped + 0.005 * trained


def test_the_bar_sees_an_error_of_some_units_in_the_last_place(truths, monkeypatch):
    ordinary, _ = error(truths, precision="float32")
    back = plain.matmul_backward
    monkeypatch.setattr(plain, "matmul_backward", lambda *given: back(*given) * (1 + 2**-20))
    rough, _ = error(truths, precision="float32", **EXACT)
    assert rough > BAR * ordinary
