"""ServiceNow/Fast-LLM: losses on the logits of packed documents.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from workbench.systems.fast_llm import metrics as named
from workbench.systems.fast_llm.replay import (
    case_settings,
    dpo_packed,
    entropy_loss,
    peer_settings,
    registered,
    z_loss_case,
)
from workbench.systems.fast_llm.settings import FastLLMSettings
from workbench.systems.fast_llm.translate import CONTRACTS, back, counts, divisor, translate
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
    scaling=CONTRACTS,
    replays={"cross_entropy_family": entropy_loss, "z_loss": z_loss_case, "dpo_packed": dpo_packed},
    arrays=("old_logprobs", "label_counts", "num_labels"),
    arrays_of={
        "cross_entropy_family": ("logits", "target", "mask", "grad_logits_in"),
        "z_loss": ("logits", "mask", "grad_logits_in"),
        "dpo_packed": ("logits", "ref_logits", "targets", "grad_logits_in"),
    },
    aliases=named.names,
)
