"""linkedin/Liger-Kernel: losses fused with the output head, on policies (`LigerFusedLinearGRPOLoss`) and on pairs.

Letters: T packed tokens | N documents | P pairs | V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workbench.losses.preference import document_rewards, pair_losses, pair_weights
from workbench.losses.terms import LossInputs, Term
from workbench.policy.logprobs.reference import token_logprobs
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import TokenWeights
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, fused_linear_policy_loss
from workbench.systems.trl import CLIPPED, COUNTED, DENOMINATORS, LEAST_LAMBDA, LossType, with_weights_of_rows


class LigerSettings(Settings):
    """Options of `LigerFusedLinearGRPOLoss`, and what one call of it is handed (Liger-Kernel 0.8.5)."""

    loss_type: LossType = "dapo"
    """Surrogate and denominator."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of tokens, or the geometric mean over a row (not for cispo, sapo and vespo)."""
    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1; cispo: the bound itself."""
    delta: float | None = Field(None, gt=0)
    """Upper bound of the ratio in the unclipped branch."""
    beta: float = Field(0.04, ge=0)
    """Coefficient of the KL penalty against the reference (k3)."""
    use_ref_model: bool = True
    """Whether there is a reference; without one the penalty is of the policy against itself."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate with the ratio, gradient and all."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo: steepness where the advantage is positive."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo: steepness elsewhere."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power, advantages that are not negative."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay, advantages that are not negative; at least 1e-4."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: power, negative advantages."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: decay, negative advantages; at least 1e-4."""
    vespo: dict[Literal["k_pos", "lambda_pos", "k_neg", "lambda_neg"], float] | None = None
    """The four together; they win."""
    max_completion_length: int | None = Field(None, gt=0)
    """dr_grpo: the constant length."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits."""
    chunk_size: int = Field(1, gt=0)
    """Rows that are computed at a time; no number depends on it but for rounding."""
    compiled: bool = True
    """Whether the loss is compiled; no number depends on it but for rounding."""
    vllm_is: Literal["token", "sequence", "seq"] | None = None
    """Given: ready-made weights came with the batch, one a token or one a row."""
    num_items_in_batch: float | None = Field(None, ge=0)
    """Given: trained tokens of the generation batch, over all processes."""

    @model_validator(mode="after")
    def _as_the_kernel_refuses(self) -> LigerSettings:
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(f"{self.loss_type} has no ratio of rows in Liger: importance_sampling_level is token")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("dr_grpo divides by max_completion_length, and there is none")
        return self


