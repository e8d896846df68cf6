"""AReaL: decoupled PPO, GSPO, SAPO and CISPO, and rejection of tokens that the sampler rates differently.

Its "proximal" log-probabilities are the old policy's here, its "old" or "behave" ones the sampler's.

Letters: T packed tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.losses.build import surrogate_ratio
from workbench.rollouts.advantages.tokens import standardize
from workbench.specs.losses import LossSpec
from workbench.systems.areal import metrics as named
from workbench.systems.areal.dump import read_dump
from workbench.systems.areal.settings import ArealSettings, CriticSettings, NormalizationSettings
from workbench.systems.areal.translate import CONTRACTS, back, translate
from workbench.systems.case import Case
from workbench.systems.registry import LOGPROBS, VALUES, System
from workbench.systems.replays import Replayed, critic_loss


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; the function's name selects the loss."""
    return {"use_sapo_loss": "sapo" in case.function, "use_cispo_loss": "cispo" in case.function, **case.config}


def outputs(replayed: Replayed) -> dict[str, Tensor]:
    """Return the ratio, and the result of rejection on each token."""
    extras = replayed.evaluated.terms["policy"].extras
    arrays = {"importance_weight": surrogate_ratio(replayed.inputs, replayed.translation.spec)}
    if replayed.settings.rejection_sampling is not None:
        arrays |= {"behave_is_weight": extras["applied_weight"], "kept_mask": extras["kept"].double()}
    return arrays


def critic(case: Case) -> dict[str, Any]:
    """Replay the critic's loss, a mean over tokens."""
    settings = case.options(CriticSettings)
    outputs, _ = critic_loss(
        case,
        LossSpec(name="grpo"),
        clip=settings.value_eps_clip,
        kind=settings.loss_fn_type,
        delta=settings.huber_delta,
    )
    return outputs


def normalization(case: Case) -> dict[str, Any]:
    """Replay the normalization of values; where the mask is 0, the result is that of the value 0."""
    settings, mask = case.options(NormalizationSettings), case.get("mask")
    mask, ddof = None if mask is None else mask.bool(), int(settings.unbiased)
    return {"result": standardize(case["values"], mask, dims=settings.dim, ddof=ddof, epsilon=settings.eps)}


SYSTEM = System(
    name="areal",
    title="AReaL",
    version="1.0.4, and cbff54d6 after it",
    settings=ArealSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    case_settings=case_settings,
    outputs=outputs,
    replays={"value_loss": critic, "normalization": normalization},
    arrays=LOGPROBS,
    arrays_of={"value_loss": VALUES, "normalization": ("values", "mask")},
    aliases=named.names,
    read_dump=read_dump,
)
