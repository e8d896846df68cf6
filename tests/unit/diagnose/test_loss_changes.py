"""Noted values of the loss that moved from equal inputs: which part of the loss moves them so."""

import pytest
import torch

from workbench.diagnose.loss_changes import change_of_losses

SEED = torch.Generator().manual_seed(3)
LENGTHS = (5, 9, 7, 12, 8, 11, 6, 10)
DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
COUNTS = torch.tensor(LENGTHS)[DOCUMENTS].double()
S = len(DOCUMENTS)


def drawn(scale):
    return scale * torch.randn(S, generator=SEED, dtype=torch.float64)


POLICY = -2 + drawn(0.5)
OLD, SAMPLER, REF = POLICY + drawn(0.2), POLICY + drawn(0.3), POLICY + drawn(0.4)
ADVANTAGES = torch.randn(len(LENGTHS), generator=SEED, dtype=torch.float64)[DOCUMENTS]
ENTROPIES, IDS = 2 + drawn(0.3), torch.randint(0, 12, (S,), generator=SEED)
RATIOS, FAR = (POLICY - OLD).exp(), REF - POLICY
K3, CORRECTION = FAR.exp() - 1 - FAR, (OLD - SAMPLER).exp().clamp_max(1.3)
SURROGATE = -RATIOS.clamp(0.7, 1.3) * ADVANTAGES


def noted(losses):
    return {
        "losses": losses,
        "policy_logprobs": POLICY,
        "old_logprobs": OLD,
        "sampler_logprobs": SAMPLER,
        "ref_logprobs": REF,
        "advantages": ADVANTAGES,
        "entropy_nats": ENTROPIES,
        "targets": IDS,
        "documents": DOCUMENTS,
        "trained": torch.ones(S, dtype=torch.bool),
    }


CHANGES = {
    "dropped correction": ("correction", SURROGATE * CORRECTION, SURROGATE),
    "correction by the present policy": (
        "correction",
        SURROGATE * CORRECTION,
        SURROGATE * (POLICY - SAMPLER).exp().clamp_max(1.3),
    ),
    "inverse correction": ("correction", SURROGATE * CORRECTION, SURROGATE * (SAMPLER - OLD).exp()),
    "k1 for k3": ("term", SURROGATE + 0.1 * K3, SURROGATE - 0.1 * FAR),
    "coefficient of a penalty": ("term", SURROGATE + 0.1 * K3, SURROGATE + 0.02 * K3),
    "bonus": ("term", SURROGATE, SURROGATE - 0.01 * ENTROPIES),
    "a term that no value explains": ("term", -POLICY + 0.1 * ENTROPIES.square() * IDS, -POLICY),
    "another clip": ("clip", SURROGATE, -RATIOS.clamp(0.7, 1.1) * ADVANTAGES),
    "a mask for a clip": ("clip", SURROGATE, torch.where((RATIOS - 1).abs() > 0.15, 0.0, SURROGATE)),
    "no ratio": ("ratio", -RATIOS * ADVANTAGES, -ADVANTAGES),
    "documents by length": ("lengths", SURROGATE, SURROGATE * 8 / COUNTS),
    "documents by other factors": ("documents", SURROGATE, SURROGATE * (1 + DOCUMENTS % 3)),
    "ids": ("ids", -POLICY, torch.where(IDS == 4, -3 * POLICY, -POLICY)),
}


@pytest.mark.parametrize(("kind", "right", "wrong"), CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("rounding", [0.0, 2**-10])
def test_a_part_of_the_loss_is_found_from_the_values(kind, right, wrong, rounding):
    large = kind not in ("clip", "term")  # next to a small term the rounding of the others is no less
    rounded = wrong * (1 + large * rounding * torch.randn(S, generator=SEED))
    change = change_of_losses(noted(right), noted(rounded), {"tis_cap": 1.3})
    assert change is not None
    assert change.kind == kind, change


def test_values_at_the_ends_of_the_samplers_ratios_are_of_its_correction():
    far = (OLD - SAMPLER).abs() > 0.3
    right, wrong = (noted(torch.where(far, by * SURROGATE, SURROGATE)) for by in (0.0, 0.5))
    change = change_of_losses(right, wrong, {})
    assert change is not None
    assert change.kind == "correction"


@pytest.mark.parametrize(
    "wrong",
    [SURROGATE, 2 * SURROGATE, SURROGATE + drawn(0.3), SURROGATE * (1 + drawn(0.2)), SURROGATE.log()],
    ids=["the same", "one factor", "noise", "noise of each value", "not a number"],
)
def test_what_no_part_explains_is_not_told(wrong):
    assert change_of_losses(noted(SURROGATE), noted(wrong), {}) is None


def test_few_tokens_prove_nothing():
    few = {name: values[:6] for name, values in noted(SURROGATE).items()}
    other = {name: values[:6] for name, values in noted(SURROGATE + 0.1 * K3).items()}
    assert change_of_losses(few, other, {}) is None
