"""huggingface/trl: `GRPOTrainer`, its loss, its correction for vLLM and its advantages.

Letters: B rows | N documents | K rewards.
"""

from __future__ import annotations

from workbench.systems.registry import CORRECTION, LOGPROBS, System
from workbench.systems.trl import metrics as named
from workbench.systems.trl.replay import (
    advantage_case,
    case_settings,
    correction_case,
    further_metrics,
    peer_settings,
    policy_loss_case,
)
from workbench.systems.trl.settings import TRLSettings
from workbench.systems.trl.translate import CONTRACTS, back, counts, translate

SYSTEM = System(
    name="trl",
    title="TRL",
    version="1.16.0",
    settings=TRLSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={"policy_loss": policy_loss_case, "is_correction": correction_case, "advantage": advantage_case},
    arrays=(*LOGPROBS, "is_weights", "entropies"),
    arrays_of={
        "is_correction": CORRECTION,
        "advantage": ("rewards_per_func", "reward_weights", "group_ids"),
    },
    aliases=named.names,
)
