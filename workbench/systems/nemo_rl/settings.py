"""Options of NVIDIA-NeMo/RL, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.specs.losses.base import above
from workbench.systems.registry import Settings

EPSILON = 1e-8
"""Added to every count that divides."""


IN_REWARD = {"input_clamp": 20.0, "output_clamp": 10.0}
"""Bounds of a KL penalty in the reward, for any options of the loss."""


class ClippedPGSettings(Settings):
    """`ClippedPGLossConfig` (nemo_rl/algorithms/loss/loss_functions.py, 7ea279ab)."""

    disable_ppo_ratio: bool = False
    """Multiply advantages by log-probabilities in place of ratios."""
    token_level_loss: bool = True
    """Mean over tokens; False: over rows, of the row's mean over tokens."""
    sequence_level_importance_ratios: bool = False
    """One ratio and one correction weight per row: the ratio is a geometric mean, the weight a product."""
    ratio_clip_min: float = 0.2
    """Length of the clip below 1."""
    ratio_clip_max: float = 0.2
    """Length of the clip above 1."""
    ratio_clip_c: float | None = Field(None, gt=1)
    """Dual clip; None: none."""
    reference_policy_kl_penalty: float = Field(0.01, ge=0)
    """Coefficient of the KL penalty."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator; the error metrics take it too."""
    kl_input_clamp_value: float | None = Field(20.0, gt=0)
    """Bound of the log ratio in it."""
    kl_output_clamp_value: float | None = Field(10.0, gt=0)
    """Bound of the weighted estimate."""
    use_kl_in_reward: bool = False
    """Take the penalty off the reward, and leave it out of the loss."""
    use_importance_sampling_correction: bool = False
    """Multiply by old / sampler."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Handling of weights outside their bounds: truncate; zero; or drop rows by the geometric mean."""
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0)
    """Upper bound."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound; None: 0."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate by policy / sampler."""
    force_on_policy_ratio: bool = False
    """Take the policy itself for the old one: every ratio is 1."""
    use_cispo: bool = False
    """The clipped ratio as a detached weight."""
    positive_example_nll_weight: float = Field(0.0, ge=0)
    """Weight of the likelihood of rewarded rows; silently without effect if the batch has no rewards."""
    global_valid_seqs: float | None = Field(None, ge=0)
    """Given: rows of the whole batch whose sample mask is 1."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""

    @model_validator(mode="after")
    def _valid_combination(self) -> ClippedPGSettings:
        kind, name = self.truncated_importance_sampling_type, "truncated_importance_sampling"
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        sequence, bounded = self.sequence_level_importance_ratios, kind is not None
        not_cispo = self.disable_ppo_ratio or self.force_on_policy_ratio or sequence or self.ratio_clip_c is not None
        broken = (
            (sequence and self.token_level_loss, "sequence_level_importance_ratios needs token_level_loss: False"),
            (
                self.use_cispo and (not_cispo or not self.token_level_loss),
                "use_cispo goes with token_level_loss, and not with disable_ppo_ratio, force_on_policy_ratio, "
                "sequence_level_importance_ratios or ratio_clip_c",
            ),
            (
                bounded and not self.use_importance_sampling_correction,
                f"{name}_type needs use_importance_sampling_correction",
            ),
            (bounded and high is None, f"{name}_type needs {name}_ratio"),
            (not bounded and high is not None, f"{name}_ratio needs {name}_type"),
            (kind in ("icepop", "seq-mask-tis") and low is None, f"{kind} needs {name}_ratio_min"),
            (bounded and above(low, high), f"{name}_ratio_min is above {name}_ratio"),
            (kind == "seq-mask-tis" and sequence, "seq-mask-tis does not go with sequence_level_importance_ratios"),
        )
        for violated, rule in broken:
            if violated:
                raise ValueError(rule)
        return self


class NLLSettings(Settings):
    """`NLLLossFn` (the same file)."""

    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""


class PreferenceSettings(Settings):
    """`PreferenceLossFn` (the same file): Bradley-Terry on rewards of rows 2i (chosen) and 2i + 1 (rejected)."""

    global_valid_seqs: float | None = Field(None, ge=0)
    """Given: rows of the whole batch, two per pair."""


class DPOSettings(PreferenceSettings):
    """`DPOLossConfig` (the same file)."""

    reference_policy_kl_penalty: float = 0.05
    """Inverse temperature of the implied reward."""
    preference_loss_weight: float = 1.0
    """Weight of the preference term."""
    sft_loss_weight: float = Field(0.0, ge=0)
    """Weight of the chosen rows' negative log-likelihood."""
    preference_average_log_probs: bool = False
    """Implied rewards are means over tokens, not sums."""
    sft_average_log_probs: bool = False
    """Likelihoods of rows are means over tokens, not sums."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given, and not used."""


