"""ServiceNow/Fast-LLM: losses on the logits of packed documents.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.contracts import CONTRACTS
from workbench.systems.fast_llm.replay import (
    case_settings,
    dpo_packed,
    entropy_loss,
    peer_settings,
    registered,
    z_loss_case,
)
from workbench.systems.fast_llm.settings import FastLLMSettings
from workbench.systems.fast_llm.translate import back, counts, divisor, translate
from workbench.systems.registry import System

SYSTEM = System(
    name="fast_llm",
    title="Fast-LLM",
    version="7d61a1ba",
    settings=FastLLMSettings,
    translate=translate,
    back=back,
    counts=counts,
    case_settings=case_settings,
    temperature=divisor,
    peer_settings=peer_settings,
    metrics=registered,
    scaling=CONTRACTS["fast_llm"],
    replays={"cross_entropy_family": entropy_loss, "z_loss": z_loss_case, "dpo_packed": dpo_packed},
)
