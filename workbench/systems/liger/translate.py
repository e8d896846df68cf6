"""From options of linkedin/Liger-Kernel to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.liger.settings import LigerSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported
from workbench.systems.trl.settings import COUNTED
from workbench.systems.trl.translate import CLIPPED, documents_counted, fields_of, options_of

CONTRACTS: Mapping[str, ScalingSpec] = {
    # A kernel: the caller's own scaling comes on top.
    "num_items_in_batch": ScalingSpec(),
    "local counts": ScalingSpec(counts="micro_batch"),
}


def translate(settings: LigerSettings) -> Translation:
    """Translate the fused policy loss."""
    kind, contract = settings.loss_type, "num_items_in_batch" if _is_counted(settings) else "local counts"
    beta = settings.beta if settings.use_ref_model else 0.0
    correction: dict[str, Any] = {}
    if settings.vllm_is is not None:
        correction = {"ratio": "given" if settings.vllm_is == "token" else "given_document_mean"}
        if kind == "vespo":
            correction["enters"] = "sequence_weight"
    spec = LossSpec(
        name="grpo",
        **fields_of(settings, settings.epsilon_low, settings.epsilon_high, beta),
        correction=correction,
        compat={"documents_counted": documents_counted(kind), "scaling": CONTRACTS[contract]},
    )
    return Translation(spec, tuple(_notes(settings)), ("vllm_is", "num_items_in_batch"))


def _is_counted(settings: LigerSettings) -> bool:
    return settings.loss_type in COUNTED and settings.num_items_in_batch is not None


def _notes(settings: LigerSettings) -> list[str]:
    notes = []
    if settings.beta and not settings.use_ref_model:
        notes.append("without a reference the KL penalty is of the policy against itself: 0 for any beta")
    if settings.loss_type == "cispo":
        notes.append(f"cispo bounds the ratio by epsilon_high itself, {settings.epsilon_high:g}, and not from below")
    if settings.loss_type not in (*CLIPPED, "cispo"):
        notes.append(f"epsilon_low, epsilon_high and delta have no effect on {settings.loss_type}")
    if settings.loss_type == "luspo":
        notes.append(
            "luspo here is the sum over a row's tokens; Liger 0.8.5 averages over all positions and ignores "
            "the mask as soon as a term has one value per token, so padding leaks into its loss and gradient"
        )
    if documents_counted(settings.loss_type) == "all":
        notes.append("rows without trained tokens count in the mean over rows")
    if settings.loss_type in COUNTED and settings.num_items_in_batch is None:
        notes.append("without num_items_in_batch the tokens of this call are counted")
    if settings.num_items_in_batch is not None and settings.loss_type not in COUNTED:
        notes.append(f"num_items_in_batch has no effect on {settings.loss_type}")
    return notes


def counts(settings: LigerSettings) -> GivenCounts | None:
    """Return the tokens of the generation batch, for loss types that are divided by them; at least 1."""
    if not _is_counted(settings):
        return None
    return GivenCounts(tokens=max(settings.num_items_in_batch or 0.0, 1.0))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return options of `LigerFusedLinearGRPOLoss`; with the count that it must be given if it counts exactly."""
    correction = spec.correction
    settings: dict[str, Any] = {
        "loss_type": _loss_type(spec),
        **options_of(spec, "epsilon_low"),
        "use_bias_correction_kl": spec.kl.importance != "none",
    }
    if spec.surrogate.kind in ("ppo", "gspo"):
        settings["importance_sampling_level"] = "sequence" if spec.surrogate.kind == "gspo" else "token"
    if correction.ratio in ("given", "given_document_mean"):
        settings["vllm_is"] = "token" if correction.ratio == "given" else "sequence"
    elif correction.acts:
        raise unsupported("Liger", "a correction that it makes itself", "it takes ready-made weights (vllm_is_ratio)")
    if spec.compat.scaling.counts == "step":
        settings["num_items_in_batch"] = 1.0  # any number: that it is given selects the contract
    return checked_back("Liger", spec, LigerSettings, translate, settings)


def _loss_type(spec: LossSpec) -> str:
    kind = spec.surrogate.kind
    if kind in ("sapo", "cispo", "vespo"):
        return kind
    types = {"document": "grpo", "constant": "dr_grpo", "document_sum": "luspo", "token": "dapo"}
    if kind not in ("ppo", "gspo") or spec.denominator not in types:
        raise unsupported(
            "Liger",
            f"the surrogate {kind!r} with the denominator {spec.denominator!r}",
            "its loss types are PPO's clip on tokens or rows, sapo, cispo and vespo",
        )
    return types[spec.denominator]
