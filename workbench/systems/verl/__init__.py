"""verl-project/verl: the actor's policy losses, its critic, advantage estimators and rollout correction.

Names and defaults are those of `ActorConfig`, `PolicyLossConfig`, `RolloutCorrectionConfig` and of the functions in
``trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``.

Letters: T packed tokens.
"""

from __future__ import annotations

from workbench.systems.registry import BATCH, LOGPROBS, VALUES, System
from workbench.systems.replays import is_correction
from workbench.systems.verl import metrics as named
from workbench.systems.verl.advantages import advantages
from workbench.systems.verl.correction import (
    TITLE,
    RolloutCorrection,
    correction_outputs,
    translate_correction,
)
from workbench.systems.verl.replay import (
    actor_loss,
    aggregated,
    bypass_metrics,
    case_settings,
    critic_loss,
    peer_settings,
    penalty,
    undefined_loss,
)
from workbench.systems.verl.settings import ActorSettings
from workbench.systems.verl.translate import CONTRACTS, back, counts, translate

SYSTEM = System(
    name="verl",
    title=TITLE,
    version="1dda039b",
    settings=ActorSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=bypass_metrics,
    outputs=undefined_loss,
    replays={
        "policy_loss": actor_loss,
        "kl_estimator": penalty,
        "aggregation": aggregated,
        "value_loss": critic_loss,
        "advantage": advantages,
        "is_correction": is_correction(RolloutCorrection, translate_correction, correction_outputs),
    },
    arrays=(*LOGPROBS, "is_weights", "entropies"),
    arrays_of={
        "kl_estimator": (*BATCH, "cotangent"),
        "aggregation": VALUES,
        "value_loss": VALUES,
        "advantage": (
            *BATCH,
            "token_rewards",
            "rewards",
            "group_ids",
            "values",
            "baselines",
            "sum_pi_squared",
            "is_weights",
        ),
        "is_correction": BATCH,
    },
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
