"""OpenRLHF against its formulas, row by row, for every option of its losses, estimates and rewards."""

import math

import pytest
import torch

from tests.oracles.systems import openrlhf as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

PLAIN = {
    "clip_eps_low": 0.2,
    "clip_eps_high": 0.28,
    "dual_clip": None,
    "token_level_loss": True,
    "policy_loss_type": "ppo",
    "is_correction_level": "off",
    "is_correction_mode": "mask",
    "is_correction_gating": "ratio",
    "is_correction_threshold": (0.5, 5.0),
}
RATIOS = {
    "tokens": {},
    "rows": {"token_level_loss": False},
    "dual": {"dual_clip": 1.5},
    "dual_rows": {"dual_clip": 3.0, "token_level_loss": False, "clip_eps_low": 0.05},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.03, "clip_eps_high": 0.04},
    "gspo_dual": {"policy_loss_type": "gspo", "dual_clip": 1.2, "token_level_loss": False},
}
SCHEMES = {  # of its command line's help
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip"},
    "icepop": {"is_correction_level": "token"},
    "seq-mask-tis": {"is_correction_level": "seq"},
}
CORRECTIONS = {
    "none": {},
    **{
        f"{name}-{low}-{high}": {**scheme, "is_correction_threshold": (low, high)}
        for name, scheme in SCHEMES.items()
        for low, high in ((0.5, 2.0), (0.95, 1.04))
    },
    **{
        f"{gating}-{level}": {
            "is_correction_level": level,
            "is_correction_gating": gating,
            "is_correction_threshold": (-1e-9, bound),
        }
        for gating, bound in (("binary_kl", 0.01), ("tv", 0.06))
        for level in ("token", "seq")
    },
}
COUNTS = [
    {},
    {"dp_size": 4, "batch_num_tokens": 211, "global_batch_size": 24},
    {"dp_size": 2},
    {"dp_size": 2, "batch_num_tokens": 100.0},
    {"dp_size": 3, "global_batch_size": 12},
]


