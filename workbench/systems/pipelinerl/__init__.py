"""ServiceNow/PipelineRL: one step on packed documents, divided by a configured number of them.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.contracts import CONTRACTS
from workbench.systems.pipelinerl.replay import advantage, further_metrics, peer_settings, policy_loss_logits
from workbench.systems.pipelinerl.settings import PipelineRLSettings
from workbench.systems.pipelinerl.translate import back, counts, temperature, translate
from workbench.systems.registry import System

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
