"""The loss of a critic against the oracle, with rubbish where nothing counts."""

import math
import random

import pytest
import torch

from tests.oracles.critics import value_error
from workbench.errors import ShapeError, SpecError
from workbench.losses.value import value_loss


def critic(seed, size=40):
    rng = random.Random(seed)
    mask = [rng.random() < 0.7 for _ in range(size)]
    columns = [[rng.gauss(0, 2) if m else rng.choice((math.nan, math.inf, -math.inf)) for m in mask] for _ in range(3)]
    columns[2] = [
        v if not m else columns[0][t] + rng.choice((0.0, 0.3, -0.3, 2.0, -2.0)) * rng.random()
        for t, (m, v) in enumerate(zip(mask, columns[2], strict=True))
    ]
    return mask, *columns


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip": 0.2}, {"clip": 1.0}, {"kind": "huber", "delta": 1.0}, {"kind": "huber", "delta": 0.5, "clip": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(settings, seed):
    mask, values, returns, old = critic(seed)
    mask_T = torch.tensor(mask)
    values_T = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    term = value_loss(
        values_T,
        torch.tensor(returns, dtype=torch.float64),
        mask_T,
        old_values_T=torch.tensor(old, dtype=torch.float64),
        **settings,
    )
    expected = [
        value_error(v, r, o, **settings) if m else (0.0, 0.0, False)
        for m, v, r, o in zip(mask, values, returns, old, strict=True)
    ]
    term.values_T.sum().backward()
    assert term.values_T.tolist() == pytest.approx([e[0] for e in expected], rel=1e-13)
    assert values_T.grad.tolist() == pytest.approx([e[1] for e in expected], rel=1e-13)
    assert term.clipped_T.tolist() == [e[2] for e in expected]
    assert term.clipped_T.any() == ("clip" in settings)
    assert term.silent_T.tolist() == [not m for m in mask]


@pytest.mark.parametrize("settings", [{"kind": "mae"}, {"kind": "huber", "delta": 0.0}, {"clip": -0.1}, {"clip": 0.1}])
def test_settings_that_mean_nothing_are_refused(settings):
    one_T = torch.ones(2)
    with pytest.raises(SpecError, match="delta and clip are positive"):
        value_loss(one_T, one_T, one_T.bool(), **settings)


def test_values_and_returns_of_other_tokens_are_refused():
    with pytest.raises(ShapeError, match="T=3"):
        value_loss(torch.ones(2), torch.ones(3), torch.ones(2).bool())
