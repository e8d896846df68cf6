"""NeMo-RL against its formulas, row by row, for every option of its losses, advantages and rewards."""

import itertools
import random

import pytest
import torch

from tests.oracles.systems import nemo_rl as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

PLAIN = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
SEQUENCE = {"token_level_loss": False, "sequence_level_importance_ratios": True}
RATIOS = {
    "tokens": {},
    "rows": {"token_level_loss": False},
    "dual_clip": {"ratio_clip_c": 1.5},
    "gspo": {**SEQUENCE, "ratio_clip_min": 0.02, "ratio_clip_max": 0.03},
    "gspo_dual": {**SEQUENCE, "ratio_clip_c": 2.0},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce_dual": {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
    "reinforce_rows": {"disable_ppo_ratio": True, **SEQUENCE},
    "forced": {"force_on_policy_ratio": True},
    "forced_rows": {"force_on_policy_ratio": True, "ratio_clip_c": 1.1, **SEQUENCE},
    "forced_reinforce": {"force_on_policy_ratio": True, "disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
}
KLS = {
    "none": {},
    "default": {"reference_policy_kl_penalty": 0.01},
    "in_reward": {"reference_policy_kl_penalty": 0.3, "use_kl_in_reward": True},
    **{
        f"{kind}_tight": {
            "reference_policy_kl_penalty": 0.3,
            "reference_policy_kl_type": kind,
            "kl_input_clamp_value": 0.5,
            "kl_output_clamp_value": 0.1,
        }
        for kind in ("k1", "k2", "k3")
    },
    **{
        f"{kind}_sampler": {
            "reference_policy_kl_penalty": 0.3,
            "reference_policy_kl_type": kind,
            "use_on_policy_kl_approximation": True,
            "kl_input_clamp_value": None,
            "kl_output_clamp_value": 0.4,
        }
        for kind in ("k1", "k2", "k3")
    },
    "loose": {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
}


def truncated(kind, high, low):
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


CORRECTIONS = {
    "none": {},
    "plain": {"use_importance_sampling_correction": True},
    "tis": truncated("tis", 1.1, None),
    "tis_both": truncated("tis", 1.1, 0.8),
    "icepop": truncated("icepop", 1.2, 0.7),
    "seq_mask": truncated("seq-mask-tis", 1.05, 0.96),
}


def batch(seed, *, rewards=False, rows=5, length=6):
    """Arrays of a call: an empty row, a row of one token, a row that the sample mask takes out, an interrupted one."""
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
    sampler = (old + spread / 2 * normal(rows, length)).clamp(max=-1e-3)
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": sampler,
        "ref_logprobs": (logprobs + 2 * spread * normal(rows, length)).clamp(max=-1e-3),
        "advantages": normal(rows, length) if seed % 2 else normal(rows, 1).expand(rows, length).clone(),
        "mask": mask,
        "sample_mask": torch.tensor([1.0, 1, 1, seed % 2, 1], dtype=torch.float64),
    }
    arrays["advantages"][4, 1:3] = 0
    if rewards:
        arrays["rewards"] = torch.tensor([1.0, 1.0, -0.5, 1.0, 0.0 if seed % 2 else 2.0], dtype=torch.float64)
    return arrays


def counted(arrays, seed):
    trained = arrays["mask"] * arrays["sample_mask"][:, None]
    own = {"global_valid_seqs": float(arrays["sample_mask"].sum()), "global_valid_toks": float(trained.sum())}
    return own if seed % 3 else {"global_valid_seqs": 24.0, "global_valid_toks": 311.0}


def close(found, expected, where=""):
    if isinstance(expected, dict):
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


def goes(config):
    return not (config["use_cispo"] and not config["token_level_loss"]) and not (
        config["truncated_importance_sampling_type"] == "seq-mask-tis" and config["sequence_level_importance_ratios"]
    )


GRID = [
    (r, k, c)
    for r, k, c in itertools.product(RATIOS, KLS, CORRECTIONS)
    if goes(PLAIN | RATIOS[r] | KLS[k] | CORRECTIONS[c])
]


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_clipped_loss_is_its_formula(ratio):
    """Every ratio with every correction; every KL penalty with one of them in turn."""
    rng = random.Random(ratio)
    chosen = {(c, rng.choice(list(KLS))) for c in CORRECTIONS} | {(rng.choice(list(CORRECTIONS)), k) for k in KLS}
    seeds = itertools.cycle(range(6))
    tried = 0
    for correction, kl in sorted(chosen):
        if (ratio, kl, correction) not in GRID:
            continue
        seed = next(seeds)
        arrays = batch(seed, rewards=seed % 2 == 0)
        config = PLAIN | RATIOS[ratio] | KLS[kl] | CORRECTIONS[correction]
        config |= {"positive_example_nll_weight": (0.0, 0.2)[seed // 2 % 2], **counted(arrays, seed)}
        close(
            replay("nemo_rl", "policy_loss", "ClippedPGLossFn.__call__", config, arrays),
            oracle.policy_loss(config, arrays),
            f"{ratio} {kl} {correction} {seed}",
        )
        tried += 1
    assert tried >= 10


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "kl", "correction"), GRID)
def test_every_crossing_of_options_is_its_formula(ratio, kl, correction):
    for seed, weight in ((0, 0.0), (1, 0.2), (2, 0.2)):
        arrays = batch(seed, rewards=seed != 1)
        config = PLAIN | RATIOS[ratio] | KLS[kl] | CORRECTIONS[correction]
        config |= {"positive_example_nll_weight": weight, **counted(arrays, seed)}
        close(
            replay("nemo_rl", "policy_loss", "ClippedPGLossFn.__call__", config, arrays),
            oracle.policy_loss(config, arrays),
            f"seed {seed}",
        )


def test_masked_values_do_not_matter():
    arrays = batch(4)
    config = PLAIN | KLS["default"] | CORRECTIONS["tis"] | counted(arrays, 1)
    clean = replay("nemo_rl", "policy_loss", "", config, arrays)
    hidden = arrays["mask"] * arrays["sample_mask"][:, None] == 0
    for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"):
        arrays[name] = torch.where(hidden, torch.nan, arrays[name])
    close(replay("nemo_rl", "policy_loss", "", config, arrays), clean)


@pytest.mark.parametrize("seed", range(3))
def test_supervised_and_preference_losses_are_their_formulas(seed):
    arrays = batch(seed, rows=6)
    arrays["sample_mask"] = torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64)
    config = {"global_valid_toks": 37.0}
    close(replay("nemo_rl", "nll", "NLLLossFn.__call__", config, arrays), oracle.nll(config, arrays), "nll")
    rewards = {"rewards": arrays["advantages"][:, :1] * 2, "sample_mask": arrays["sample_mask"]}
    config = {"global_valid_seqs": 8.0}
    close(
        replay("nemo_rl", "preference", "PreferenceLossFn.__call__", config, rewards),
        oracle.preference(config, rewards),
        "preference",
    )
    whole = rewards | {"sample_mask": rewards["sample_mask"].long()}
    close(
        replay("nemo_rl", "preference", "PreferenceLossFn.__call__", config, whole),
        oracle.preference(config, rewards),
        "preference, whole numbers",
    )
    for average, sft, likelihoods in itertools.product((False, True), (0.0, 0.3), (False, True)):
        config = {
            "reference_policy_kl_penalty": 0.1 + seed,
            "preference_loss_weight": 0.7,
            "sft_loss_weight": sft,
            "preference_average_log_probs": average,
            "sft_average_log_probs": likelihoods,
            "global_valid_seqs": 10.0,
        }
        close(replay("nemo_rl", "dpo", "DPOLossFn.__call__", config, arrays), oracle.dpo(config, arrays), f"{config}")


