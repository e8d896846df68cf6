"""THUDM/slime: losses on packed samples, summed over samples, and divided when the step is known.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.registry import LOGPROBS, System
from workbench.systems.slime import metrics as named
from workbench.systems.slime.replay import (
    advantage,
    case_settings,
    further_metrics,
    logprobs,
    peer_settings,
    policy_loss,
)
from workbench.systems.slime.settings import SlimeSettings
from workbench.systems.slime.translate import CONTRACTS, back, micro_batch_sums, translate

SYSTEM = System(
    name="slime",
    title="slime",
    version="624b824a",
    settings=SlimeSettings,
    translate=translate,
    back=back,
    counts=micro_batch_sums,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=further_metrics,
    scaling=CONTRACTS,
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "logprobs": logprobs,
        "advantage": advantage,
    },
    arrays=(*LOGPROBS, "entropies", "sample_denominators"),
    arrays_of={
        "logprobs": ("logits", "targets", "cotangent_logprobs", "cotangent_entropy", "keep_mask"),
        "advantage": ("token_rewards", "values"),
    },
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
