"""ServiceNow/PipelineRL: one step on packed documents, divided by a configured number of them.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.pipelinerl import metrics as named
from workbench.systems.pipelinerl.replay import advantage, further_metrics, peer_settings, policy_loss_logits
from workbench.systems.pipelinerl.settings import PipelineRLSettings
from workbench.systems.pipelinerl.translate import CONTRACTS, back, counts, temperature, translate
from workbench.systems.registry import System

SYSTEM = System(
    name="pipelinerl",
    title="PipelineRL",
    version="58d39345",
    settings=PipelineRLSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    temperature=temperature,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={"policy_loss_logits": policy_loss_logits, "advantage": advantage},
    arrays=(
        "old_logprobs",
        "ref_logprobs",
        "rewards",
        "group_tokens",
        "label_counts",
        "num_labels",
        "overflow",
        "token_ids",
    ),
    arrays_of={"advantage": ("rewards", "group_ids")},
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
