"""The loss of a critic and divergences of whole distributions against oracles, with rubbish where nothing counts."""

import itertools
import math
import random

import pytest
import torch

from tests.oracles.critics import value_error
from workbench.errors import ShapeError, SpecError
from workbench.losses.auxiliary import DIVERGENCES, TARGETS, divergence, value_loss, z_loss


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


LOGITS = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 0.3], [0.0, 0.0, -3.0]], dtype=torch.float64)
TEACHER = torch.tensor([[1.0, 0.0, -1.0], [0.2, 0.1, 2.0], [0.5, 0.5, 0.5]], dtype=torch.float64)
LABELS = torch.tensor([2, -100, 0])
MASK = torch.tensor([True, True, False])
FLOOR = 1e-3


def softmax(row, scale):
    weights = [math.exp(scale * x) for x in row]
    return [w / sum(weights) for w in weights]


def by_hand(t, kind, form, logit_scale, target_scale):
    p = softmax(LOGITS[t].tolist(), logit_scale)
    if form == "labels":
        q = [float(v == LABELS[t]) + FLOOR for v in range(3)]
    else:
        q = softmax(TEACHER[t].tolist(), target_scale if form == "logits" else 1.0)
    if kind == "cross_entropy":
        return -sum(b * math.log(a) for a, b in zip(p, q, strict=True))
    if kind == "forward_kl":
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def given(form):
    if form == "labels":
        return LABELS
    return TEACHER if form == "logits" else torch.softmax(TEACHER, -1)


@pytest.mark.parametrize(("kind", "form"), list(itertools.product(DIVERGENCES, TARGETS)))
def test_each_divergence_is_its_formula_and_0_where_nothing_counts(kind, form):
    term = divergence(
        LOGITS,
        given(form),
        kind=kind,
        target_format=form,
        loss_mask_T=MASK,
        logit_scale=1.3,
        target_scale=0.6,
        label_floor=FLOOR,
    )
    counted = [0] if form == "labels" else [0, 1]
    expected = [by_hand(t, kind, form, 1.3, 0.6) if t in counted else 0.0 for t in range(3)]
    assert term.values_T.tolist() == pytest.approx(expected, rel=1e-13)
    assert term.weight == "token"
    assert term.silent_T.tolist() == [t not in counted for t in range(3)]


@pytest.mark.parametrize(("kind", "form"), list(itertools.product(DIVERGENCES, TARGETS)))
def test_gradients_agree_with_finite_differences(kind, form):
    def total(logits):
        return divergence(
            logits, given(form), kind=kind, target_format=form, logit_scale=0.7, label_floor=FLOOR
        ).values_T.sum()

    assert torch.autograd.gradcheck(total, (LOGITS.clone().requires_grad_(),))


def test_a_target_that_is_certain_costs_its_surprise_and_no_entropy():
    certain = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    surprise = -torch.log_softmax(LOGITS[:1], -1)[0, 1].item()
    for kind in ("cross_entropy", "forward_kl"):
        result = divergence(LOGITS[:1], certain, kind=kind, target_format="probabilities").values_T.item()
        assert result == pytest.approx(surprise, rel=1e-14)


@pytest.mark.parametrize("form", TARGETS)
def test_rubbish_where_nothing_counts_reaches_no_gradient(form):
    logits = LOGITS.clone()
    logits[2] = math.nan
    target = given(form).clone()
    if form != "labels":
        target[2] = math.inf
    logits.requires_grad_()
    for kind in DIVERGENCES:
        divergence(
            logits, target, kind=kind, target_format=form, loss_mask_T=MASK, label_floor=FLOOR
        ).values_T.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2].tolist() == [0.0, 0.0, 0.0]


def test_invalid_settings_are_refused():
    with pytest.raises(SpecError, match="the divergence is infinite"):
        divergence(LOGITS, LABELS, kind="reverse_kl")
    with pytest.raises(SpecError, match="target_format one of labels, logits, probabilities"):
        divergence(LOGITS, LABELS, target_format="label")
    with pytest.raises(ShapeError, match="target_T has T=2"):
        divergence(LOGITS, LABELS[:2])


def test_the_z_loss_is_the_squared_log_normaliser_with_its_slope():
    logits = LOGITS.clone().requires_grad_()
    term = z_loss(logits, loss_mask_T=MASK, logit_scale=2.0)
    normaliser = [math.log(sum(math.exp(2 * x) for x in row)) for row in LOGITS.tolist()]
    assert term.values_T.tolist() == pytest.approx([normaliser[0] ** 2, normaliser[1] ** 2, 0.0], rel=1e-13)
    term.values_T.sum().backward()
    slope = [2 * normaliser[0] * 2 * share for share in softmax(LOGITS[0].tolist(), 2.0)]
    assert logits.grad[0].tolist() == pytest.approx(slope, rel=1e-13)
    assert logits.grad[2].tolist() == [0.0, 0.0, 0.0]