def batch(seed, rows=5, length=6):
    """Arrays of a call: an empty row, a row of one token, an interrupted one, and one far beyond the clamp."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.zeros(rows, length, dtype=torch.float64)
    for row, trained in enumerate((length, 0, 1, 4, 5)):
        mask[row, :trained] = 1
    mask[0, 2] = 0
    spread = (0.05, 0.3, 1.0)[seed % 3]
    logprobs = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64) - 0.01
    old = (logprobs + spread * normal(rows, length)).clamp(max=-1e-3)
    old[4, 0] = logprobs[4, 0] - 21 if seed % 2 else old[4, 0]
    advantages = normal(rows, length) if seed % 2 else normal(rows, 1).expand(rows, length).clone()
    advantages[4, 1] = 0
    advantages[4, 0] = -abs(advantages[4, 0])
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantages,
        "mask": mask,
        "rollout_logprobs": (old + spread / 2 * normal(rows, length)).clamp(max=-1e-3),
    }


def close(found, expected, where=""):
    if isinstance(expected, dict):
        assert expected.keys() <= found.keys()
        for name, value in expected.items():
            close(found[name], value, f"{where}.{name}")
        return
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-11,
        msg=lambda text: f"{where}: {text}",
    )


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_policy_loss_is_its_formula(ratio, correction):
    for seed, counts in zip(range(5), COUNTS, strict=True):
        config = PLAIN | RATIOS[ratio] | CORRECTIONS[correction] | counts
        arrays = batch(seed)
        result = replay("openrlhf", "policy_loss", "PolicyLoss.forward", config, arrays)
        expected = oracle.policy_loss(config, arrays)
        close(result, expected, f"{seed} {counts}")
        assert result["metrics"].keys() == expected["metrics"].keys()


def test_a_step_far_beyond_the_clamp_has_no_gradient():
    arrays, config = batch(1), PLAIN | {"dual_clip": None}
    result = replay("openrlhf", "policy_loss", "PolicyLoss.forward", config, arrays)
    assert result["grad_logprobs"][4, 0] == 0
    assert result["loss"] > 1e6


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_loss_is_its_formula(clip, by_token):
    for seed, counts in zip(range(5), COUNTS, strict=True):
        given = batch(seed)
        arrays = {
            "values": given["advantages"],
            "old_values": given["advantages"] + 0.4 * given["rollout_logprobs"],
            "returns": given["rollout_logprobs"],
            "mask": given["mask"],
        }
        config = {"clip_eps": clip, "token_level_loss": by_token, **counts}
        close(replay("openrlhf", "value_loss", "ValueLoss", config, arrays), oracle.value_loss(config, arrays))


@pytest.mark.parametrize(
    "config",
    [
        {"beta": 0.1, "label_smoothing": 0.0, "ipo": False},
        {"beta": 0.5, "label_smoothing": 0.1, "ipo": False},
        {"beta": 0.3, "label_smoothing": 0.0, "ipo": True},
        {"beta": 0.3, "label_smoothing": 0.2, "ipo": True},
    ],
    ids=str,
)
def test_dpo_is_its_formula(config):
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        arrays = {
            f"{who}{side}_logprob_sums": 4 * torch.randn(7, generator=g, dtype=torch.float64) - 9
            for who in ("", "ref_")
            for side in ("chosen", "rejected")
        }
        close(replay("openrlhf", "dpo_from_sums", "DPOLoss", config, arrays), oracle.dpo(config, arrays))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_their_formulas(kind):
    arrays = batch(2)
    x = (4 * arrays["logprobs"]).requires_grad_()
    estimate = oracle.kl(kind, x, arrays["old_logprobs"])
    assert (estimate.abs() == 10).any() or kind == "k1"
    (estimate * arrays["advantages"]).sum().backward()
    given = {"logprobs": x.detach(), "ref_logprobs": arrays["old_logprobs"], "cotangent": arrays["advantages"]}
    for config in ({"kl_estimator": kind}, {"kl_estimator": kind, "output_clamp": 10}):
        close(
            replay("openrlhf", "kl_estimator", "compute_approx_kl", config, given),
            {"kl": estimate.detach(), "grad_logprobs": x.grad},
        )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_an_unbiased_gradient_is_that_of_k2(kind):
    arrays = batch(2)
    x = arrays["logprobs"]
    gradient = (x - arrays["old_logprobs"]) * arrays["advantages"]
    given = {"logprobs": x, "ref_logprobs": arrays["old_logprobs"], "cotangent": arrays["advantages"]}
    config = {"kl_estimator": kind, "unbiased_gradient": True}
    expected = {"kl": oracle.kl(kind, x, arrays["old_logprobs"]), "grad_logprobs": gradient}
    close(replay("openrlhf", "kl_estimator", "compute_approx_kl", config, given), expected)


@pytest.mark.parametrize("coefficient", [0.1, 0.0, -0.1])
@pytest.mark.parametrize("bounds", [None, (-2, 2), (-0.5, 1.0)])
def test_rewards_of_tokens_are_their_formulas(coefficient, bounds):
    given = batch(3)
    config = {"kl_coef": coefficient, "reward_clip_range": bounds}
    rewards = 3 * given["advantages"][:, 0]
    result = replay(
        "openrlhf",
        "reward_shaping",
        "compute_reward",
        config,
        {"rewards": rewards, "kl": given["logprobs"].abs(), "mask": given["mask"]},
    )
    close(result, {"token_rewards": oracle.token_rewards(config, rewards, given["logprobs"].abs(), given["mask"])})


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_settings_round_trip(ratio, correction):
    spec = loss_spec("openrlhf", PLAIN | RATIOS[ratio] | CORRECTIONS[correction])
    assert loss_spec("openrlhf", settings_for("openrlhf", spec)) == spec


def test_one_threshold_is_the_upper_one():
    one = {"is_correction_level": "token", "is_correction_gating": "tv", "is_correction_threshold": [0.2]}
    correction = loss_spec("openrlhf", one).correction
    assert (correction.gate_low, correction.gate_high) == (0.0, 0.2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dapo", {"clip_eps_high": 0.28, "token_level_loss": True}),
        ("dual_clip", {"dual_clip": 3.0}),
        ("gspo", {"policy_loss_type": "gspo", "clip_eps_low": 3e-4}),
    ],
)
def test_our_losses_have_options_there(name, said):
    settings = settings_for("openrlhf", LossSpec(name=name))
    assert {option: settings[option] for option in said} == said


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "cispo"},
        {"kl": {"coefficient": 0.1}},
        {"surrogate": {"delta": 4.0}},
        {"denominator": "raw"},
        {"correction": {"kind": "tis"}},
    ],
)
def test_a_loss_that_it_has_not_is_refused(changes):
    with pytest.raises(SpecError, match="OpenRLHF"):
        settings_for("openrlhf", LossSpec(**changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_eps": 0.2}, "did you mean 'clip_eps_low'"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0"),
        ({"enable_vllm_is_correction": True}, "enable_vllm_is_correction"),
        ({"is_correction_level": "row"}, "is_correction_level = 'row'"),
        ({"is_correction_level": "seq", "is_correction_mode": "clip"}, "needs is_correction_level token"),
        ({"is_correction_gating": "tv", "is_correction_mode": "clip"}, "is_correction_gating ratio"),
        ({"is_correction_level": "token", "is_correction_gating": "tv"}, "an upper bound only"),
    ],
)
def test_options_that_it_refuses_are_refused_here(settings, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("openrlhf", settings)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({}, "clamped to +-20"),
        ({"policy_loss_type": "gspo"}, "for any token_level_loss"),
        ({"policy_loss_type": "gspo", "is_correction_level": "token"}, "against the sampler"),
        (CORRECTIONS["seq-mask-tis-0.5-2.0"], "untruncated weights"),
        (CORRECTIONS["binary_kl-token"], "rounds to less than 0"),
    ],
)
def test_implicit_behaviour_is_noted(settings, note):
    assert any(note in text for text in translation("openrlhf", settings).notes)


# ---- nothing counts ----------------------------------------------------------------------------------------------


def masked_mean(values, mask, dim=None):
    return (values * mask).sum(dim=dim) / mask.sum(dim=dim)


def policy_loss_of_nothing(c, arrays):
    """The original `PolicyLoss`, in which autograd handles 0 / 0: (loss, gradient)."""
    x = arrays["logprobs"].clone().requires_grad_()
    old, sampler, advantages, mask = (arrays[n] for n in ("old_logprobs", "rollout_logprobs", "advantages", "mask"))
    low, high = 1 - c["clip_eps_low"], 1 + c["clip_eps_high"]
    if c["policy_loss_type"] == "ppo":
        ratio = (x - old).clamp(-20.0, 20.0).exp()
    else:
        gap = x - (old if c["is_correction_level"] == "off" else sampler)
        ratio = ((gap * mask).sum(-1) / mask.sum(-1).clamp(min=1)).exp().unsqueeze(-1) * mask
    clip1 = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    clip2 = clip1 if c["dual_clip"] is None else torch.max(clip1, c["dual_clip"] * advantages)
    loss = -torch.where(advantages < 0, clip2, clip1)
    if c["token_level_loss"] and c["policy_loss_type"] == "ppo":
        total = masked_mean(loss, mask)
    else:
        counts = mask.sum(-1)
        total = masked_mean((loss * mask).sum(-1) / (counts + 1e-8), (counts > 0).double())
    total.backward()
    return total.detach(), x.grad


@pytest.mark.parametrize("correction", ["none", "tis-0.5-2.0", "icepop-0.95-1.04"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_mean_over_nothing_is_no_number_here_either(ratio, correction):
    config = {**PLAIN, **RATIOS[ratio], **CORRECTIONS[correction]}
    seen = set()
    for seed in range(6):
        arrays = batch(seed)
        arrays["mask"] = torch.zeros_like(arrays["mask"])
        arrays["advantages"][1] = -0.5
        loss, gradient = policy_loss_of_nothing(config, arrays)
        result = replay("openrlhf", "policy_loss", "PolicyLoss", config, arrays)
        assert loss.isnan()
        assert result["loss"].isnan()
        assert torch.equal(result["grad_logprobs"].isnan(), gradient.isnan()), seed
        assert not result["grad_logprobs"].nan_to_num().any()
        seen |= set(gradient.isnan().flatten().tolist())
        assert all(math.isnan(value) for value in result["metrics"].values()), result["metrics"]
    assert seen == {True, False}, "some tokens are cut off and some are not"


@pytest.mark.parametrize(("by_token", "count"), [(True, "batch_num_tokens"), (False, "global_batch_size")])
def test_with_given_counts_an_empty_batch_is_zero(by_token, count):
    arrays = batch(1)
    arrays["mask"] = torch.zeros_like(arrays["mask"])
    config = {**PLAIN, "token_level_loss": by_token}
    result = replay("openrlhf", "policy_loss", "PolicyLoss", config | {count: 12.0}, arrays)
    assert result["loss"] == 0
    assert not result["grad_logprobs"].any()
    other = "global_batch_size" if by_token else "batch_num_tokens"
    assert replay("openrlhf", "policy_loss", "PolicyLoss", config | {other: 12.0}, arrays)["loss"].isnan()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("by_token", [True, False])
def test_a_critics_mean_over_nothing_is_no_number(clip, by_token):
    g = torch.Generator().manual_seed(3)
    values, old, returns = (torch.randn(4, 5, generator=g, dtype=torch.float64) for _ in range(3))
    x = values.clone().requires_grad_()
    errors = (x - returns) ** 2
    if clip is not None:
        errors = torch.max((old + (x - old).clamp(-clip, clip) - returns) ** 2, errors)
    (0.5 * masked_mean(errors, torch.zeros_like(old))).backward()
    result = replay(
        "openrlhf",
        "value_loss",
        "ValueLoss",
        {"clip_eps": clip, "token_level_loss": by_token},
        {"values": values, "old_values": old, "returns": returns, "mask": torch.zeros_like(old)},
    )
    assert result["loss"].isnan()
    assert torch.equal(result["grad_values"].isnan(), x.grad.isnan())
    assert x.grad.isnan().any()
