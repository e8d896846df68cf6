"""ServiceNow/PipelineRL: one step on packed documents, divided by a configured number of them.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field

from workbench.losses.build import surrogate_ratio
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.denominators import GivenCounts
from workbench.rollouts.advantages.groups import group_advantages
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics.alias import PeerSettings, settings_of
from workbench.systems.metrics.pipelinerl import clipped_documents, token_weight_numbers
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, evaluate_case, finish, policy_settings


class PipelineRLSettings(Settings):
    """`RLConfig`, and what `rl_step` is called with (pipelinerl/finetune/rl/__init__.py, 58d39345)."""

    policy_loss: Literal["ppo", "reinforce", "gspo"] = "ppo"
    """Which surrogate."""
    use_advantages: bool = True
    """Drive it by advantages, not by rewards; gspo always takes advantages."""
    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1; reinforce does not look at it."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    batch_size: float = Field(0, ge=0)
    """Documents that every sum is divided by; 0, the default, divides by zero there and stands for the documents of the
    step here."""
    reward_minus_kl_coef: float = 0.0
    """No number depends on it."""
    kl_coef: float = Field(0.1, ge=0)
    """Coefficient of the KL penalty at the first step."""
    final_kl_coef: float = Field(0.1, ge=0)
    """At the last step; linear between."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy bonus at the first step."""
    final_entropy_bonus: float = 0.0
    """At the last step; linear between."""
    relu_log_p_weights: bool = False
    """Leave tokens with a negative signal silent."""
    clamp_log_ratio_ref_new_value: float = Field(10, gt=0)
    """Bound of the log ratio inside the KL estimate."""
    divide_advantage_by_std: bool = True
    """When advantages are made."""
    overlong_filtering: bool = False
    """Documents that were cut off weigh nothing, and stay in every count."""
    group_normalization: bool = False
    """Divide by the mean number of tokens of the group's rollouts, in place of batch_size."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits."""
    filter_zero_advantage_groups: bool = False
    """When batches are made."""
    value_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of a critic's loss; only a model with a value head has one."""
    current_step: int = Field(0, ge=0)
    """Given: where the two schedules are."""
    max_step: int = Field(1, gt=0)
    """Given: where they end."""
    packed: bool = True
    """Given: whether documents are packed; gspo needs it."""

    @property
    def kl_now(self) -> float:
        """The KL coefficient at this step."""
        return self._now(self.kl_coef, self.final_kl_coef)

    @property
    def entropy_now(self) -> float:
        """The entropy coefficient at this step."""
        return self._now(self.entropy_bonus, self.final_entropy_bonus)

    def _now(self, first: float, last: float) -> float:
        return first + (last - first) * self.current_step / self.max_step


