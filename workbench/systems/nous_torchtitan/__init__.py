"""The GRPO step of NousResearch/torchtitan: rows of tokens from logits, a matrix of losses, two ways to reduce it.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.nous_torchtitan import metrics as named
from workbench.systems.nous_torchtitan.replay import masked, policy_loss_logits, reward_norm
from workbench.systems.nous_torchtitan.settings import NousSettings
from workbench.systems.nous_torchtitan.translate import CONTRACTS, back, translate
from workbench.systems.registry import LOGPROBS, System

SYSTEM = System(
    name="nous_torchtitan",
    title="the torchtitan fork of Nous Research",
    version="94d6abd4",
    settings=NousSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    replays={"policy_loss_logits": policy_loss_logits, "aggregation": masked, "advantage": reward_norm},
    arrays=LOGPROBS,
    arrays_of={"aggregation": ("values", "mask", "cotangent"), "advantage": ("rewards", "group_ids")},
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
