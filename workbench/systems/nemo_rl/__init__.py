"""NVIDIA-NeMo/RL: one clipped loss with many options, supervised and preference losses, advantages, shaped rewards.

Letters: T packed tokens | N documents | P pairs.
"""

from __future__ import annotations

from workbench.systems.nemo_rl import metrics as named
from workbench.systems.nemo_rl.replay import (
    advantage,
    case_settings,
    dpo,
    further_metrics,
    kl_spec,
    nll,
    peer_settings,
    policy_loss,
    preference,
    reward_shaping,
    value,
)
from workbench.systems.nemo_rl.settings import ClippedPGSettings
from workbench.systems.nemo_rl.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import BATCH, ESTIMATOR, LOGPROBS, VALUES, System
from workbench.systems.replays import kl_estimator

SYSTEM = System(
    name="nemo_rl",
    title="NeMo-RL",
    version="7ea279ab (2026-08-22)",
    settings=ClippedPGSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "nll": nll,
        "dpo": dpo,
        "preference": preference,
        "value_loss": value,
        "kl_estimator": kl_estimator(kl_spec),
        "advantage": advantage,
        "reward_shaping": reward_shaping,
    },
    arrays=(*LOGPROBS, "sample_mask", "rewards", "logprobs_unfiltered"),
    arrays_of={
        "nll": (*BATCH, "sample_mask"),
        "dpo": (*BATCH, "sample_mask"),
        "preference": ("rewards", "sample_mask"),
        "value_loss": (*VALUES, "sample_mask"),
        "kl_estimator": ESTIMATOR,
        "advantage": (*BATCH, "rewards", "group_ids", "values", "sample_mask"),
        "reward_shaping": ("rewards", "response_lengths", "truncated"),
    },
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