@pytest.mark.parametrize("clip", [None, 0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_the_critics_loss_is_its_formula(seed, clip):
    given = batch(seed)
    arrays = {
        "values": given["advantages"],
        "old_values": given["advantages"] + 0.4 * given["logprobs"],
        "returns": given["ref_logprobs"],
        "mask": given["mask"],
    }
    config = {"scale": 0.5, "cliprange": clip, "global_valid_toks": 29.0}
    close(replay("nemo_rl", "value_loss", "MseValueLossFn.__call__", config, arrays), oracle.value(config, arrays))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_their_formulas(kind):
    arrays = batch(5)
    cotangent = arrays["advantages"]
    for into, out in itertools.product((None, 20.0, 0.7), (None, 10.0, 0.4)):
        config = {"kl_type": kind, "input_clamp_value": into, "output_clamp_value": out}
        x = arrays["logprobs"].clone().requires_grad_()
        estimate = oracle.kl(kind, x, arrays["ref_logprobs"], into, out)
        (estimate * cotangent).sum().backward()
        result = replay(
            "nemo_rl",
            "kl_estimator",
            "calculate_kl",
            config,
            {"logprobs": arrays["logprobs"], "ref_logprobs": arrays["ref_logprobs"], "cotangent": cotangent},
        )
        close(result, {"kl": estimate.detach(), "grad_logprobs": x.grad}, f"{config}")


@pytest.mark.parametrize("sizes", [(4, 3, 2, 1), (8, 1), (2, 2, 2), (7,)], ids=str)
def test_group_advantages_are_their_formulas(sizes):
    g = torch.Generator().manual_seed(sum(sizes))
    groups = torch.tensor([n for n, size in enumerate(sizes) for _ in range(size)])[
        torch.randperm(sum(sizes), generator=g)
    ]
    for rewards, one_out, scaled in itertools.product(
        (
            torch.randn(len(groups), generator=g, dtype=torch.float64),
            torch.randint(0, 2, (len(groups),), generator=g).double(),
        ),
        (True, False),
        (True, False),
    ):
        config = {"use_leave_one_out_baseline": one_out, "normalize_rewards": scaled}
        result = replay(
            "nemo_rl",
            "advantage",
            "GRPOAdvantageEstimator.compute_advantage",
            config,
            {"rewards": rewards, "group_ids": groups, "mask": torch.ones(len(groups), 2)},
        )
        expected = oracle.group_advantages(config, rewards.tolist(), groups.tolist())
        close(result, dict(zip(("advantages", "baseline", "std"), expected, strict=True)), f"{config}")


@pytest.mark.parametrize("kind", [None, "k1", "k2", "k3"])
def test_advantages_of_tokens_are_their_formulas(kind):
    for seed in range(3):
        arrays = batch(seed)
        arrays |= {
            "rewards": arrays["advantages"][:, 0],
            "group_ids": torch.tensor([0, 1, 0, 1, 2]),
            "values": arrays["ref_logprobs"] - arrays["advantages"],
        }
        del arrays["sample_mask"]
        for baseline in (True, False):
            config = {"minus_baseline": baseline, "kl_in_reward": kind, "kl_coef": 0.2}
            close(
                replay("nemo_rl", "advantage", "ReinforcePlusPlusAdvantageEstimator", config, arrays),
                {"advantages": oracle.reinforce_plus_plus(config, arrays)},
                f"{config}",
            )
        for scaled, critic, own, alpha in (
            (True, None, None, 0.0),
            (False, 1.0, 0.95, 0.0),
            (True, 1.0, None, 0.4),
            (False, None, 0.3, 0.05),
        ):
            config = {
                "gae_lambda": 0.9,
                "gae_gamma": 0.97,
                "normalize_advantages": scaled,
                "gae_lambda_value": critic,
                "gae_lambda_policy": own,
                "length_adaptive_alpha": alpha,
                "kl_in_reward": kind,
                "kl_coef": 0.2,
            }
            advantages, returns = oracle.gae(config, arrays)
            close(
                replay("nemo_rl", "advantage", "GeneralizedAdvantageEstimator.compute_advantage", config, arrays),
                {"advantages": advantages, "returns": returns},
                f"{config}",
            )
    raw = replay("nemo_rl", "advantage", "RawRewardAdvantageEstimator.compute_advantage", {}, arrays)
    config = {"minus_baseline": False, "kl_in_reward": None}
    close(raw, {"advantages": oracle.reinforce_plus_plus(config, arrays)})
    bare = replay("nemo_rl", "advantage", "RawRewardAdvantageEstimator", {"normalize_advantages": False}, arrays)
    close(bare, {"advantages": arrays["rewards"][:, None].expand_as(arrays["mask"])})


def test_rewards_that_are_equal_where_something_trains_whiten_those_of_empty_rows():
    arrays = batch(0)
    arrays["rewards"] = torch.tensor([0.25, 1.5, 0.25, 0.25, 0.25], dtype=torch.float64)  # nothing trains in row 1
    arrays["group_ids"] = torch.arange(5)
    expected = oracle.reinforce_plus_plus({"minus_baseline": False, "kl_in_reward": None}, arrays)
    assert expected[1].abs().min() > 1e3
    close(replay("nemo_rl", "advantage", "RawRewardAdvantageEstimator", {}, arrays), {"advantages": expected})


def test_shaped_rewards_are_their_formulas():
    rewards, lengths = torch.tensor([1.0, -1.0, 0.5, 2.0]), torch.tensor([12, 37, 40, 77])
    config = {"overlong_buffer_length": 8, "overlong_buffer_penalty": 0.5, "max_response_length": 40}
    close(
        replay(
            "nemo_rl",
            "reward_shaping",
            "apply_reward_shaping",
            config,
            {"rewards": rewards, "response_lengths": lengths},
        ),
        {"rewards": oracle.shaped(config, rewards, lengths)},
    )
    config = {"stop_properly_penalty_coef": 0.25}
    cut = torch.tensor([1, 0, 1, 0])
    close(
        replay("nemo_rl", "reward_shaping", "apply_reward_shaping", config, {"rewards": rewards, "truncated": cut}),
        {"rewards": oracle.shaped(config, rewards, truncated=cut)},
    )
    close(replay("nemo_rl", "reward_shaping", "", {"enabled": False}, {"rewards": rewards}), {"rewards": rewards})
    with pytest.raises(SpecError, match="go together"):
        replay("nemo_rl", "reward_shaping", "", {"max_response_length": 40}, {"rewards": rewards})


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "kl", "correction"), [key for number, key in enumerate(GRID) if number % 9 == 0])
def test_settings_round_trip(ratio, kl, correction):
    spec = loss_spec("nemo_rl", PLAIN | RATIOS[ratio] | KLS[kl] | CORRECTIONS[correction])
    assert loss_spec("nemo_rl", settings_for("nemo_rl", spec)).model_dump(exclude={"kl"}) == spec.model_dump(
        exclude={"kl"}
    )
    again = loss_spec("nemo_rl", settings_for("nemo_rl", spec)).kl
    assert again == spec.kl or not spec.kl.coefficient


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dapo", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28, "token_level_loss": True}),
        ("dual_clip", {"ratio_clip_c": 3.0}),
        ("reinforce", {"disable_ppo_ratio": True}),
        ("on_policy", {"force_on_policy_ratio": True}),
    ],
)
def test_our_losses_have_options_there(name, said):
    settings = settings_for("nemo_rl", LossSpec(name=name))
    assert {option: settings[option] for option in said} == said