class DPOSettings(Settings):
    """Options of `LigerFusedLinearDPOLoss` (Liger-Kernel 0.8.5)."""

    loss_type: Literal[
        "sigmoid",
        "hinge",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
    ] = "sigmoid"
    """Which loss of a pair."""
    beta: float = 0.1
    """Inverse temperature of the implied reward."""
    alpha: float = 1.0
    """Weight of the negative log-likelihood."""
    compute_nll_loss: bool = False
    """Whether to add the mean negative log-likelihood of the tokens of chosen answers."""
    use_ref_model: bool = True
    """Whether rewards are against a reference."""
    average_log_prob: bool = False
    """Means over an answer's tokens in place of sums."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """exo_pair, robust: share of preferences that are the wrong way round; without effect on others, sigmoid too."""
    discopop_tau: float = Field(0.05, gt=0)
    """discopop: temperature of the modulation."""
    ignore_index: int = -100
    """Targets that do not train."""
    chunk_size: int = Field(1, gt=0)
    """Pairs that are computed at a time; no number depends on it but for rounding."""
    compiled: bool = True
    """Whether the loss is compiled; no number depends on it but for rounding."""


def translate(settings: LigerSettings) -> Translation:
    """The fused loss on a policy."""
    kind, of_rows = settings.loss_type, settings.importance_sampling_level == "sequence"
    divided: dict[str, Any] = dict(DENOMINATORS[kind])
    if kind == "dr_grpo":
        divided["denominator_constant"] = settings.max_completion_length
    contract = "num_items_in_batch" if _is_counted(settings) else "local counts"
    kl: dict[str, Any] = {}
    if settings.beta and settings.use_ref_model:
        kl = {"coefficient": settings.beta}
        if settings.use_bias_correction_kl:
            kl |= {"importance": "old", "gradient": "score", "importance_level": "document" if of_rows else "token"}
    correction: dict[str, Any] = {}
    if settings.vllm_is is not None:
        correction = {"ratio": "given" if settings.vllm_is == "token" else "given_document_mean"}
        if kind == "vespo":
            correction["enters"] = "sequence_weight"
    spec = LossSpec(
        name="grpo",
        surrogate=_surrogate(settings),
        correction=correction,
        kl=kl,
        scaling=CONTRACTS["liger"][contract],
        **divided,
    )
    return Translation(spec, tuple(_notes(settings)), ("vllm_is", "num_items_in_batch"))


def _is_counted(settings: LigerSettings) -> bool:
    return settings.loss_type in COUNTED and settings.num_items_in_batch is not None


def _surrogate(settings: LigerSettings) -> dict[str, Any]:
    if settings.loss_type in CLIPPED:
        kind = "gspo" if settings.importance_sampling_level == "sequence" else "ppo"
        return {
            "kind": kind,
            "clip_low": settings.epsilon_low,
            "clip_high": settings.epsilon_high,
            "delta": settings.delta,
        }
    if settings.loss_type == "cispo":
        return {"kind": "cispo", "bounds": "absolute", "clip_high": settings.epsilon_high}
    if settings.loss_type == "sapo":
        return {
            "kind": "sapo",
            "tau_positive": settings.sapo_temperature_pos,
            "tau_negative": settings.sapo_temperature_neg,
        }
    given = settings.vespo or {}
    return {
        "kind": "vespo",
        "k_positive": given.get("k_pos", settings.vespo_k_pos),
        "lambda_positive": max(given.get("lambda_pos", settings.vespo_lambda_pos), LEAST_LAMBDA),
        "k_negative": given.get("k_neg", settings.vespo_k_neg),
        "lambda_negative": max(given.get("lambda_neg", settings.vespo_lambda_neg), LEAST_LAMBDA),
    }


def _notes(settings: LigerSettings) -> list[str]:
    notes = []
    if settings.beta and not settings.use_ref_model:
        notes.append("without a reference the KL penalty is of the policy against itself: 0, whatever beta")
    if settings.loss_type == "cispo":
        notes.append(f"cispo bounds the ratio by epsilon_high itself, {settings.epsilon_high:g}, and not from below")
    if settings.loss_type not in (*CLIPPED, "cispo"):
        notes.append(f"epsilon_low, epsilon_high and delta have no effect on {settings.loss_type}")
    if settings.loss_type == "luspo":
        notes.append(
            "luspo here is the sum over a row's tokens; Liger 0.8.5 averages over all positions and ignores "
            "the mask as soon as a term is one a token, so padding leaks into its loss and gradient"
        )
    if DENOMINATORS[settings.loss_type].get("documents_counted"):
        notes.append("rows in which nothing counts are rows of the mean")
    if settings.loss_type in COUNTED and settings.num_items_in_batch is None:
        notes.append("without num_items_in_batch the tokens of this call are counted")
    if settings.num_items_in_batch is not None and settings.loss_type not in COUNTED:
        notes.append(f"num_items_in_batch has no effect on {settings.loss_type}")
    return notes


def counts(settings: LigerSettings) -> GivenCounts | None:
    """The tokens of the generation batch, for loss types that are divided by them; at least 1."""
    if not _is_counted(settings):
        return None
    return GivenCounts(tokens=max(settings.num_items_in_batch or 0.0, 1.0))


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of `LigerFusedLinearGRPOLoss`; where it counts exactly, with the count that it must be given."""
    surrogate, kl, correction = spec.surrogate, spec.kl, spec.correction
    found: dict[str, Any] = {
        "loss_type": _loss_type(spec),
        "beta": kl.coefficient,
        "use_bias_correction_kl": kl.importance != "none",
    }
    if surrogate.kind in ("ppo", "gspo"):
        found |= {
            "epsilon_low": surrogate.clip_low,
            "epsilon_high": surrogate.clip_high,
            "delta": surrogate.delta,
            "importance_sampling_level": "sequence" if surrogate.kind == "gspo" else "token",
        }
    elif surrogate.kind == "cispo":
        found["epsilon_high"] = surrogate.clip_high
    elif surrogate.kind == "sapo":
        found |= {"sapo_temperature_pos": surrogate.tau_positive, "sapo_temperature_neg": surrogate.tau_negative}
    else:
        found |= {
            "vespo_k_pos": surrogate.k_positive,
            "vespo_lambda_pos": surrogate.lambda_positive,
            "vespo_k_neg": surrogate.k_negative,
            "vespo_lambda_neg": surrogate.lambda_negative,
        }
    if spec.denominator == "constant" and spec.denominator_constant is not None:
        found["max_completion_length"] = int(spec.denominator_constant)
    if correction.ratio in ("given", "given_document_mean"):
        found["vllm_is"] = "token" if correction.ratio == "given" else "sequence"
    elif correction.acts:
        raise refuse("Liger", "a correction that it makes itself", "it takes ready-made weights (vllm_is_ratio)")
    if spec.scaling.counts == "step":
        found["num_items_in_batch"] = 1.0
    return checked_back("Liger", spec, LigerSettings, translate, found)


