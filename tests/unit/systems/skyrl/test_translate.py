"""SkyRL against its formulas, row by row, for every policy loss, reduction, penalty and correction."""

import pytest
import torch

from tests.oracles.systems import skyrl as oracle
from tests.unit.reduction.test_weights import trained_rows as rows
from workbench.errors import SpecError
from workbench.losses.canonical import canonical
from workbench.reduction.weights import StepLayout, step_weights
from workbench.specs.losses import LossSpec
from workbench.systems.replays import replay
from workbench.systems.translate import loss_spec, settings_for, translation

PLAIN = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.28,
    "clip_ratio_c": 1.5,
    "use_kl_loss": False,
    "kl_loss_coef": 0.07,
    "kl_estimator_type": "k3",
    "use_entropy_loss": False,
    "entropy_loss_coef": 0.02,
    "max_seq_len": 9,
    "off_policy_correction": {},
    "sapo": {"tau_pos": 0.8, "tau_neg": 1.05},
    "cispo": {"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.3},
    "dppo": {"dppo_type": "binary_tv", "delta_low": 0.05, "delta_high": 0.03},
}
LOSSES = {
    **{kind: {"policy_loss_type": kind} for kind in ("regular", "dual_clip", "gspo", "cispo", "sapo", "rollout_is")},
    "importance_sampling": {"policy_loss_type": "importance_sampling"},
    "dppo_tv": {"policy_loss_type": "dppo"},
    "dppo_kl": {"policy_loss_type": "dppo", "dppo": {"dppo_type": "binary_kl", "delta_low": 0.02, "delta_high": 0.01}},
}
REDUCTIONS = {
    "token_mean": {},
    "sequence_mean": {"loss_reduction": "sequence_mean", "use_kl_loss": True},
    "constant": {"loss_reduction": "seq_mean_token_sum_norm", "use_kl_loss": True, "kl_estimator_type": "k2"},
    "prompt_mean": {"loss_reduction": "prompt_mean", "use_entropy_loss": True},
    "token_mean_kl": {"use_kl_loss": True, "kl_estimator_type": "abs", "use_entropy_loss": True},
    "legacy": {"loss_reduction": "token_mean_legacy", "use_kl_loss": True, "kl_estimator_type": "k1"},
}
CORRECTIONS = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.05},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.95, "geo_mask_high": 1.04},
    "product": {"sequence_mask_metric": "product", "product_mask_low": 0.8, "product_mask_high": 1.3},
    "outliers": {
        "outlier_token_is_threshold_low": 0.8,
        "outlier_token_is_threshold_high": 1.3,
        "tis_ratio_type": "token",
    },
    "one_outlier": {"outlier_token_is_threshold_high": 1.15},
    "tokens": {"token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 1.15, "tis_ratio_type": "token"},
    "half_a_mask": {"token_mask_is_threshold_low": 0.9},
}


