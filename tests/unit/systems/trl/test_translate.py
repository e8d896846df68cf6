"""TRL against its formulas, row by row, for every option of the loss, its correction for vLLM and its advantages."""

import itertools
import math

import pytest
import torch

from tests.oracles.systems import trl as oracle
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo")
PLAIN = {
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "use_bias_correction_kl": False,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "vllm_is": None,
    "entropy_coef": 0.0,
    "num_items_in_batch": 41.0,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "max_completion_length": 9,
    "sapo_temperature_pos": 0.8,
    "sapo_temperature_neg": 1.05,
    "vespo": {"k_pos": 1.5, "lambda_pos": 2.0, "k_neg": 3.0, "lambda_neg": 0.0},
}
VARIANTS = {
    "plain": {},
    "kl": {"beta": 0.07},
    "kl_corrected": {"beta": 0.07, "use_bias_correction_kl": True},
    "accumulated": {"beta": 0.07, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "nothing_counted": {"num_items_in_batch": 0.0},
    "weights_of_tokens": {"beta": 0.07, "vllm_is": "token"},
    "weights_of_rows": {"vllm_is": "sequence"},
    "delta": {"delta": 1.3, "epsilon_low": 0.05, "epsilon_high": 0.1},
    "delta_within_the_clip": {"delta": 1.1},
    "off_policy": {"off_policy_mask_threshold": 0.05, "beta": 0.07},
    "off_policy_of_the_sampler": {"off_policy_mask_threshold": 0.05, "vllm_is": "token", "sampler": True},
    "sampler_unknown": {"off_policy_mask_threshold": -0.02, "sampler": "unknown"},
    "high_entropy": {"top_entropy_quantile": 0.4, "beta": 0.07},
    "entropy_bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.02, "gradient_accumulation_steps": 2},
    "highest_entropy": {"top_entropy_quantile": 0.0, "entropy_coef": 0.02},
    "on_policy": {"old": False, "beta": 0.07, "use_bias_correction_kl": True},
    "advantage_a_token": {"by_token": True, "use_bias_correction_kl": True},
    "empty_row": {"empty": True, "beta": 0.07},
}


def batch(seed, options, *, rows=4, length=6):
    """Arrays of a call, with garbage where nothing counts."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.zeros(rows, length, dtype=torch.float64)
    for row, trained in enumerate((length, 1, 0 if options.get("empty") else 3, 4)):
        mask[row, :trained] = 1
    mask[0, 2] = 0
    logprobs = -normal(rows, length).abs() - 0.01
    spread = (0.08, 0.3, 1.0)[seed % 3]
    arrays = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + spread * normal(rows, length),
        "mask": mask,
        "ref_logprobs": logprobs + 0.3 * normal(rows, length),
        "entropies": normal(rows, length).abs(),
        "advantages": normal(rows, length) if options.get("by_token") else normal(rows),
    }
    if not options.get("old", True):
        del arrays["old_logprobs"]
    if options["vllm_is"]:
        arrays["is_weights"] = normal(rows, length if options["vllm_is"] == "token" else 1).exp()
        arrays["is_weights"][1, 0] = 0.0
    if options.get("sampler"):
        arrays["rollout_logprobs"] = arrays["old_logprobs"] + 0.2 * normal(rows, length)
        if options["sampler"] == "unknown":
            arrays["rollout_logprobs"][3, 1] = math.nan
    return arrays


def options_of(kind, level, variant):
    changed = {**PLAIN, **VARIANTS[variant], "loss_type": kind, "importance_sampling_level": level}
    if kind == "cispo":
        changed["epsilon_high"] = 1.4
    return changed


def said(options):
    return {name: value for name, value in options.items() if name not in ("old", "by_token", "empty", "sampler")}


def assert_close(found, expected, context):
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-12,
        msg=lambda message: f"{context}: {message}",
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_the_loss(kind, level, seed):
    for number, variant in enumerate(VARIANTS):
        options = options_of(kind, level, variant)
        arrays = batch(seed + number, options)
        expected = oracle.policy_loss(options, arrays)
        result = replay("trl", "policy_loss", "_compute_loss", said(options), arrays)
        for name in ("loss", "grad_logprobs"):
            assert_close(result[name], expected[name], f"{variant}: {name}")
        for name, value in expected["metrics"].items():
            assert_close(result["metrics"][name], value, f"{variant}: {name}")


def test_uncounted_values_do_not_matter():
    options = options_of("dapo", "token", "kl_corrected")
    arrays = batch(0, options)
    poisoned = {
        name: torch.where(arrays["mask"] == 0, torch.nan, value)
        if value.shape == arrays["mask"].shape and name != "mask"
        else value
        for name, value in arrays.items()
    }
    expected, result = (replay("trl", "policy_loss", "", said(options), each) for each in (arrays, poisoned))
    assert torch.equal(result["loss"], expected["loss"])
    assert torch.equal(result["grad_logprobs"], expected["grad_logprobs"])


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_of_the_correction_for_vllm(mode):
    for seed, (low, high) in enumerate([(None, 2.0), (0.5, None), (0.5, 2.0), (0.9, 1.1), (1.1, 3.0)]):
        arrays = batch(seed, {"vllm_is": None, "sampler": "unknown", "empty": True})
        options = {"mode": mode, "clip_min": low, "clip_max": high}
        needed = {name: arrays[name] for name in ("old_logprobs", "rollout_logprobs", "mask")}
        result = replay("trl", "is_correction", "", options, needed)
        assert_close(result["is_weights"], oracle.is_weights(options, arrays), f"{options}")


@pytest.mark.parametrize("together", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages(together, scale):
    for seed, (size, groups, functions, unscored) in enumerate(
        itertools.product((1, 2, 4), (1, 3), (1, 3), (0.0, 0.4))
    ):
        g = torch.Generator().manual_seed(seed)
        rewards = torch.randn(size * groups, functions, generator=g, dtype=torch.float64)
        rewards[torch.rand(rewards.shape, generator=g) < unscored] = math.nan
        rewards[:size] = 1.0 if seed % 2 else rewards[:size]
        weights = torch.rand(functions, generator=g, dtype=torch.float64) + 0.5
        options = {"multi_objective_aggregation": together, "scale_rewards": scale, "num_generations": size}
        scored = [[None if math.isnan(r) else r for r in row] for row in rewards.tolist()]
        result = replay("trl", "advantage", "", options, {"rewards_per_func": rewards, "reward_weights": weights})
        assert_close(result["advantages"], oracle.advantages(options, scored, weights.tolist()), f"{options} {seed}")


# ---- translation ---------------------------------------------------------------------------------------------


def test_defaults_are_those_of_grpo_config():
    spec = loss_spec("trl", {})
    assert (spec.surrogate.kind, spec.surrogate.clip_low, spec.surrogate.clip_high) == ("ppo", 0.2, 0.2)
    assert (spec.denominator, spec.kl.coefficient, spec.correction.acts) == ("token", 0.0, False)
    sampled = loss_spec("trl", {"use_vllm": True}).correction
    assert (sampled.ratio, sampled.outside) == ("document_sum", "zero")
    assert (sampled.ratio_low, sampled.ratio_high) == (None, 3.0)
    assert loss_spec("trl", {"beta": 0.1}).kl.importance == "old"


def test_a_threshold_looks_at_the_sampler_where_vllm_sampled():
    anchors = {
        vllm: loss_spec("trl", {"off_policy_mask_threshold": 0.1, "use_vllm": vllm}).correction.opsm_anchor
        for vllm in (True, False)
    }
    assert anchors == {True: "sampler", False: "old"}


def test_old_logprobs_are_used_if_steps_and_generations_are_not_aligned():
    for options in ({"num_iterations": 2}, {"steps_per_generation": 4}, {"use_vllm": True}):
        assert not any("no old log-probabilities" in note for note in translation("trl", options).notes)


def test_the_bound_by_its_former_name_wins():
    asked = {"use_vllm": True, "vllm_importance_sampling_cap": 2.0}
    assert loss_spec("trl", asked).correction.ratio_high == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_leads_to_the_same_loss(kind):
    asked = [options_of(kind, level, variant) for level in ("token", "sequence") for variant in VARIANTS]
    asked += [
        {
            "loss_type": kind,
            "use_vllm": True,
            "vllm_importance_sampling_mode": mode,
            "beta": 0.1,
            "vllm_importance_sampling_clip_min": 0.2,
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ]
    for options in map(said, asked):
        spec = loss_spec("trl", options)
        assert loss_spec("trl", settings_for("trl", spec)) == spec


def test_a_loss_that_trl_supports_has_its_options():
    spec = LossSpec(name="dapo", kl={"coefficient": 0.1})
    options = settings_for("trl", spec)
    assert (options["loss_type"], options["epsilon"], options["epsilon_high"]) == ("dapo", 0.2, 0.28)
    assert (options["beta"], options["use_bias_correction_kl"]) == (0.1, False)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "gmpo"}, "the surrogate 'gmpo'"),
        ({"name": "dual_clip"}, "surrogate.dual_clip = 3.0"),
        ({"denominator": "prompt_group"}, "the denominator 'prompt_group'"),
        (
            {"denominator": "document", "compat": {"documents_counted": "all"}},
            "scaling.counts = 'step' .TRL: 'micro_batch'",
        ),
        ({"correction": {"kind": "sequence_tis_mean"}}, "the ratio 'document_mean'"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "kl.estimator = 'k1'"),
    ],
)
def test_unsupported_settings_are_refused(spec, words):
    with pytest.raises(SpecError, match=words):
        settings_for("trl", LossSpec(**spec))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_typ": "grpo"}, "unknown option 'loss_typ' .did you mean 'loss_type'"),
        ({"loss_type": "ppo"}, "loss_type = 'ppo'"),
        ({"use_adaptive_entropy": True}, "the controller changes the coefficient from step to step"),
    ],
)
def test_options_that_cannot_be_translated_are_refused(options, words):
    with pytest.raises(SpecError, match=words):
        loss_spec("trl", options)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"loss_type": "cispo"}, "cispo bounds the ratio by epsilon_high itself, 0.2"),
        ({"loss_type": "sapo"}, "have no effect on sapo"),
        ({"loss_type": "grpo"}, "a mean of means"),
        ({"loss_type": "dapo"}, "num_items_in_batch is of the generation batch"),
        ({"use_vllm": True}, "product of its tokens' ratios"),
        ({"use_vllm": True, "beta": 0.1}, "still get the KL penalty"),
        ({"entropy_coef": 0.1}, "whatever divides the policy term"),
        ({"top_entropy_quantile": 0.2}, "the micro-batches of all processes"),
        ({"mask_truncated_completions": True}, "must come with a mask of zeros"),
        ({"gradient_accumulation_steps": 4}, "no old log-probabilities are kept"),
    ],
)
def test_implicit_behaviour_is_noted(options, note):
    assert any(note in each for each in translation("trl", options).notes)


def test_options_of_the_whole_config_without_effect_are_listed():
    whole = {"beta": 0.1, "learning_rate": 1e-6, "top_p": 0.9, "scale_rewards": "none", "bf16": True}
    result = translation("trl", whole)
    assert result.spec == loss_spec("trl", {"beta": 0.1})
    [note] = [text for text in result.notes if text.startswith("without effect")]
    assert note == "without effect on the loss: learning_rate, top_p, scale_rewards, bf16"
    with pytest.raises(SpecError, match="learning_rates"):
        loss_spec("trl", {"learning_rates": 1e-6})


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"router_aux_loss_coef": 0.01}, "load-balancing loss"),
        ({"router_aux_loss_coef": None}, "load-balancing loss"),
        ({"cast_lm_head_to_fp32": True}, "float32 head"),
        ({"use_liger_kernel": True}, "the system 'liger'"),
    ],
)
def test_options_that_change_the_loss_elsewhere_are_noted(settings, note):
    assert any(note in text for text in translation("trl", settings).notes)
    assert not any(note in text for text in translation("trl", {"router_aux_loss_coef": 0.0}).notes)