@pytest.mark.parametrize(
    "changes",
    [
        {"surrogate": {"kind": "sapo"}},
        {"denominator": "document_sum"},
        {"entropy_coefficient": 0.1},
        {"kl": {"coefficient": 0.1}},
        {"correction": {"kind": "opsm"}},
    ],
)
def test_a_loss_that_it_has_not_is_refused(changes):
    with pytest.raises(SpecError, match="NeMo-RL"):
        settings_for("nemo_rl", LossSpec(**changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio_clip_maximum": 0.3}, "did you mean 'ratio_clip_max'"),
        ({"sequence_level_importance_ratios": True}, "needs token_level_loss: False"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo goes with"),
        ({"truncated_importance_sampling_type": "tis"}, "needs use_importance_sampling_correction"),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"},
            "needs truncated_importance_sampling_ratio",
        ),
        ({"truncated_importance_sampling_ratio": 2.0}, "needs truncated_importance_sampling_type"),
        (truncated("icepop", 2.0, None), "icepop needs truncated_importance_sampling_ratio_min"),
        (truncated("tis", 0.5, 2.0), "is above"),
        ({**truncated("seq-mask-tis", 1.1, 0.9), **SEQUENCE}, "seq-mask-tis does not go"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c = 1.0"),
    ],
)
def test_options_that_it_refuses_are_refused_here(settings, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("nemo_rl", settings)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c has no effect"),
        ({"force_on_policy_ratio": True, "disable_ppo_ratio": True}, "disable_ppo_ratio has no effect"),
        ({"use_importance_sampling_correction": True, **SEQUENCE}, "product of its tokens' ratios"),
        ({"use_kl_in_reward": True}, "20 and 10"),
        ({}, "gradient of sampling"),
        ({"positive_example_nll_weight": 0.1}, "no effect on a batch without rewards"),
    ],
)
def test_implicit_behaviour_is_noted(settings, note):
    assert any(note in text for text in translation("nemo_rl", settings).notes)