def batch(seed, rows=5, length=6):
    """Arrays of a call: an empty row, one of one token, an interrupted one, and one far beyond the clamps."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.zeros(rows, length, dtype=torch.float64)
    for row, trained in enumerate((length, 0, 1, 4, 5)):
        mask[row, :trained] = 1
    mask[0, 2] = 0
    logprobs = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64) - 0.01
    old = (logprobs + (0.05, 0.3, 1.0)[seed % 3] * normal(rows, length)).clamp(max=-1e-3)
    old[4, 0] = logprobs[4, 0] - 21 if seed % 2 else old[4, 0]
    advantages = normal(rows, 1).expand(rows, length).clone()
    advantages[4, 0] = -abs(advantages[4, 0])
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": (logprobs + 0.3 * normal(rows, length)).clamp(max=-1e-3),
        "entropies": normal(rows, length).abs(),
        "advantages": advantages,
        "mask": mask,
        "rollout_logprobs": (old + 0.1 * normal(rows, length)).clamp(max=-1e-3),
        "group_ids": torch.tensor([0, 0, 1, 1, 2])[:, None].expand(rows, length).clone(),
    }


def agree(config, seed):
    arrays = batch(seed)
    result = replay("skyrl", "policy_loss", "ppo_policy_loss", config, arrays)
    expected = oracle.policy_loss(config, arrays)
    for name in ("loss", "grad_logprobs"):
        torch.testing.assert_close(result[name], expected[name], rtol=1e-10, atol=1e-11, msg=f"{name} {seed}")
    assert {*expected["metrics"]} <= {*result["metrics"]}
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", LOSSES)
def test_the_policy_loss_is_its_formula(kind, reduction):
    for seed in range(2):
        agree(PLAIN | LOSSES[kind] | REDUCTIONS[reduction], seed)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", ["dual_clip", "gspo"])
def test_a_correction_is_its_formula(kind, correction):
    for seed in (1, 2):
        agree(PLAIN | LOSSES[kind] | {"off_policy_correction": CORRECTIONS[correction]}, seed)


def test_the_penalty_has_a_mean_of_its_own_in_any_layout():
    """A token-mean policy term over two unequal micro-batches, next to a KL that is a mean over all rows."""
    spec = loss_spec("skyrl", {})
    weights, _ = step_weights(rows([5], [1, 2], [3], [1]), spec, step_layout=StepLayout(dp=2))
    policy = [weight["policy"].gradient_T[weight["policy"].gradient_T > 0].tolist() for weight in weights]
    assert policy == [pytest.approx([1 / 12] * n) for n in (5, 3, 3, 1)]
    kl = [weight["document"].gradient_T[weight["document"].gradient_T > 0].tolist() for weight in weights]
    assert kl[0] == pytest.approx([1 / 25] * 5)
    assert kl[1] == pytest.approx([1 / 5, 1 / 10, 1 / 10])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", LOSSES)
def test_settings_round_trip(kind, reduction):
    spec = loss_spec("skyrl", PLAIN | LOSSES[kind] | REDUCTIONS[reduction])
    assert canonical(loss_spec("skyrl", settings_for("skyrl", spec))) == canonical(spec)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_round_trip(correction):
    spec = loss_spec("skyrl", PLAIN | {"off_policy_correction": CORRECTIONS[correction]})
    assert loss_spec("skyrl", settings_for("skyrl", spec)).correction == spec.correction


def test_defaults_and_deprecated_options():
    spec = loss_spec("skyrl", {"use_tis": True, "tis_imp_ratio_cap": 1.7})
    assert (spec.kl.coefficient, spec.kl.estimator, spec.denominator) == (0.001, "k3", "token")
    assert (spec.correction.ratio, spec.correction.ratio_high) == ("token", 1.7)
    reward = loss_spec("skyrl", {"use_kl_loss": False, "use_kl_in_reward": True})
    assert reward.kl.placement == "reward"


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({}, "mean over rows of each row's mean"),
        ({"use_entropy_loss": True}, "mean over the micro-batch's tokens"),
        ({"loss_reduction": "token_mean_legacy"}, "mean of means"),
        ({"loss_reduction": "prompt_mean"}, "without trained tokens count"),
        ({"policy_loss_type": "gspo"}, "above 10"),
        ({"policy_loss_type": "dppo"}, "the old policy takes its place"),
        ({"off_policy_correction": CORRECTIONS["product"]}, "stay in the count"),
        ({"temperature": 0.7, "advantage_estimator": "rloo"}, "without effect on the loss: temperature, advantage_est"),
    ],
)
def test_implicit_behaviour_is_noted(settings, note):
    assert any(note in text for text in translation("skyrl", settings).notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss_type": "clip_cov"}, "has divided by the loss's count"),
        ({"policy_loss_type": "kl_cov"}, "that nothing divides"),
        ({"advantage_batch_normalize": True}, "padding included"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len, which has no default"),
        ({"policy_loss_type": "dual_clip", "clip_ratio_c": 1.0}, "greater than 1"),
        ({"policy_loss_type": "rollout_is", "use_tis": True, "tis_imp_ratio_cap": 2.0}, "the correction already"),
        ({"off_policy_correction": {**CORRECTIONS["tokens"], "tis_ratio_type": "sequence"}}, "the token mask kept"),
        ({"use_kl_in_reward": True}, "exclude each other"),
        ({"eps_clip": 0.2}, "did you mean 'eps_clip_low'"),
        ({"off_policy_correction": {"tis_ratio": "token"}}, "did you mean 'tis_ratio_type'"),
    ],
)
def test_options_that_it_refuses_are_refused_here(settings, message):
    with pytest.raises(SpecError, match=message):
        loss_spec("skyrl", settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "vespo"}, "its policy losses are"),
        ({"denominator": "raw"}, "its loss_reductions are"),
        ({"name": "reinforce"}, "rollout_is has two"),
        ({"surrogate": {"delta": 4.0}}, "no option for this"),
        ({"kl": {"coefficient": 0.1}}, "kl_denominator"),
    ],
)
def test_a_loss_that_it_has_not_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        settings_for("skyrl", LossSpec(**changes))