def translate(settings: PipelineRLSettings) -> Translation:
    """One step of its loss."""
    notes = []
    high = settings.epsilon_high
    surrogate: dict[str, Any] = {
        "ppo": {"kind": "ppo", "clip_low": settings.epsilon_low, "clip_high": high},
        "reinforce": {"kind": "cispo", "clip_low": None, "clip_high": high},
        "gspo": {"kind": "gspo", "clip_low": settings.epsilon_low, "clip_high": high, "advantage_level": "document"},
    }[settings.policy_loss]
    rest: dict[str, Any] = {}
    if settings.policy_loss == "gspo":
        notes += [
            "a document weighs by its length",
            "advantages are averaged over the document",
            "kl_coef, entropy_bonus, use_advantages and relu_log_p_weights have no effect",
        ]
    else:
        if settings.kl_now:
            rest["kl"] = {
                "coefficient": settings.kl_now,
                "estimator": "k3",
                "input_clamp": settings.clamp_log_ratio_ref_new_value,
            }
        rest["entropy_coefficient"] = settings.entropy_now
        rest["signal"] = "advantages" if settings.use_advantages else "rewards"
        rest["signal_floor"] = 0.0 if settings.relu_log_p_weights else None
    if settings.policy_loss == "reinforce":
        notes.append("the weight has no lower bound, and epsilon_low no effect")
    if settings.reward_minus_kl_coef:
        notes.append("reward_minus_kl_coef has no effect")
    if settings.value_loss_coef:
        notes.append("value_loss_coef acts on a model with a value head alone; this is the policy's part")
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        truncated="silent" if settings.overlong_filtering else "train",
        denominator="group_length" if settings.group_normalization else "document_sum",
        documents_counted="all",
        scaling=CONTRACTS["pipelinerl"]["deepspeed"],
        **rest,
    )
    return Translation(spec, tuple(notes), ("current_step", "max_step", "packed"))


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of its loss, with schedules that stand still."""
    kind, surrogate = spec.surrogate.kind, spec.surrogate
    losses = {"ppo": "ppo", "cispo": "reinforce", "gspo": "gspo"}
    if kind not in losses:
        raise refuse("PipelineRL", f"the surrogate {kind!r}", "its losses are ppo, reinforce (truncated) and gspo")
    settings: dict[str, Any] = {
        "policy_loss": losses[kind],
        "epsilon_high": surrogate.clip_high,
        "epsilon_low": 0.2 if surrogate.clip_low is None else surrogate.clip_low,
        "kl_coef": spec.kl.coefficient,
        "final_kl_coef": spec.kl.coefficient,
        "clamp_log_ratio_ref_new_value": spec.kl.input_clamp or 10,
        "entropy_bonus": spec.entropy_coefficient,
        "final_entropy_bonus": spec.entropy_coefficient,
        "use_advantages": spec.signal == "advantages",
        "relu_log_p_weights": spec.signal_floor == 0,
        "overlong_filtering": spec.truncated == "silent",
        "group_normalization": spec.denominator == "group_length",
    }
    return checked_back("PipelineRL", spec, PipelineRLSettings, translate, settings)


def counts(settings: PipelineRLSettings) -> GivenCounts | None:
    """The configured number of documents."""
    return GivenCounts(documents=settings.batch_size) if settings.batch_size else None


def temperature(settings: PipelineRLSettings) -> float:
    """What logits are divided by."""
    return settings.temperature


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """One `rl_step` on logits."""
    settings = policy_settings(case)
    leaf = case["logits"].clone().requires_grad_()
    said = token_logprobs_from_logits(case.counted(leaf), case.targets_T, temperature=settings.temperature)
    overflow = case["targets"].new_zeros(case.shape) if case.get("overflow") is None else case.spread("overflow")
    extensions = {"truncated": overflow.reshape(-1)}
    if case.get("group_tokens") is not None:
        extensions["group_tokens"] = case.spread("group_tokens").reshape(-1)
    outputs = finish(evaluate_case(case, said, extensions=extensions), {"grad_logits": leaf})
    if not case.loss_mask_T.any():  # then it reports nothing else
        outputs["metrics"] = {"input_size": outputs["metrics"]["input_size"]}
    return outputs


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Sums over documents. The KL is measured whether or not it is in the loss."""
    spec = replayed.translation.spec
    measured = spec.kl.model_copy(update={"input_clamp": replayed.settings.clamp_log_ratio_ref_new_value})
    return settings_of(spec, replayed.slots)._replace(num_documents=1, spec=spec.model_copy(update={"kl": measured}))


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """The loss, weights, coefficients and sizes."""
    settings, case = replayed.settings, replayed.case
    loss = float(replayed.evaluated.scalars["total"].value.detach())
    rows, length = torch.Size([1, *case.shape])[-2:]
    weights_T, clip = replayed.weights["policy"].loss_T, peer_settings(replayed).clip
    documents, clipped = replayed.slots.number, {}
    if settings.policy_loss == "gspo":
        ratio_T = surrogate_ratio(replayed.inputs, replayed.translation.spec)
        clipped["clamp_log_ratio_new_old_indicator"] = clipped_documents(ratio_T, replayed.inputs, weights_T, clip)
    return {
        "loss": loss,
        "max_loss": loss,
        "min_loss": loss,
        **token_weight_numbers(replayed.inputs, weights_T),
        **clipped,
        "kl_coef": documents * settings.kl_now,
        "entropy_bonus_coef": documents * settings.entropy_now,
        "input_size": float(rows * (length + 1)),
    }


# ---- advantages ------------------------------------------------------------------------------------------------


class AdvantageSettings(Settings):
    """`populate_rl_data` (pipelinerl/finetune/rl/__init__.py, 58d39345)."""

    divide_advantage_by_std: bool = True
    """Divide by the group's standard deviation."""
    eps: float = Field(1e-4, ge=0)
    """Added to it; 1e-4 in the code."""


def advantage(case: Case) -> dict[str, Any]:
    """Leave-one-out means, divided by the deviation of the whole group."""
    settings = parse_settings(AdvantageSettings, case.config, where="pipelinerl")
    return {
        "advantages": group_advantages(
            case["rewards"],
            case["group_ids"],
            baseline="leave_one_out",
            ddof=1,
            epsilon=settings.eps,
            scale="std" if settings.divide_advantage_by_std else "none",
        )
    }


SYSTEM = System(
    name="pipelinerl",
    title="PipelineRL",
    version="58d39345",
    settings=PipelineRLSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["pipelinerl"],
    temperature=temperature,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={"policy_loss_logits": policy_loss_logits, "advantage": advantage},
)