class ValueSettings(Settings):
    """`MseValueLossConfig` (the same file): half the squared error."""

    scale: float = 1.0
    """Multiplies the loss."""
    cliprange: float | None = None
    """Greatest distance of a value from the old one; None and 0: any."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""
    global_valid_seqs: float | None = Field(None, ge=0)
    """Given, and not used."""


class KLSettings(Settings):
    """`calculate_kl` (nemo_rl/algorithms/utils.py, 7ea279ab)."""

    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """The estimator."""
    input_clamp_value: float | None = Field(20.0, gt=0)
    """Bound of the log ratio."""
    output_clamp_value: float | None = Field(10.0, gt=0)
    """Bound of the estimate."""


class GroupSettings(Settings):
    """`GRPOAdvantageEstimator` (nemo_rl/algorithms/advantage_estimator.py, 7ea279ab)."""

    use_leave_one_out_baseline: bool = True
    """Against the mean, and in deviations, of the other completions of the group."""
    normalize_rewards: bool = True
    """Divide by the deviation plus 1e-6, if there is any."""


class RewardKLSettings(Settings):
    """A KL penalty in the reward, of the estimators that have one (the same file)."""

    kl_in_reward: Literal["k1", "k2", "k3"] | None = None
    """Its estimator; None: no penalty."""
    kl_coef: float = 0.01
    """Its coefficient: reference_policy_kl_penalty of the loss."""


class ReinforcePlusPlusSettings(RewardKLSettings):
    """`ReinforcePlusPlusAdvantageEstimator` (the same file)."""

    minus_baseline: bool = True
    """Take the group's mean off the reward."""


class GAESettings(RewardKLSettings):
    """`GeneralizedAdvantageEstimator` (the same file)."""

    gae_lambda: float = 0.95
    """Default of the two lambdas below."""
    gae_gamma: float = 1.0
    """Discount."""
    normalize_advantages: bool = True
    """Whiten them over the batch."""
    gae_lambda_value: float | None = None
    """Lambda of the critic's returns."""
    gae_lambda_policy: float | None = None
    """Lambda of the advantages."""
    length_adaptive_alpha: float = Field(0.0, ge=0)
    """Lambda of the advantages is 1 - 1 / (alpha length); 0: it is fixed."""


class RawRewardSettings(Settings):
    """`RawRewardAdvantageEstimator` (the same file)."""

    normalize_advantages: bool = True
    """Whiten them over the batch."""


class ShapingSettings(Settings):
    """`RewardShapingConfig` (nemo_rl/algorithms/reward_functions.py, 7ea279ab), switched on."""

    enabled: bool = True
    """Shape rewards."""
    overlong_buffer_length: int | None = None
    """Length of the last stretch of a completion, in which it is penalised."""
    overlong_buffer_penalty: float | None = None
    """Penalty at its end."""
    max_response_length: int | None = None
    """Position of its end."""
    stop_properly_penalty_coef: float | None = None
    """Share of its reward that a truncated completion keeps. The overlong options are then silently ignored."""