def test_an_estimator_that_there_is_not_is_refused():
    with pytest.raises(SpecError, match="GRPOAdvantageEstimator"):
        replay("nemo_rl", "advantage", "OPDAdvantageEstimator.compute_advantage", {}, {"rewards": torch.ones(1)})


@pytest.mark.parametrize("kl", [name for name in KLS if name not in ("none", "in_reward")])
@pytest.mark.parametrize("ratio", ["tokens", "rows", "gspo", "forced", "cispo"])
def test_the_penalty_is_of_the_unfiltered_policy_where_that_is_given(ratio, kl):
    """The ratio's part without penalty, and the penalty's part without advantages, each with its own policy."""
    arrays = batch(4)
    whole = arrays["logprobs"] - 0.3 * torch.rand(
        arrays["logprobs"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    config = {**PLAIN, "global_valid_toks": 31.0, "global_valid_seqs": 7.0, **RATIOS[ratio], **KLS[kl]}
    result = replay(
        "nemo_rl", "policy_loss", "ClippedPGLossFn.__call__", config, arrays | {"logprobs_unfiltered": whole}
    )
    policy = oracle.policy_loss({**config, "reference_policy_kl_penalty": 0.0}, arrays)
    penalty = oracle.policy_loss(
        config, arrays | {"logprobs": whole, "advantages": torch.zeros_like(arrays["advantages"])}
    )
    close(
        result,
        {
            "loss": policy["loss"] + penalty["loss"],
            "grad_logprobs": policy["grad_logprobs"],
            "grad_logprobs_unfiltered": penalty["grad_logprobs"],
        },
        f"{ratio} {kl}",
    )
    close(result["metrics"]["kl_penalty"], penalty["metrics"]["kl_penalty"], f"{ratio} {kl}")
    close(result["metrics"]["probs_ratio"], policy["metrics"]["probs_ratio"], f"{ratio} {kl}")


@pytest.mark.parametrize("kl", ["none", "in_reward"])
def test_without_a_penalty_in_the_loss_the_unfiltered_policy_is_not_looked_at(kl):
    arrays, config = batch(4), {**PLAIN, "global_valid_toks": 31.0, "global_valid_seqs": 7.0, **KLS[kl]}
    plain = replay("nemo_rl", "policy_loss", "f", config, arrays)
    result = replay("nemo_rl", "policy_loss", "f", config, arrays | {"logprobs_unfiltered": arrays["logprobs"] - 1})
    close(result, {"loss": plain["loss"], "grad_logprobs": plain["grad_logprobs"]})
