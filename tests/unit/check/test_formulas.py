"""Wrong formulas: each term by hand, on tokens of a step without a mask."""

import pytest
import torch

from workbench.check.formulas import wrong_formulas
from workbench.check.reading import Reading
from workbench.dumps.step import StepDump
from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.specs.losses import LossSpec

G = torch.Generator().manual_seed(0)
X, OLD, SAMPLER, REF = (-1 - torch.rand(4, generator=G, dtype=torch.float64) for _ in range(4))
A = torch.tensor([1.0, -1.0, 2.0, -0.5], dtype=torch.float64)
SPEC = LossSpec(name="grpo", kl={"coefficient": 0.5}, correction={"ratio": "token", "ratio_high": 9.0})


def terms(text):
    values = {"loss_mask": torch.ones(1, 4, dtype=torch.bool), "advantages": A[None]}
    names = {"policy_logprobs": X, "old_logprobs": OLD, "sampler_logprobs": SAMPLER, "ref_logprobs": REF}
    reading = Reading(StepDump.from_rectangle(values | {name: v[None] for name, v in names.items()}), SPEC)
    [wrong] = [wrong for _, description, wrong in wrong_formulas(reading) if text in description]
    leaf = X.clone().requires_grad_()
    return leaf, wrong(build_loss(SPEC), LossInputs(leaf, OLD, A, SAMPLER, REF), SPEC)


def ppo(ratio):
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)


RATIO, WEIGHT = (X - OLD).exp(), (OLD - SAMPLER).exp()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("old / policy", ppo(1 / RATIO) * WEIGHT),
        ("|A|", -torch.minimum(RATIO, RATIO.clamp(0.8, 1.2)) * A.abs() * WEIGHT),
        ("optimistic", -torch.maximum(RATIO * A, RATIO.clamp(0.8, 1.2) * A) * WEIGHT),
        ("on every token, not the smaller", -RATIO.clamp(0.8, 1.2) * A * WEIGHT),
        ("negative advantages do not", torch.where(A > 0, ppo(RATIO) * WEIGHT, 0)),
        ("sampler / old", ppo(RATIO) / WEIGHT),
        ("applied twice", ppo(RATIO) * WEIGHT * WEIGHT),
        ("policy_logprobs in the place of old_logprobs in the correction", ppo(RATIO) * (X - SAMPLER).exp()),
        ("ref_logprobs in the place of old_logprobs in the ratio", ppo((X - REF).exp()) * WEIGHT),
    ],
)
def test_the_policy_term(text, policy):
    _, wrong = terms(text)
    torch.testing.assert_close(wrong["policy"].values_T.detach(), policy)


@pytest.mark.parametrize(
    ("text", "kl", "gradient"),
    [
        ("has no gradient", lambda d: d.exp() - 1 - d, lambda d: 0 * d),
        ("other sign: policy - ref", lambda d: (-d).exp() - 1 + d, lambda d: (-d).exp() - 1),
        ("subtracted", lambda d: 1 + d - d.exp(), lambda d: d.exp() - 1),
        ("multiplies the KL penalty too", lambda d: (d.exp() - 1 - d) * WEIGHT, lambda d: (1 - d.exp()) * WEIGHT),
    ],
)
def test_the_penalty(text, kl, gradient):
    leaf, wrong = terms(text)
    torch.testing.assert_close(wrong["kl"].values_T.detach(), kl(REF - X))
    value = wrong["kl"].values_T.sum()
    made = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros(4).double()
    torch.testing.assert_close(made, gradient(REF - X))


def test_a_weight_with_a_gradient():
    leaf, wrong = terms("carries a gradient")
    (made,) = torch.autograd.grad(wrong["policy"].values_T.sum(), leaf)
    live = X.clone().requires_grad_()
    ratio = (live - OLD).exp()
    right = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) * (live - SAMPLER).exp()
    torch.testing.assert_close(made, torch.autograd.grad(right.sum(), live)[0])