def _loss_type(spec: LossSpec) -> str:
    kind = spec.surrogate.kind
    if kind in ("sapo", "cispo", "vespo"):
        return kind
    types = {"document": "grpo", "constant": "dr_grpo", "document_sum": "luspo", "token": "dapo"}
    if kind not in ("ppo", "gspo") or spec.denominator not in types:
        raise refuse(
            "Liger",
            f"the surrogate {kind!r} with the denominator {spec.denominator!r}",
            "its loss types are PPO's clip on tokens or rows, sapo, cispo and vespo",
        )
    return types[spec.denominator]


# ---- replays ---------------------------------------------------------------------------------------------------


def case_settings(case: Case) -> dict[str, Any]:
    """Which arrays are there decides, too: the reference, and the shape of ready-made weights."""
    found = {"use_ref_model": any(case.get(name) is not None for name in ("ref_logprobs", "ref_hidden")), **case.config}
    weights = case.get("is_weights")
    if weights is not None:
        found["vllm_is"] = "token" if weights.shape == case.shape else "sequence"
    return found


def metrics(replayed: Replayed) -> dict[str, float]:
    """What a loss reports that has no clip, or no reference."""
    settings = replayed.settings
    found = {"clip_fraction": 0.0} if settings.loss_type in ("sapo", "vespo") else {}
    return found | ({"kl": 0.0} if settings.beta and not settings.use_ref_model else {})


def policy_loss_case(case: Case) -> dict[str, Any]:
    """The loss, from hidden states."""
    return fused_linear_policy_loss(with_weights_of_rows(case))


def dpo_case(case: Case) -> dict[str, Any]:
    """A loss on pairs, from hidden states: rows of the first half are chosen, those of the second rejected."""
    settings = parse_settings(DPOSettings, case.config, where="liger")
    leaves = {
        f"grad_{name}": case[name].clone().requires_grad_()
        for name in ("hidden", "weight", "bias")
        if case.get(name) is not None
    }
    counts_T = (case["targets"] != settings.ignore_index).reshape(-1)
    said = token_logprobs(
        leaves["grad_hidden"].flatten(0, -2), leaves["grad_weight"], case.targets_T, bias_V=leaves.get("grad_bias")
    )
    live_T = said.logprobs_T.detach()
    inputs = LossInputs(
        said.logprobs_T,
        live_T,
        torch.zeros_like(live_T),
        ref_logprobs_T=_reference(case, settings),
        loss_mask_T=counts_T,
        document_ids_T=case.document_ids_T,
    )
    rows = case.shape[0]
    pairs, against = rows // 2, "ref" if settings.use_ref_model else None
    rewards_N = document_rewards(inputs, rows, against=against, average=settings.average_log_prob)
    smoothing = settings.label_smoothing if settings.loss_type in ("exo_pair", "robust") else 0.0
    terms = {
        "policy": Term(
            pair_losses(
                rewards_N[:pairs],
                rewards_N[pairs:],
                beta=settings.beta,
                kind=settings.loss_type,
                label_smoothing=smoothing,
                modulation=settings.discopop_tau,
            )
        )
    }
    all_P = torch.ones_like(rewards_N[:pairs], requires_grad=False)
    pair_P = pair_weights(all_P)
    weights = {"policy": TokenWeights(pair_P, pair_P)}
    if settings.compute_nll_loss:
        likelihoods_N = document_rewards(inputs, rows, against=None)
        terms["nll"] = Term(likelihoods_N[:pairs], coefficient=-settings.alpha, weight="chosen_token")
        token_P = pair_weights(all_P, pairs=len(torch.nonzero(case.shaped(counts_T)[:pairs])))
        weights["chosen_token"] = TokenWeights(token_P, token_P)
    total = reduce_terms(terms, weights, all_P.bool())["total"].value
    total.backward()
    return {"loss": total.detach(), **{name: leaf.grad for name, leaf in leaves.items()}, "metrics": {}}


def _reference(case: Case, settings: DPOSettings) -> Tensor | None:
    """[T] log-probabilities of the reference; one without a head of its own has the policy's."""
    if not settings.use_ref_model:
        return None
    weight_VD, bias_V = case.get("ref_weight"), case.get("ref_bias")
    if weight_VD is None:
        weight_VD, bias_V = case["weight"], case.get("bias")
    return token_logprobs(case["ref_hidden"].flatten(0, -2), weight_VD, case.targets_T, bias_V=bias_V).logprobs_T


SYSTEM = System(
    name="liger",
    title="Liger-Kernel",
    version="0.8.5",
    settings=LigerSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["liger"],
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    metrics=metrics,
    replays={"fused_linear_policy_loss": policy_loss_case, "fused_linear_dpo": dpo_case},
)
